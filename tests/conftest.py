"""Checkpoints that many tests read, each written once a run. Tests must not change them: copy first.

Tests leave a GPU alone, so that "auto" is the CPU, unless ISOBIT_TEST_GPU=1: the CUDA tests then run on the GPU.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.synth import synthesize
from isobit.model.load import load_model
from isobit.ops import load_ops

MakeCheckpoint = Callable[..., Path]
ON_GPU = os.environ.get("ISOBIT_TEST_GPU") == "1"

if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """NVRTC is here; kernels can be compiled."""
    from isobit.cuda import compile as compiler
    from isobit.cuda.errors import DeviceError

    try:
        compiler.check_installed()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """make_checkpoint(preset="test", **options of synthesize) -> folder, written at the first call with these."""
    made: dict[str, Path] = {}

    def make(preset: str = "test", **options: Any) -> Path:
        key = repr((preset, sorted(options.items())))
        if key not in made:
            made[key] = synthesize(tmp_path_factory.mktemp(preset) / "checkpoint", preset, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def test_checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """Tiny, of every part that the model has, plain and quantized linears side by side."""
    return make_checkpoint("test")


@pytest.fixture(scope="session")
def demo_checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """What `isobit demo` runs."""
    return make_checkpoint("demo")


@pytest.fixture(scope="session")
def model(test_checkpoint: Path):
    """The tiny checkpoint's model, loaded."""
    return load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=512)


@pytest.fixture
def emulated_cuda() -> Iterator[None]:
    """CUDA ops run on the emulator, on CPU tensors; with ISOBIT_TEST_GPU=1 on the machine's GPU."""
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")
    from isobit.cuda import memory

    if shutil.which(os.environ.get("CXX", "g++")) is None and not ON_GPU:
        pytest.skip("the emulator of CUDA kernels needs a C++ compiler: install g++")
    memory.emulate(not ON_GPU)
    try:
        yield
    finally:
        memory.emulate(False)


@pytest.fixture
def real_gpu() -> None:
    """The machine's GPU, for processes and graphs that the emulator has not."""
    if not ON_GPU:
        pytest.skip("needs a GPU: set ISOBIT_TEST_GPU=1 where there is one")
