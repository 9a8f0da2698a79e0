"""Where CUDA ops get arrays and how they come from and go to the host; the emulator's arrays lie in host memory."""

import gc
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from isobit.cuda.errors import DeviceError
from isobit.errors import first_sentence

OLDEST_CAPABILITY = (8, 0)
EMULATED_MULTIPROCESSORS = 4
PINNED_BYTES = 1 << 20  # an array of fewer bytes is copied at once, sooner than pinned memory is found for it
DOWNLOAD_BYTES = 1 << 16  # that come to the host through pinned memory which is kept for it

_emulated = False
_emulated_capability = (0, 0)


def emulate(on: bool, capability: tuple[int, int] = (0, 0)) -> None:
    """Run kernels on the emulator, on CPU tensors; ops choose as for a GPU of this capability. For tests."""
    global _emulated, _emulated_capability
    _emulated, _emulated_capability = on, capability


def is_emulated() -> bool:
    return _emulated


@cache
def _checked_gpu() -> torch.device:
    problem = gpu_problem()
    if problem:
        raise DeviceError(problem)
    return torch.device("cuda", torch.cuda.current_device())


def gpu_problem() -> str | None:
    """Why no GPU can be used, in one line, or None."""
    if not torch.backends.cuda.is_built():
        return "this PyTorch has no CUDA: install a CUDA build of torch, or use --device cpu"
    trouble = _initialisation_trouble()
    if trouble:
        return f"no usable NVIDIA GPU: {trouble}; mend that, or use --device cpu"
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        name, found = torch.cuda.get_device_name(), ".".join(map(str, capability))
        return f"{name} has compute capability {found}, expected at least 8.0; or use --device cpu"
    return None


def _initialisation_trouble() -> str | None:
    """What PyTorch says when it cannot begin to use a GPU: none there, no driver, one that is too old."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            return None if torch.cuda.is_available() else "PyTorch finds none"
    except (RuntimeError, AssertionError) as error:
        return first_sentence(error)


def device() -> torch.device:
    """Where arrays lie; raises DeviceError, naming what is missing, when there is no usable GPU."""
    return torch.device("cpu") if _emulated else _checked_gpu()


def architecture() -> tuple[int, int]:
    """The compute capability; under the emulator (0, 0), or what `emulate` was told."""
    return _emulated_capability if _emulated else (properties().major, properties().minor)


def most_shared_bytes() -> int:
    """Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide)."""
    capability = architecture()
    if capability in ((8, 6), (8, 9)) or capability[0] == 12:
        return 99 << 10
    return 163 << 10 if capability[0] == 8 else 227 << 10


def multiprocessors() -> int:
    """How many blocks' worth of hardware there is."""
    if _emulated:
        return EMULATED_MULTIPROCESSORS
    return int(properties().multi_processor_count)


@cache
def properties() -> Any:
    """What PyTorch knows of the GPU; not to be asked for under the emulator."""
    return torch.cuda.get_device_properties(device())


def current_stream() -> int:
    """The driver's handle of the stream that this thread launches on."""
    if _raw_stream is None:
        return int(torch.cuda.current_stream().cuda_stream)
    return int(_raw_stream(_checked_gpu().index))


# What PyTorch's own compiler launches with; to make a Stream of it takes longer than a launch.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _allocated(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device())


_allocate: Callable[..., torch.Tensor] = _allocated


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised array; the op that asked for it must write every element."""
    return _allocate(shape, dtype)


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A zeroed array."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device())


def set_allocator(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replace where `empty` and `to_device` get arrays; returns the previous. For the contract's hygiene gate only."""
    global _allocate
    previous, _allocate = _allocate, allocate
    return previous


def to_device(array: Any) -> torch.Tensor:
    """A copy on the device of a NumPy array or tensor, without waiting for it."""
    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(_writable(array))
    if _allocate is not _allocated:
        copy = empty(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        return copy
    if _emulated:
        return tensor.clone().contiguous()
    tensor = tensor.contiguous()
    if tensor.device.type == "cpu" and tensor.nbytes >= PINNED_BYTES:
        tensor = tensor.pin_memory()
    return tensor.to(device(), non_blocking=True)


def release() -> None:
    """Give what PyTorch keeps of freed arrays back to the device, after all work on it has ended."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _writable(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor as a NumPy array, after the device has finished it."""
    if _emulated:
        return tensor.detach().cpu().numpy().copy()
    if 0 < tensor.nbytes <= DOWNLOAD_BYTES and tensor.is_contiguous():
        return Download(tensor).result()
    return tensor.detach().cpu().numpy()


def pinned(nbytes: int) -> torch.Tensor:
    """Uninitialised host memory, uint8 [nbytes], that the device copies from and to without waiting."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not _emulated)


class Moment:
    """A place in the current stream's work that the host can wait for; there is nothing to wait for at first."""

    def __init__(self) -> None:
        self._event = None if _emulated else torch.cuda.Event()

    def mark(self) -> None:
        """Let it be the end of what was given to the stream so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come there."""
        if self._event is not None:
            self._event.synchronize()


class Download:
    """A copy of a contiguous tensor on its way to the host: what the tensor holds when the stream comes here.

    The tensor may be written to again at once. Of up to DOWNLOAD_BYTES the copy goes through memory that is kept.
    """

    def __init__(self, tensor: torch.Tensor):
        self._shape, self._dtype = tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype
        self._slot = _slot(tensor.nbytes)
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        self._slot[0][: tensor.nbytes].copy_(flat, non_blocking=True)
        self._slot[1].mark()

    def result(self) -> np.ndarray:
        """The tensor's values, once they are there; to be asked for once."""
        memory, arrived = self._slot
        arrived.wait()
        count = int(np.prod(self._shape, dtype=np.int64))
        array = memory.numpy()[: count * self._dtype.itemsize].copy().view(self._dtype).reshape(self._shape)
        # The emulator's memory is not pinned.
        if len(memory) == DOWNLOAD_BYTES and not _emulated:
            _free_slots.append(self._slot)
        return array


Slot = tuple[torch.Tensor, Moment]  # pinned memory, and when the last copy to it is done

_free_slots: list[Slot] = []


def _slot(nbytes: int) -> Slot:
    if nbytes > DOWNLOAD_BYTES:
        return pinned(nbytes), Moment()
    try:
        return _free_slots.pop()
    except IndexError:
        return pinned(DOWNLOAD_BYTES), Moment()
