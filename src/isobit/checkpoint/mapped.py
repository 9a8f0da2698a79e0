"""Files whose bytes are read where they lie, and whether they are still what they were."""

import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from isobit.errors import CheckpointError


@dataclass(frozen=True)
class FileStamp:
    """What an edited file has another of: bytes, and nanoseconds since 1970."""

    size: int
    modified: int

    @classmethod
    def of(cls, path: Path, file: int | Path) -> "FileStamp":
        """The stamp of an open descriptor's file, or of what is now under a path. Raises CheckpointError by `path`."""
        try:
            stat = os.stat(file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read any more ({error.strerror})") from None
        return cls(stat.st_size, stat.st_mtime_ns)

    def check(self, path: Path, file: int | Path) -> None:
        """Raise CheckpointError if the file has another stamp."""
        now = FileStamp.of(path, file)
        if now != self:
            sizes = f" ({self.size:,} bytes then, {now.size:,} now)" if now.size != self.size else ""
            what = "was edited" if isinstance(file, int) else "was edited or replaced"
            raise CheckpointError(f"{path} {what} since it was opened{sizes}: start again, with a complete file")


class MappedFile:
    """A file's bytes, paged in on use, read-only; they stay when its folder loses the file or gets another.

    descriptor: open for reading; it may be closed afterwards. stamp: of the file when its header was read.
    """

    def __init__(self, path: Path, descriptor: int, stamp: FileStamp):
        self.path = path
        try:
            self.bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            self._descriptor = os.dup(descriptor)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be mapped ({error.strerror})") from None
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = stamp

    def check(self) -> None:
        """Raise CheckpointError if the file was edited in place; to read it where it was cut off ends the process."""
        self._stamp.check(self.path, self._descriptor)
