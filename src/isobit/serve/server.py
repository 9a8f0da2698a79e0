"""Binding a port and running the application until a signal."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from isobit.errors import IsobitError
from isobit.serve.framing import OpenAIFraming

if TYPE_CHECKING:
    from isobit.serve.app import Service

SETTLE_SECONDS = 5


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening; port 0 takes a free one. IsobitError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise IsobitError(f"--host {host!r} is no address of this machine: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        advice = "choose another with --port, or --port 0 for a free one"
        raise IsobitError(f"cannot listen on {host} port {port}: {error.strerror}: {advice}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address of a bound socket as a URL."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configuration(app: FastAPI) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app, http=OpenAIFraming, ws="none", log_level="warning", access_log=False, server_header=False
    )


def run(app: FastAPI, bound: socket.socket, grace: float, on_ready: Callable[[], None], stop_with_stdin: bool) -> None:
    """Serve until SIGTERM or SIGINT, or until standard input ends if `stop_with_stdin`.

    Running replies then get `grace` seconds to finish, and new requests get 503. on_ready is called once connections
    are accepted.
    """
    server = _Server(configuration(app), grace, on_ready)
    if stop_with_stdin:
        threading.Thread(target=_stop_at_end_of_stdin, args=(server,), daemon=True).start()
    # uvicorn raises the signal again when it is done: SIGTERM then ends the process as a success.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[bound])
    except OSError as error:
        raise IsobitError(f"cannot listen on {bound.getsockname()[0]}: {error.strerror}") from None


class _Server(uvicorn.Server):
    """Goes on answering for the grace time after it is told to stop, with 503 to what is new."""

    def __init__(self, config: uvicorn.Config, grace: float, on_ready: Callable[[], None]):
        super().__init__(config)
        self._grace = grace
        self._on_ready = on_ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and self._drained()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.replies.cancel_all()
        left = max(0.0, (self._deadline or 0.0) - time.monotonic())
        self.config.timeout_graceful_shutdown = int(left) + SETTLE_SECONDS
        await super().shutdown(sockets)

    @property
    def _service(self) -> "Service":
        return self.config.app.state.service  # type: ignore[union-attr]

    def _drained(self) -> bool:
        """Whether nothing is left to wait for: running replies, or the grace time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._service.stopping = True
        return self.force_exit or not self._service.replies.unfinished or time.monotonic() >= self._deadline


def _stop_at_end_of_stdin(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True
