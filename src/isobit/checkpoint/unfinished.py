"""Folders in the making: hidden beside their place, locked while somebody works on them, removed when nobody does."""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".partial"


@contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A new, empty folder beside `target`, for what is to become it; gone at the end unless it was moved away.

    What killed processes have left of theirs for the same target is removed first. Raises OSError when the folder
    cannot be made.
    """
    remove_abandoned(target)
    folder, lock = _locked_folder(target)
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_abandoned(target: Path) -> None:
    """Remove the unfinished folders of `target` that no process works on; what cannot be removed stays."""
    name = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}{re.escape(SUFFIX)}")
    with contextlib.suppress(OSError):
        for folder in [entry for entry in target.parent.iterdir() if name.fullmatch(entry.name)]:
            _remove_unless_locked(folder)


def _locked_folder(target: Path) -> tuple[Path, int]:
    """An unfinished folder and the descriptor that holds its lock."""
    while True:
        folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}{SUFFIX}")
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
        # Some network file systems lock no folders; there nobody removes one either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        # Another process has taken it for abandoned before it was locked.
        os.close(descriptor)


def _remove_unless_locked(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(descriptor)
