"""An engine without a model, for what a real one does too rarely: full queues, errors, replies that never end."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.engine.engine import EngineStatus
from isobit.engine.guard import DraftCounters
from isobit.engine.lane import token_hash
from isobit.engine.origin import Origin
from isobit.engine.prompt_cache import CacheMetrics
from isobit.engine.request import Event, Finished, PromptProgress, Request, Timings, TokenEvent
from isobit.errors import QueueFullError, RequestError

END = 256


class ByteDecoder:
    """Text of byte tokens, whole characters only."""

    def __init__(self) -> None:
        self.pending = b""

    def push(self, token: int) -> str:
        self.pending += bytes([token]) if token < 256 else b""
        try:
            text, self.pending = self.pending.decode(), b""
        except UnicodeDecodeError:
            text = ""
        return text

    def finish(self) -> str:
        text, self.pending = self.pending.decode(errors="replace"), b""
        return text


class ByteTokenizer:
    """One token a byte; 256 ends a reply."""

    stop_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat_with_borders(
        self, messages: Sequence[dict], tools: Any = None, **extra: Any
    ) -> tuple[list[int], tuple[int, ...]]:
        return self.encode(repr((messages, tools, extra))), (3, 5)

    def detokenizer(self) -> ByteDecoder:
        return ByteDecoder()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


@dataclass
class FakeTicket:
    """A submitted request; `wait_for_cancel` is how a reply that never ends ends."""

    request: Request
    on_event: Callable[[Event], None]

    def __post_init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Answers every request with `script`: a list of tokens, an error message, or None for a reply that never ends."""

    name = "fake"
    context = 4096
    origin = Origin("c" * 64, "1", "cpu")

    def __init__(self, script: Sequence[int] | str | None = tuple(b"hello")):
        self.script = script
        self.tokenizer = ByteTokenizer()
        self.full = False
        self.tickets: list[FakeTicket] = []
        self.closed = False

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> FakeTicket:
        if not request.tokens:
            raise RequestError("the prompt is empty", "prompt")
        if self.full:
            raise QueueFullError("1 requests are waiting already: try again later")
        ticket = FakeTicket(request, on_event)
        self.tickets.append(ticket)
        threading.Thread(target=self._answer, args=(ticket,), daemon=True).start()
        return ticket

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self.tickets),
            queued=0,
            lanes=4,
            prompt_rows=11,
            reply_tokens=12,
            drafts={"mtp": DraftCounters(1, 5, 3, 2, 1, 0), "copies": DraftCounters(resting=6)},
            free_pages=13,
            resident_bytes=1,
            segment_rows=1024,
            cache=CacheMetrics(21, 22, 23, 24, 25, 26, 27, 28, 29, 32, 30, 31, 33, 34, 35, 36, 37, 38),
        )

    def close(self) -> None:
        self.closed = True
        for ticket in self.tickets:
            ticket.cancel()

    def _answer(self, ticket: FakeTicket) -> None:
        total = len(ticket.request.tokens)
        ticket.on_event(PromptProgress(total, total))
        sent: list[int] = []
        if self.script is None:
            sent = list(b"x")
            ticket.on_event(TokenEvent(sent[0]))
            ticket.cancelled.wait()
        elif not isinstance(self.script, str):
            for token in self.script[: ticket.request.max_tokens]:
                sent.append(token)
                ticket.on_event(TokenEvent(token, -0.5, ((token, -0.5), (65, -1.5))))
                if token in ticket.request.stop_tokens:
                    break
        ticket.on_event(self._finished(ticket, tuple(sent)))

    def _finished(self, ticket: FakeTicket, tokens: tuple[int, ...]) -> Finished:
        reason = "cancelled" if ticket.cancelled.is_set() else "length"
        if tokens and tokens[-1] in ticket.request.stop_tokens:
            reason = "stop"
        error = self.script if isinstance(self.script, str) else None
        return Finished(
            reason="error" if error else reason,  # type: ignore[arg-type]
            tokens=tokens,
            token_hash=token_hash(tokens),
            logits_hash="0" * 64,
            prefill=ticket.request.prefill,
            segment_rows=1,
            rows_computed=len(ticket.request.tokens),
            rows_reused=1,
            timings=Timings(0.1, 0.2, 0.3, 10.0, 20.0),
            error=error,
        )
