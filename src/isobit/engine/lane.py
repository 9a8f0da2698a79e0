"""One running request: its stream, what of its prompt is left, its reply so far."""

import hashlib
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from isobit.engine.request import EventHandler, Finished, FinishReason, Request, Timings
from isobit.model.state import Stream


def token_hash(tokens: tuple[int, ...]) -> str:
    """SHA-256 over token ids as little-endian int32."""
    return hashlib.sha256(np.array(tokens, dtype="<i4").tobytes()).hexdigest()


def logits_hash(logits: np.ndarray) -> str:
    """SHA-256 over one row of logits as little-endian float32."""
    return hashlib.sha256(logits.astype("<f4", copy=False).tobytes()).hexdigest()


class Ticket:
    """What a caller holds of a submitted request."""

    def __init__(self, request: Request, on_event: EventHandler, notify):
        self.request = request
        self.on_event = on_event
        self.submitted = time.monotonic()
        self._cancelled = threading.Event()
        self._notify = notify

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End the request within one segment; it finishes with reason "cancelled"."""
        self._cancelled.set()
        self._notify()


@dataclass
class Lane:
    """A request being served. `limit`: the most reply tokens; `segment_rows`: the most prompt rows of a forward."""

    ticket: Ticket
    stream: Stream
    limit: int
    segment_rows: int
    notice: str | None
    started: float
    reply: list[int] = field(default_factory=list)
    largest_segment: int = 0
    prompt_hash: str = ""
    first_token: float | None = None
    last_progress: float = 0.0

    @property
    def request(self) -> Request:
        return self.ticket.request

    @property
    def prompt_left(self) -> int:
        """Prompt rows that are not yet in the stream's state."""
        return max(len(self.request.tokens) - self.stream.rows, 0)

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens of this lane's next segment: prompt rows, or the token drawn last."""
        if self.prompt_left:
            end = min(self.stream.rows + self.segment_rows, len(self.request.tokens))
            return self.request.tokens[self.stream.rows : end]
        return (self.reply[-1],)

    def end_reason(self) -> FinishReason | None:
        """Why the reply is over, or None while it is not."""
        if self.ticket.cancelled:
            return "cancelled"
        if self.reply and self.reply[-1] in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.reply) >= self.limit else None

    def finished(self, reason: FinishReason, error: str | None = None) -> Finished:
        """The event that ends this lane's request."""
        return Finished(
            reason=reason,
            tokens=tuple(self.reply),
            token_hash=token_hash(tuple(self.reply)),
            logits_hash=self.prompt_hash,
            prefill=self.request.prefill,
            segment_rows=self.largest_segment,
            rows_computed=self.stream.rows,
            rows_reused=0,
            timings=self.timings(),
            notice=self.notice,
            error=error,
        )

    def timings(self) -> Timings:
        """Seconds and tokens a second up to now."""
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        reply_seconds = now - first
        return Timings(
            queued=self.started - self.ticket.submitted,
            first_token=first - self.ticket.submitted,
            total=now - self.ticket.submitted,
            prompt_rate=min(self.stream.rows, len(self.request.tokens)) / max(first - self.started, 1e-9),
            reply_rate=(len(self.reply) - 1) / reply_seconds if len(self.reply) > 1 and reply_seconds > 0 else 0.0,
        )
