"""Kernels compiled by g++ and run on the CPU, thread by thread: for tests on machines without a GPU."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from isobit.cuda import kernels, sources, store
from isobit.cuda.errors import DeviceError, KernelError

FLAGS = ("-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-DEMULATED", "-w")
FUSED = ("-mfma", "-mf16c")
SCHEDULER = "cuda/emulator/emulator.cpp"


class EmulatedKernel:
    """One kernel of a source on the emulator; a wrong use of it raises KernelError."""

    def __init__(self, source: str, name: str, defines: dict[str, int]):
        self._name = f"{name} of {source}"
        library = ctypes.CDLL(str(_library(source, name, tuple(sorted(defines.items())))))
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p

    def __call__(
        self, grid: kernels.Size, block: kernels.Size, *arguments: Any, shared: int = 0, early: bool = False
    ) -> None:
        taken, free = kernels.take_arguments(arguments)
        shape = (ctypes.c_uint32 * 6)(*kernels.three(grid), *kernels.three(block))
        awaited = _regions(arguments) if early else []
        regions = (_Region * len(awaited))(*awaited)
        addresses, bytes_shared = ctypes.c_void_p(taken.address), ctypes.c_size_t(shared)
        problem = self._launch(shape, bytes_shared, addresses, regions, ctypes.c_size_t(len(awaited)))
        free.append(taken)
        if problem:
            raise KernelError(f"kernel {self._name}: {problem.decode()}")


class _Region(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def _regions(arguments: tuple[Any, ...]) -> list[_Region]:
    """The arrays that an early kernel must await."""
    fields = [argument.values for argument in arguments if isinstance(argument, kernels.Fields)]
    tensors = [argument for argument in chain(arguments, *fields) if hasattr(argument, "data_ptr")]
    return [_Region(tensor.data_ptr(), _extent(tensor)) for tensor in tensors if tensor.numel()]


def _extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to its last one's end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@cache
def _library(source: str, name: str, defines: tuple[tuple[str, int], ...]) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise DeviceError("the emulator needs a C++ compiler: install g++")
    flags = (*FLAGS, *(FUSED if os.uname().machine == "x86_64" else ()))
    key = sources.digest(
        source, name, defines, flags, sources.text(SCHEDULER), sources.text("cuda/emulator/emulator.h")
    )
    file = store.folder() / f"emulated-{name}-{key}.so"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, flags, source, name, defines, file)
    return file


def _compile(compiler: str, flags: tuple, source: str, name: str, defines: tuple, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unit = Path(folder) / "unit.cpp"
        unit.write_text(f'#include "{source}"\nEMULATED_KERNEL({name})\n#include "{SCHEDULER}"\n', encoding="utf-8")
        output = Path(folder) / "kernel.so"
        macros = [f"-D{key}={value}" for key, value in defines]
        paths = [f"-I{sources.ROOT}", f"-I{sources.ROOT / 'cuda'}", f"-I{sources.ROOT / 'cuda' / 'emulator'}"]
        result = subprocess.run(
            [compiler, *flags, *macros, *paths, str(unit), "-o", str(output)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise KernelError(f"{source} with {dict(defines)} does not compile for the emulator: {lines[0]}")
        os.replace(output, file)
