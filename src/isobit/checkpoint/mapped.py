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
    def of(cls, file: int | Path) -> "FileStamp":
        """The stamp of an open descriptor's file, or of what is now under a path. Raises OSError."""
        stat = os.stat(file)
        return cls(stat.st_size, stat.st_mtime_ns)


class MappedFile:
    """A file's bytes, paged in on use, read-only; they stay when its folder loses the file or gets another.

    descriptor: open for reading; it may be closed afterwards. stamp: of the file when its header was read.
    """

    def __init__(self, path: Path, descriptor: int, stamp: FileStamp):
        self.path = path
        self.bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        self._stamp = stamp
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def check(self) -> None:
        """Raise CheckpointError if the file was edited in place; reading it where it was cut off ends the process."""
        stat = os.fstat(self._descriptor)
        if stat.st_mtime_ns != self._stamp.modified or stat.st_size != self._stamp.size:
            raise edited(self.path, self._stamp, FileStamp.of(self._descriptor))


def edited(path: Path, before: FileStamp, now: FileStamp) -> CheckpointError:
    """The error of a file that is not what it was when its header was read."""
    sizes = f" ({before.size:,} bytes then, {now.size:,} now)" if now.size != before.size else ""
    return CheckpointError(
        f"{path} was edited since it was opened{sizes}: start again with a complete file; to change a checkpoint in "
        "use, rename new files to their places"
    )
