"""Binding a port and running the application until a signal."""

import asyncio
import contextlib
import errno
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from isobit.errors import IsobitError
from isobit.serve.framing import OpenAIFraming

if TYPE_CHECKING:
    from isobit.serve.app import Service

SETTLE_SECONDS = 5  # for clients to read the last events of their streams
HURRIED_SECONDS = 1  # the same after a second Ctrl-C
TICK_SECONDS = 0.1


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
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "name an address of this machine with --host"
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
    """Serve until SIGTERM, SIGINT or SIGHUP, or until standard input ends if `stop_with_stdin`.

    Running replies then get `grace` seconds to finish, and new requests get 503. on_ready is called once connections
    are accepted.
    """
    server = _Server(configuration(app), grace, on_ready)
    if stop_with_stdin:
        threading.Thread(target=_stop_at_end_of_stdin, args=(server,), daemon=True).start()
    ends = [signal.SIGINT, signal.SIGTERM]
    # With nohup the server outlives its terminal.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    before = {number: signal.signal(number, server.handle_exit) for number in ends}
    try:
        server.run(sockets=[bound])
    except OSError as error:
        raise IsobitError(f"cannot listen on {bound.getsockname()[0]}: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.interrupted:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """Goes on answering for the grace time after it is told to stop, with 503 to what is new.

    Told so twice it waits for nothing that is not under way to its end; a third Ctrl-C ends the process.
    """

    def __init__(self, config: uvicorn.Config, grace: float, on_ready: Callable[[], None]):
        super().__init__(config)
        self.interrupted = False
        self._grace = grace
        self._on_ready = on_ready
        self._deadline: float | None = None
        self._hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: nothing but flags, since it runs between any two steps of the program."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self.should_exit:
            self._hurried = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Nothing: `run` has set the handlers, and leaves them until the application has ended too."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) and self._drained()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.replies.cancel_all()
        impatience = asyncio.create_task(self._give_up_in_time())
        await super().shutdown(sockets)
        impatience.cancel()

    @property
    def _service(self) -> "Service":
        return self.config.app.state.service  # type: ignore[union-attr]

    def _drained(self) -> bool:
        """Whether nothing is left to wait for: running replies, or the grace time."""
        unfinished = self._service.replies.unfinished
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
            self._service.stopping = True
            if unfinished and self._grace:
                self._say_what_is_awaited(unfinished)
        return self._hurried or not unfinished or time.monotonic() >= self._deadline

    def _say_what_is_awaited(self, unfinished: int) -> None:
        replies = f"{unfinished} running {'reply' if unfinished == 1 else 'replies'}"
        how = "press Ctrl-C again" if self.interrupted else "press Ctrl-C, or send the signal again,"
        print(f"isobit: waiting up to {self._grace:g} s for {replies}; {how} to stop now", file=sys.stderr, flush=True)

    async def _give_up_in_time(self) -> None:
        """Close the connections of clients that do not read their last events; with a second Ctrl-C, spill no more."""
        left = max(0.0, (self._deadline or 0.0) - time.monotonic())
        patient_until = time.monotonic() + left + SETTLE_SECONDS
        hurried_until: float | None = None
        while True:
            if self._hurried and not self._service.replies.unfinished:
                hurried_until = hurried_until or time.monotonic() + HURRIED_SECONDS
                self._service.engine.hurry()
            if time.monotonic() >= min(patient_until, hurried_until or patient_until):
                for connection in list(self.server_state.connections):
                    # Cancelling its task would end in a traceback in the log.
                    connection.transport.abort()
            await asyncio.sleep(TICK_SECONDS)


def _stop_at_end_of_stdin(server: uvicorn.Server) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    server.should_exit = True
