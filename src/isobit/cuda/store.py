"""Compiled kernels on disk: whole files or none, in the user's cache folder; an unusable folder is bypassed."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import platformdirs

FAMILY = "isobit-cuda"


def folder() -> Path:
    """Where compiled kernels are kept."""
    chosen = os.environ.get("ISOBIT_CUDA_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("isobit") / FAMILY


def read(name: str) -> bytes | None:
    """A kept binary, or None where there is none or it is not whole."""
    try:
        content = (folder() / name).read_bytes()
    except OSError:
        return None
    checksum, body = content[:32], content[32:]
    return body if hashlib.sha256(body).digest() == checksum else None


def write(name: str, body: bytes) -> None:
    """Keep a binary; where the folder cannot be written nothing is kept."""
    with contextlib.suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder(), prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(temporary, folder() / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
