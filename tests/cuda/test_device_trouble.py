"""What can be wrong with a GPU, its software or the store of compiled kernels: one line, or another way round."""

import enum
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from isobit import errors  # noqa: E402
from isobit.cuda import compile as compiler  # noqa: E402
from isobit.cuda import kernels, memory, store  # noqa: E402
from isobit.cuda.errors import DeviceError, DeviceMemoryError, KernelError  # noqa: E402
from isobit.engine import placement  # noqa: E402
from isobit.errors import IsobitError  # noqa: E402

SOURCE = "cuda/probe.cu"


class Code(enum.IntEnum):
    """The driver's answers that matter here."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_LAUNCH_FAILED = 719


class Driver:
    """A driver that loads modules whose bytes are right, and answers launches as it is told."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=2
    )

    def __init__(self, right: bytes, launched: Code = Code.CUDA_SUCCESS, refused: Code = Code.CUDA_ERROR_INVALID_IMAGE):
        self.right, self.launched, self.refused = right, launched, refused
        self.loads: list[bytes] = []

    def cuModuleLoadData(self, code):
        self.loads.append(code)
        return (Code.CUDA_SUCCESS, "module") if code == self.right else (self.refused,)

    def cuModuleGetFunction(self, module, name):
        return Code.CUDA_SUCCESS, "function"

    def cuFuncGetAttribute(self, attribute, function):
        return Code.CUDA_SUCCESS, 0

    def cuLaunchKernel(self, *arguments):
        return (self.launched,)


class Compiler:
    """Gives the binaries it is told to, in order."""

    version = (13, 0)

    def __init__(self, *binaries: bytes):
        self.binaries = list(binaries)

    def compile(self, name, defines, architecture):
        return self.binaries.pop(0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """gpu(driver, compiler): a kernel on a GPU of these, with an empty store."""
    bindings = pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr(memory, "architecture", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(memory, "current_stream", lambda: 0)

    def kernel(driver: Driver, made: Compiler) -> kernels.Kernel:
        monkeypatch.setattr(bindings, "driver", driver, raising=False)
        monkeypatch.setattr(compiler, "_made", [made])
        return kernels.Kernel(SOURCE, "probe", {})

    return kernel


def kept(folder) -> list:
    return sorted(folder.glob("*.cubin"))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:-3], id="truncated"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: b"\x7fELF of another program", id="foreign"),
        pytest.param(lambda content: content[:40] + b"!" + content[41:], id="changed"),
    ],
)
def test_a_damaged_file_in_the_store_is_compiled_again(gpu, tmp_path, damage):
    good = b"\x7fELF" + bytes(100)
    gpu(Driver(good), Compiler(good))((1,), 32)
    (file,) = kept(tmp_path / "store")
    whole = file.read_bytes()
    gpu(Driver(good), Compiler())((1,), 32)
    file.write_bytes(damage(whole))
    gpu(Driver(good), Compiler(good))((1,), 32)
    assert file.read_bytes() == whole


def test_a_kept_binary_that_the_driver_refuses_is_built_once_more(gpu, tmp_path):
    gpu(Driver(b"old"), Compiler(b"old"))((1,), 32)
    driver = Driver(b"new")
    gpu(driver, Compiler(b"new"))((1,), 32)
    assert driver.loads == [b"old", b"new"]
    again = Driver(b"new")
    gpu(again, Compiler())((1,), 32)
    assert again.loads == [b"new"]


def test_what_the_driver_refuses_twice_is_an_error_in_one_line(gpu):
    driver = Driver(b"none is")
    with pytest.raises(KernelError, match=r"probe\(\): the CUDA driver says CUDA_ERROR_INVALID_IMAGE: update the dri"):
        gpu(driver, Compiler(b"one", b"two"))((1,), 32)
    assert driver.loads == [b"one", b"two"]


@pytest.mark.parametrize("moment", ["load", "launch"])
def test_a_driver_without_memory_is_told_apart(gpu, moment):
    short = Code.CUDA_ERROR_OUT_OF_MEMORY
    driver = Driver(b"other", refused=short) if moment == "load" else Driver(b"code", launched=short)
    with pytest.raises(DeviceMemoryError, match="out of memory for the kernel probe") as caught:
        gpu(driver, Compiler(b"code"))((1,), 32)
    assert errors.ran_out(caught.value)
    with pytest.raises(KernelError, match="CUDA_ERROR_LAUNCH_FAILED") as failed:
        gpu(Driver(b"code", launched=Code.CUDA_ERROR_LAUNCH_FAILED), Compiler(b"code"))((1,), 32)
    assert not errors.ran_out(failed.value)


@pytest.mark.parametrize("place", ["a file", "below a file", "an unwritable folder"])
def test_a_store_that_cannot_be_used_is_bypassed(gpu, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    if place == "an unwritable folder":

        def refuse(*arguments, **named):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    else:
        monkeypatch.setenv("ISOBIT_CUDA_CACHE", str(tmp_path / "file" / ("store" if place == "below a file" else "")))
    driver = Driver(b"code")
    gpu(driver, Compiler(b"code"))((1,), 32)
    assert driver.loads == [b"code"]
    assert store.read("anything") is None


def test_a_disk_that_fills_leaves_nothing_in_the_store(gpu, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    gpu(Driver(b"code"), Compiler(b"code"))((1,), 32)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "Found no NVIDIA driver"),
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", "found version 11040"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
        ("CUDA driver initialization failed, you might not have a CUDA gpu.", "initialization failed"),
    ],
)
def test_no_gpu_and_an_old_driver_are_told_in_pytorchs_words(monkeypatch, said, shown):
    def fail():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", fail)
    problem = memory.gpu_problem()
    assert shown in problem
    assert problem.startswith("no usable NVIDIA GPU: ")
    assert problem.endswith("; mend that, or use --device cpu")
    assert "Please" not in problem
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda module: module)
    with pytest.raises(IsobitError, match=r"^--device cuda: no usable NVIDIA GPU"):
        placement.chosen_device("cuda")
    assert placement.chosen_device("auto") == "cpu"


def test_pytorch_without_cuda_and_an_old_gpu_are_told(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "install a CUDA build of torch, or use --device cpu" in memory.gpu_problem()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch finds none" in memory.gpu_problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert "Tesla V100 has compute capability 7.0, expected at least 8.0" in memory.gpu_problem()
    memory._checked_gpu.cache_clear()
    with pytest.raises(DeviceError, match=r"expected at least 8\.0"):
        memory.device()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert memory.gpu_problem() is None


@pytest.mark.parametrize("module", ["torch", "cuda.core"])
def test_a_missing_package_is_named(monkeypatch, module):
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None if name == module else name)
    with pytest.raises(IsobitError, match=rf"{module} is not installed: pip install 'isobit\[cuda\]'"):
        placement.chosen_device("cuda")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_errors_of_memory_are_told_from_others(error, expected):
    assert errors.ran_out(error) is expected
