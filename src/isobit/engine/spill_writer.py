"""Writing kept states to disk in a thread of its own, so that no round waits for the disk."""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobit.checkpoint.store import write_tensors
from isobit.model.kept import Arrays

QUEUE_BYTES = 256 << 20  # two states of the real model's size

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Write:
    """A file to be written. used: its time stamp, ns; nbytes: at most its size.

    size: what it takes on disk, None while it is not there. discarded: whether nobody wants it any more.
    """

    path: Path
    arrays: Arrays
    metadata: Mapping[str, str]
    used: int
    nbytes: int
    size: int | None = None
    discarded: bool = False


class SpillWriter:
    """Writes safetensors files, each with a checksum, whole or not at all, in the order in which they come.

    About `limit_bytes` wait at a time, or one file. One thread hands files in, and learns of their fate by `finished`.
    """

    def __init__(self, limit_bytes: int = QUEUE_BYTES):
        self.limit_bytes = limit_bytes
        self._queue: deque[Write] = deque()
        self._unwritten: dict[Path, Write] = {}
        self._finished: list[Write] = []
        self._nbytes = 0
        self._failing = False
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def has_room(self, nbytes: int) -> bool:
        """Whether `put` takes files of so many bytes without waiting; always when nothing waits."""
        return not self._nbytes or self._nbytes + nbytes <= self.limit_bytes

    def put(self, write: Write) -> None:
        """Hand in a file, when there is room for it. Its arrays must not change any more."""
        with self._change:
            self._change.wait_for(lambda: self.has_room(write.nbytes))
            self._queue.append(write)
            self._unwritten[write.path] = write
            self._nbytes += write.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="isobit-spill", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def unwritten(self, path: Path) -> Arrays | None:
        """The arrays of the file that is to be at `path`, while it is not there yet."""
        with self._change:
            write = self._unwritten.get(path)
            return None if write is None else dict(write.arrays)

    def stamp(self, path: Path, used: int) -> None:
        """Give a file, written or not, its time stamp, ns."""
        with self._change:
            write = self._unwritten.get(path)
            if write is not None:
                write.used = used
            else:
                _stamp(path, used)

    def discard(self, path: Path) -> None:
        """Remove a file, written or not."""
        with self._change:
            write = self._unwritten.pop(path, None)
            if write is None:
                unlink(path)
                return
            write.discarded = True
            if write in self._queue:
                self._queue.remove(write)
                self._forget(write)

    def finished(self) -> list[Write]:
        """What was written, or could not be, since the last call."""
        with self._change:
            finished, self._finished = self._finished, []
            return finished

    def flush(self) -> None:
        """Wait until nothing is left to be written."""
        with self._change:
            self._change.wait_for(lambda: not self._nbytes)

    def close(self, drop: bool = False) -> None:
        """Write what waits, or `drop` it but for the file that was begun, and end the thread."""
        with self._change:
            while drop and self._queue:
                self._forget(self._queue.pop())
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                write = self._queue.popleft()
            try:
                _write_file(write)
                self._failing = False
            except Exception as error:
                self._report(error)
            with self._change:
                if write.discarded:
                    unlink(write.path)
                else:
                    _stamp(write.path, write.used)
                    self._finished.append(write)
                self._forget(write)

    def _forget(self, write: Write) -> None:
        """A file waits no longer."""
        if self._unwritten.get(write.path) is write:
            del self._unwritten[write.path]
        self._nbytes -= write.nbytes
        write.arrays = {}
        self._change.notify_all()

    def _report(self, error: Exception) -> None:
        """Warn of the first failure in a row; a full disk would repeat it at every eviction."""
        level = logging.DEBUG if self._failing else logging.WARNING
        log.log(level, "a state could not be written to the spill folder: %s", error)
        self._failing = True


def checksum(metadata: Mapping[str, str], arrays: Arrays) -> str:
    """SHA-256, hexadecimal, over a file's metadata and all its tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def unlink(path: Path) -> None:
    """Remove a file, if it is there and can be."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write_file(write: Write) -> None:
    # The checksum tells what a power cut has left, so that there is no need to wait for the disk itself.
    metadata = {**write.metadata, "sha256": checksum(write.metadata, write.arrays)}
    write_tensors(write.path, write.arrays, metadata=metadata, durable=False)
    write.size = write.path.stat().st_size


def _stamp(path: Path, used: int) -> None:
    with contextlib.suppress(OSError):
        os.utime(path, ns=(used, used))
