"""One running request: its stream, what of its prompt is left, its reply so far."""

import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from isobit.engine.drafts import LaneDrafts
from isobit.engine.request import Event, EventHandler, Finished, FinishReason, Request, Timings
from isobit.errors import counted
from isobit.model.state import KeptState, Stream, pages_for
from isobit.ops.sample import Draw

log = logging.getLogger(__name__)


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
        """End the request within one round; it finishes with reason "cancelled"."""
        self._cancelled.set()
        self._notify()


def emit(ticket: Ticket, event: Event) -> None:
    """Tell the caller; a caller that fails to listen must not stop the worker."""
    try:
        ticket.on_event(event)
    except Exception:
        log.exception("an event handler failed")


@dataclass
class Lane:
    """A request being served. `limit`: the most reply tokens; `segment_rows`: the most prompt rows of a forward.

    `cuts`: prompt rows that segments end at, because the state there is worth keeping.
    `suspended` holds the state of a lane that had to give its slot to another; its `stream` is None meanwhile.
    """

    ticket: Ticket
    stream: Stream | None
    limit: int
    segment_rows: int
    notice: str | None
    started: float
    drafts: LaneDrafts | None = None
    suspended: KeptState | None = None
    cuts: set[int] = field(default_factory=set)
    rows_reused: int = 0
    rows_computed: int = 0
    reply: list[int] = field(default_factory=list)
    largest_segment: int = 0
    least_limit: int | None = None
    prompt_hash: str = ""
    first_token: float | None = None
    last_progress: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def request(self) -> Request:
        return self.ticket.request

    @property
    def background(self) -> bool:
        return self.request.priority == "background"

    @property
    def rows(self) -> int:
        """Tokens that are in the stream's state."""
        if self.stream is not None:
            return self.stream.rows
        return self.suspended.rows if self.suspended is not None else 0

    @property
    def prompt_left(self) -> int:
        """Prompt rows that are not yet in the stream's state."""
        return 0 if self.reply else len(self.request.tokens) - self.rows

    @property
    def history(self) -> tuple[int, ...]:
        """The tokens that are in the stream's state."""
        return (*self.request.tokens, *self.reply)[: self.rows]

    @property
    def next_cut(self) -> int:
        """The prompt row at which the next segment must end at the latest: one worth keeping, or the prompt's end."""
        total = len(self.request.tokens)
        return min((row for row in self.cuts if self.rows < row < total), default=total)

    def tell_limit(self, rows: int) -> None:
        """Note for the user that a segment had to have fewer rows than allowed, at most `rows`."""
        if self.least_limit is None or rows < self.least_limit:
            self.least_limit = rows
            self.notice = (
                f"prompt segments of {counted(rows, 'row')}, not {self.segment_rows:,}: memory ran out in a larger one"
            )

    def cut_at(self, row: int) -> None:
        """Have a segment end at a prompt row, so that the state there can be kept."""
        self.cuts.add(row)

    @property
    def reserved_pages(self) -> int:
        """The most key-value pages that this lane will hold."""
        return pages_for(len(self.request.tokens) + self.limit)

    def draw(self, ahead: int) -> Draw:
        """How the token `ahead` rows after the state's last is drawn: keyed by the seed and its absolute position."""
        sampling = self.request.sampling
        return Draw(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            position=self.rows + ahead,
        )

    def end_reason(self) -> FinishReason | None:
        """Why the reply is over, or None while it is not."""
        if self.ticket.cancelled:
            return "cancelled"
        if self.reply and self.reply[-1] in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.reply) >= self.limit else None

    def finished(self, reason: FinishReason, error: str | None = None, error_code: str | None = None) -> Finished:
        """The event that ends this lane's request."""
        return Finished(
            reason=reason,
            tokens=tuple(self.reply),
            token_hash=token_hash(tuple(self.reply)),
            logits_hash=self.prompt_hash,
            prefill=self.request.prefill,
            segment_rows=self.largest_segment,
            rows_computed=self.rows_computed,
            rows_reused=self.rows_reused,
            timings=self.timings(),
            drafted=self.drafted,
            accepted=self.accepted,
            notice=self.notice,
            error=error,
            error_code=error_code,
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
            prompt_rate=min(self.rows, len(self.request.tokens)) / max(first - self.started, 1e-9),
            reply_rate=(len(self.reply) - 1) / reply_seconds if len(self.reply) > 1 and reply_seconds > 0 else 0.0,
        )
