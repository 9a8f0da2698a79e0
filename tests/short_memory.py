"""Memory that runs out where a test says: in the allocators of the CPU's ops, of their tapes and of the CUDA ops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isobit.ops import buffers, tape

Fails = Callable[[int, int], bool]  # of an allocation's number, from 1, and its bytes


class Allocations:
    """Counts allocations; those of which `fails` says so fail, with `error`."""

    def __init__(self, fails: Fails, error: type[Exception] = MemoryError):
        self.fails, self.error = fails, error
        self.count = self.failures = 0

    def take(self, nbytes: int) -> None:
        self.count += 1
        if self.fails(self.count, nbytes):
            self.failures += 1
            raise self.error(f"no room for {nbytes:,} bytes. A test says so")


def never(number: int, nbytes: int) -> bool:
    return False


def only(chosen: int) -> Fails:
    """The allocation of this number fails."""
    return lambda number, nbytes: number == chosen


def every(step: int) -> Fails:
    """Each so many allocations one fails."""
    return lambda number, nbytes: number % step == 0


def larger_than(limit: int) -> Fails:
    """Allocations of more than so many bytes fail."""
    return lambda number, nbytes: nbytes > limit


@contextmanager
def short_memory(fails: Fails = never) -> Iterator[Allocations]:
    """Have the CPU's ops run out of memory."""
    allocations = Allocations(fails)
    new_block = tape.Arena._new_block

    def empty(shape: Any, dtype: Any) -> np.ndarray:
        allocations.take(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.empty(shape, dtype)

    def block(arena: tape.Arena, size: int) -> bytearray:
        allocations.take(size)
        return new_block(arena, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "_allocate", empty)
        patch.setattr(buffers, "np", SimpleNamespace(empty=empty))
        patch.setattr(tape.Arena, "_new_block", block)
        yield allocations


@contextmanager
def short_device_memory(fails: Fails = never) -> Iterator[Allocations]:
    """Have the CUDA ops run out of memory, on the emulator."""
    import torch

    from isobit.cuda import memory

    allocations = Allocations(fails, torch.OutOfMemoryError)
    zeros = memory.zeros

    def empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        allocations.take(int(np.prod(shape)) * dtype.itemsize)
        return torch.empty(tuple(shape), dtype=dtype, device=memory.device())

    def zeroed(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        allocations.take(int(np.prod(shape)) * dtype.itemsize)
        return zeros(shape, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_allocate", empty)
        patch.setattr(memory, "zeros", zeroed)
        yield allocations
