"""A server process of its own for one test: its log in a file, so that nothing it says can block it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from isobit.cli.common import COMPILING

START_SECONDS = 120
STOP_SECONDS = 60


class ServerProcess:
    """`isobit serve FOLDER` on a free port. url: without /v1; log: what it writes to standard error."""

    def __init__(self, folder: Path, log: Path, *options: str):
        command = [sys.executable, "-m", "isobit", "serve", str(folder), "--port", "0", *options]
        self.log = log
        # One arena, so that memory tells of the server and not of what the allocator keeps for each thread.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
        with open(log, "ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self.url = self._url()
        self.port = int(self.url.rsplit(":", 1)[1])

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET."""
        return httpx.get(f"{self.url}{path}", timeout=60, trust_env=False)

    def complete(self, **body) -> dict:
        """The answer to a completions request that is served."""
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        """A metric without labels, its name without `isobit_`."""
        found = re.search(rf"^isobit_{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def metrics(self, *names: str) -> dict[str, float]:
        """Several metrics, read at one time."""
        found = dict(re.findall(r"^isobit_(\w+) (\S+)$", self.get("/metrics").text, re.MULTILINE))
        return {name: float(found[name]) for name in names}

    def wait_until_idle(self, seconds: float) -> None:
        """Wait until no request runs or waits."""
        deadline = time.monotonic() + seconds
        while (health := self.get("/health").json())["running"] or health["queued"]:
            assert time.monotonic() < deadline, f"requests that nobody waits for go on: {health}"
            time.sleep(0.05)

    @property
    def said(self) -> str:
        """What it has written to standard error, but for what every first run says."""
        return self.log.read_text().replace(f"{COMPILING}\n", "")

    @property
    def usage(self) -> psutil.Process:
        """Memory, files and threads of the process."""
        return psutil.Process(self.process.pid)

    def kill(self) -> None:
        """End it at once, without a chance to tidy up."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(rb"(http://\S+?)/v1\b", line):
                return found[1].decode()
        raise AssertionError(f"the server did not start: {self.log.read_text()}")
