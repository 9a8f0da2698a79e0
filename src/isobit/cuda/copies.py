"""Copies beside the forwards on CUDA: streams of their own, pinned memory, and events that say when they are done."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from isobit.cuda import memory
from isobit.ops.batch import Array
from isobit.ops.copies import ARRIVED, Arrival, Copies

MOST_LEAVING = 256 << 20  # bytes that lie gathered on the device until they are downloaded


class StreamArrival(Arrival):
    """What a stream was given up to now."""

    def __init__(self, stream: torch.cuda.Stream):
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def arrived(self) -> bool:
        return bool(self._event.query())

    def precede(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class UploadArrival(StreamArrival):
    """One of the `uploads` of a stream, in order; sources: kept alive until it, or a later one, is found to be done."""

    def __init__(self, stream: torch.cuda.Stream, sources: Any, uploads: "deque[UploadArrival]"):
        super().__init__(stream)
        self._sources = sources
        self._uploads = uploads
        uploads.append(self)

    def arrived(self) -> bool:
        if not super().arrived():
            return False
        while self._uploads and self._uploads[0]._event.query():
            self._uploads.popleft()._sources = None
        return True


class StreamCopies(Copies):
    """Uploads and downloads on a stream each. Arrays of whole numbers lie on the host and are copied at once."""

    failures = (MemoryError, torch.cuda.OutOfMemoryError)

    def __init__(self) -> None:
        self._arriving: deque[UploadArrival] = deque()
        self._leaving: deque[tuple[Arrival, int]] = deque()

    @property
    def pinning(self) -> bool:  # type: ignore[override]
        return not memory.is_emulated()

    def host_block(self, nbytes: int) -> np.ndarray:
        if memory.is_emulated():
            return super().host_block(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def indices(self, rows: Sequence[int]) -> Any:
        return memory.to_device(np.array(rows, np.int64))

    def upload(self, work: Callable[[], None], after: Arrival = ARRIVED, sources: Any = None) -> Arrival:
        if memory.is_emulated():
            return super().upload(work, after, sources)
        if self._arriving:
            self._arriving[0].arrived()
        forwards, uploads = torch.cuda.current_stream(), self._uploads
        uploads.wait_stream(forwards)
        with torch.cuda.stream(uploads):
            after.precede()
            try:
                work()
            except BaseException:
                # What was begun must not reach arrays that are someone else's by then.
                uploads.synchronize()
                raise
        return UploadArrival(uploads, sources, self._arriving)

    def download(self, arrays: Mapping[str, Array], places: Mapping[str, np.ndarray]) -> Arrival:
        on_device = {name: array for name, array in arrays.items() if isinstance(array, torch.Tensor)}
        super().download({name: array for name, array in arrays.items() if name not in on_device}, places)
        if memory.is_emulated():
            return super().download(on_device, places)
        nbytes = sum(array.nbytes for array in on_device.values())
        self._limit_leaving(nbytes)
        downloads = self._downloads
        downloads.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(downloads):
            for name, array in on_device.items():
                torch.from_numpy(places[name]).copy_(array, non_blocking=True)
                array.record_stream(downloads)
        arrival = StreamArrival(downloads)
        self._leaving.append((arrival, nbytes))
        return arrival

    def _limit_leaving(self, nbytes: int) -> None:
        """Wait until `nbytes` more may lie on the device."""
        while self._leaving:
            arrival, _ = self._leaving[0]
            if not arrival.arrived() and sum(count for _, count in self._leaving) + nbytes <= MOST_LEAVING:
                return
            arrival.wait()
            self._leaving.popleft()

    @cached_property
    def _uploads(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(memory.device())

    @cached_property
    def _downloads(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(memory.device())
