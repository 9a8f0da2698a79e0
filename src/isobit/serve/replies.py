"""Replies in the making: the engine's events, brought to the event loop and read as text."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from isobit.engine.lane import token_hash
from isobit.engine.request import Event, EventHandler, Finished, PromptProgress, Request, TokenEvent
from isobit.errors import QueueFullError
from isobit.serve.errors import ApiError
from isobit.serve.metrics import Metrics
from isobit.serve.text import ReplyText

RETRY_SECONDS = 5
SHUTTING_DOWN = "the server is shutting down: the reply was not finished"


class EngineTicket(Protocol):
    """What the engine gives for a submitted request."""

    def cancel(self) -> None: ...


class EngineQueue(Protocol):
    """The part of the engine that takes requests."""

    def submit(self, request: Request, on_event: EventHandler) -> EngineTicket: ...


@dataclass(frozen=True)
class Delta:
    """More of a reply: the text that is certain by now, and the tokens since the last delta.

    offsets: for each token, how many characters of the reply were decoded before it.
    """

    text: str
    tokens: tuple[TokenEvent, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """The end of a reply. tokens: all of them, cut after the one that completed a stop string; token_hash: theirs."""

    reason: str
    tokens: tuple[int, ...]
    token_hash: str
    finished: Finished


Update = PromptProgress | Delta | End


@dataclass(eq=False)
class Running:
    """A submitted request, as the event loop follows it."""

    request: Request
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    ticket: EngineTicket | None = None
    ended: bool = False
    tokens: int = 0
    stopped: bool = False

    def cancel(self) -> None:
        """Stop the work within one segment; nothing when it is over."""
        if self.ticket is not None and not self.ended:
            self.ticket.cancel()


class Replies:
    """Submits requests to the engine and follows them. All methods belong to the event loop's thread."""

    def __init__(self, engine: EngineQueue, metrics: Metrics):
        self._engine = engine
        self._metrics = metrics
        self._running: set[Running] = set()

    def submit(self, request: Request) -> Running:
        """Queue a request. RequestError when it can never be served, ApiError 503 when too many wait."""
        loop = asyncio.get_running_loop()
        running = Running(request)

        def on_event(event: Event) -> None:
            # The loop is gone when the server was told to stop at once.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, running, event)

        try:
            running.ticket = self._engine.submit(request, on_event)
        except QueueFullError as error:
            self._metrics.requests.labels("busy").inc()
            raise ApiError(503, str(error), code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)}) from None
        self._running.add(running)
        return running

    @property
    def unfinished(self) -> int:
        """How many submitted requests the engine has not ended yet."""
        return len(self._running)

    def cancel_all(self) -> None:
        """Stop everything that is unfinished."""
        for running in self._running:
            running.cancel()

    def _deliver(self, running: Running, event: Event) -> None:
        if isinstance(event, Finished):
            running.ended = True
            self._running.discard(running)
            outcome = "stop" if running.stopped else event.reason
            self._metrics.finished(outcome, event, len(running.request.tokens), len(event.tokens))
        running.events.put_nowait(event)

    async def follow(self, running: Running, text: ReplyText) -> AsyncGenerator[Update, None]:
        """The reply as it comes, an End last. ApiError when the engine could not finish it.

        Leaving the iterator early stops the work.
        """
        tokens: list[int] = []
        waiting: list[TokenEvent] = []
        offsets: list[int] = []
        try:
            while not isinstance(event := await running.events.get(), Finished):
                if isinstance(event, PromptProgress):
                    yield event
                    continue
                if running.stopped:
                    continue
                tokens.append(event.token)
                waiting.append(event)
                offsets.append(text.decoded)
                released = text.push(event.token)
                if text.stopped:
                    running.stopped = True
                    running.cancel()
                if released:
                    yield Delta(released, tuple(waiting), tuple(offsets))
                    waiting.clear()
                    offsets.clear()
            rest = text.finish()
            running.stopped = running.stopped or text.stopped
            if rest or waiting:
                yield Delta(rest, tuple(waiting), tuple(offsets))
            yield _end(event, tuple(tokens), running.stopped)
        finally:
            running.cancel()


def _end(event: Finished, tokens: tuple[int, ...], stopped: bool) -> End:
    if stopped:
        return End("stop", tokens, token_hash(tokens), event)
    if event.reason == "cancelled":
        raise ApiError(503, SHUTTING_DOWN, code="shutting_down")
    if event.reason == "error" and event.error_code is not None:
        raise ApiError(503, str(event.error), code=event.error_code, headers={"Retry-After": str(RETRY_SECONDS)})
    if event.reason == "error":
        raise ApiError(500, f"the reply could not be computed: {event.error}", code="engine_error")
    return End(event.reason, tokens, event.token_hash, event)
