"""Uploading many host arrays as one block of device memory, through pinned buffers, at the bus's speed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from isobit.cuda import memory

BUFFER_BYTES = 64 << 20
BUFFERS = 2
COPYING_THREADS = 8
PART_BYTES = 1 << 20  # that one thread copies at a time
TASK_BYTES = 4 << 20  # of parts that it copies in turn

Piece = tuple[int, np.ndarray]  # where an array goes, in bytes from the start of the block


def upload(pieces: Sequence[Piece], nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] on the device: every piece at its place, zeros between them. Pieces must not overlap."""
    block = memory.zeros((nbytes,), torch.uint8)
    parts = [(place + first, part) for place, array in pieces for first, part in _parts(array)]
    if memory.is_emulated():
        for place, part in parts:
            block[place : place + part.nbytes].copy_(torch.from_numpy(part if part.flags.writeable else part.copy()))
        return block
    for number, batch in enumerate(_spans(sorted(parts, key=lambda part: part[0]), BUFFER_BYTES)):
        _send(block, batch, *_buffers()[number % BUFFERS])
    return block


def upload_one(array: np.ndarray) -> torch.Tensor:
    """The array on the device, of a mapped file at the disk's speed."""
    if array.nbytes < PART_BYTES:
        return memory.to_device(array)
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return upload([(0, array)], array.nbytes).view(kind).view(array.shape)


def _parts(array: np.ndarray) -> Iterator[Piece]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for first in range(0, flat.nbytes, PART_BYTES):
        yield first, flat[first : first + PART_BYTES]


def _spans(parts: list[Piece], nbytes: int) -> Iterator[list[Piece]]:
    """Consecutive parts that together span at most so many bytes."""
    span: list[Piece] = []
    for place, part in parts:
        if span and place + part.nbytes - span[0][0] > nbytes:
            yield span
            span = []
        span.append((place, part))
    if span:
        yield span


def _send(block: torch.Tensor, batch: list[Piece], buffer: torch.Tensor, sent: torch.cuda.Event) -> None:
    sent.synchronize()
    first, (last, part) = batch[0][0], batch[-1]
    size = last + part.nbytes - first
    staging = buffer.numpy()
    end = 0
    for place, part in batch:
        if end < place - first:
            staging[end : place - first] = 0
        end = place - first + part.nbytes

    def copy(task: list[Piece]) -> None:
        for place, part in task:
            np.copyto(staging[place - first : place - first + part.nbytes], part)

    list(_threads().map(copy, _spans(batch, TASK_BYTES)))
    block[first : first + size].copy_(buffer[:size], non_blocking=True)
    sent.record()


@cache
def _buffers() -> list[tuple[torch.Tensor, torch.cuda.Event]]:
    return [(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(BUFFERS)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(COPYING_THREADS, "isobit-upload")
