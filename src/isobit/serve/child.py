"""A server as a child process: started on a free loopback port, always ended."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from isobit.errors import IsobitError

STOP_SECONDS = 10


@contextmanager
def running_server(folder: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Run `isobit serve` on `folder` and yield its URL, without /v1. IsobitError when it does not start."""
    command = [sys.executable, "-m", "isobit", "serve", str(folder), "--port", "0", "--stop-with-stdin", *options]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        try:
            yield _url(process, errors)
        finally:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """End a server process and wait until it is gone."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen, errors: IO[bytes]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(rb"(http://\S+?)/v1\b", line):
            return found[1].decode()
    process.wait()
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip().splitlines()
    reason = said[-1].removeprefix("isobit: ") if said else f"it ended with exit code {process.returncode}"
    raise IsobitError(f"the server did not start: {reason}")
