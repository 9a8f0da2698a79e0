"""Kernel sources to GPU binaries, with NVRTC through cuda.core; needs no GPU."""

import os
import re
import threading
from typing import Any

from isobit.cuda import sources, store
from isobit.cuda.errors import DeviceError, KernelError

CHECKING_VARIABLE = "ISOBIT_RACECHECK"  # in the environment, 1: kernels that compute-sanitizer's racecheck can follow
CHECKING_MACROS = {"EVERY_LANE_ARRIVES": 1, "COPIES_ONCE": 1}

_lock = threading.Lock()


def check_installed() -> None:
    """Raises DeviceError where the compiler is not installed."""
    _compiler()


def architecture_name(capability: tuple[int, int]) -> str:
    """The compile target of a compute capability: (9, 0) -> "sm_90a"; from Hopper on with the chip's own features."""
    number = 10 * capability[0] + capability[1]
    return f"sm_{number}{'a' if number >= 90 else ''}"


def binary(name: str, defines: dict[str, int], architecture: str, anew: bool = False) -> bytes:
    """The cubin of a source with macros, from the store, or compiled now if it is not there or wanted `anew`.

    With ISOBIT_RACECHECK=1 in the environment it is one whose turns and copies compute-sanitizer's racecheck can
    follow; the bytes that it gives are the same. Raises DeviceError where the compiler is not installed, KernelError
    with its first complaint.
    """
    compiler = _compiler()
    if os.environ.get(CHECKING_VARIABLE) == "1":
        defines = {**defines, **CHECKING_MACROS}
    key = sources.digest(name, sorted(defines.items()), architecture, compiler.version)
    file = f"{name.replace('/', '-')}-{key}.cubin"
    kept = None if anew else store.read(file)
    if kept is None:
        kept = compiler.compile(name, defines, architecture)
        store.write(file, kept)
    return kept


class _Compiler:
    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            raise DeviceError(
                f"the CUDA compiler is not installed ({error.name}): install isobit with its extra, "
                "pip install 'isobit[cuda]'"
            ) from None
        self._program: Any = Program
        self._options: Any = ProgramOptions
        try:
            self.version = tuple(nvrtc.nvrtcVersion()[1:])
        except RuntimeError:
            raise DeviceError(
                "NVRTC, the CUDA compiler's library, is not found: PyTorch's CUDA builds bring it; otherwise "
                "pip install nvidia-cuda-nvrtc"
            ) from None

    def compile(self, name: str, defines: dict[str, int], architecture: str) -> bytes:
        options = self._options(
            arch=architecture,
            std="c++17",
            fma=False,
            ftz=False,
            device_as_default_execution_space=True,
            prec_div=True,
            prec_sqrt=True,
            define_macro=[("NVRTC", "1"), *((key, str(value)) for key, value in sorted(defines.items()))],
            include_path=[str(sources.ROOT), str(sources.ROOT / "cuda")],
            name=name,
        )
        try:
            with _lock:
                return bytes(self._program(sources.text(name), "c++", options).compile("cubin").code)
        except Exception as error:
            raise KernelError(
                f"{name} with {defines} does not compile for {architecture}: {complaint(error)}"
            ) from None


_made: list[_Compiler] = []


def _compiler() -> _Compiler:
    if not _made:
        _made.append(_Compiler())
    return _made[0]


def complaint(error: Exception) -> str:
    """The first line of a compiler's log that names an error."""
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else repr(error))
