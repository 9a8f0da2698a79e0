"""Where an engine computes: choosing the device, and the memory that it may use there."""

import importlib.util
from dataclasses import dataclass

import numpy as np

from isobit.engine import memory
from isobit.errors import IsobitError

HOST_CACHE_PART = 4  # one part in so many of the host's free memory holds kept states of a GPU
MOST_HOST_CACHE = 64 << 30
GPU_RESERVE = 1 << 30  # bytes of a GPU that are left to the driver, libraries and fragments


def chosen_device(asked: str) -> str:
    """Either "cpu" or "cuda" for a --device of auto, cpu or cuda; auto takes a GPU that can be used.

    Raises IsobitError, naming what is missing, when a GPU is asked for and there is none.
    """
    if asked == "cpu":
        return "cpu"
    problem = gpu_problem()
    if asked == "auto":
        return "cpu" if problem else "cuda"
    if problem:
        raise IsobitError(f"--device cuda: {problem}")
    return "cuda"


def gpu_problem() -> str | None:
    """Why no GPU can be used, in one line, or None."""
    for module in ("torch", "cuda.core"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{module} is not installed: pip install 'isobit[cuda]', or use --device cpu"
    from isobit.cuda import memory as gpu

    return None if gpu.is_emulated() else gpu.gpu_problem()


@dataclass(frozen=True)
class Placement:
    """The memory of the device that holds weights, states and buffers."""

    device: str

    @property
    def segment_rows(self) -> int:
        """Rows of a deep segment unless a number is asked for: as many as keep the device's products at their rate."""
        return 1024 if self.device == "cpu" else 8192

    @property
    def _on_host(self) -> bool:
        if self.device == "cpu":
            return True
        from isobit.cuda import memory as gpu

        return gpu.is_emulated()

    def loaded(self) -> int:
        """Bytes that are taken: on the CPU by this process, on a GPU by its weights."""
        if self._on_host:
            return memory.anonymous_resident()
        import torch

        return int(torch.cuda.memory_allocated())

    def free(self) -> int:
        """Bytes that the device can still give this process."""
        if self._on_host:
            return memory.available()
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def limit(self, memory_gib: float | None) -> int:
        """The most bytes to use in all: what is asked for, or where there is less, all but a GPU's reserve."""
        loaded, free, asked = self.loaded(), self.free(), int((memory_gib or 0) * memory.GIB)
        if memory_gib and asked <= loaded + free:
            return asked
        return loaded + max(0, free - (0 if self._on_host else GPU_RESERVE))

    def beyond_reach(self, memory_gib: float | None) -> str | None:
        """What to tell a user who asked for more memory than there is, or None."""
        asked, limit = int((memory_gib or 0) * memory.GIB), self.limit(memory_gib)
        if asked <= limit:
            return None
        return (
            f"--memory-gib is {memory.gib(asked)}, but {self.free_text()}: going on with {memory.gib(limit)}, with the "
            "same replies"
        )

    def release(self) -> None:
        """Give memory that is kept for arrays to come back to the device."""
        if self._on_host:
            return
        from isobit.cuda import memory as gpu

        gpu.release()

    def free_text(self) -> str:
        """How much memory is free, in words."""
        if self._on_host:
            return f"the machine has {memory.gib(memory.available())} free"
        import torch

        free, total = torch.cuda.mem_get_info()
        return f"the GPU has {memory.gib(free)} of {memory.gib(total)} free"

    def can_allocate(self, count: int) -> bool:
        """Whether `count` more bytes are to be had."""
        if self._on_host:
            try:
                np.empty(count, dtype=np.uint8)
            except MemoryError:
                return False
            return True
        import torch

        try:
            torch.empty(count, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    def host_cache_bytes(self, host_cache_gib: float | None) -> int:
        """Bytes of host memory for kept states that the device has no room for."""
        if host_cache_gib is not None:
            return int(host_cache_gib * memory.GIB)
        return 0 if self._on_host else min(memory.available() // HOST_CACHE_PART, MOST_HOST_CACHE)

    def within_limit(self, host_bytes: int) -> int:
        """How many of these bytes of host memory count against the device's limit: all where both are one memory."""
        return host_bytes if self._on_host else 0
