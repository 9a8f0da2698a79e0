"""The engine: a queue of requests, and one worker thread that serves them in rounds."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.tokenizer import Tokenizer
from isobit.engine import memory
from isobit.engine.lane import Lane, Ticket, logits_hash, token_hash
from isobit.engine.prefill import DEEP_ROWS, segment_limit
from isobit.engine.request import (
    Event,
    EventHandler,
    Finished,
    FinishReason,
    PromptProgress,
    Request,
    Timings,
    TokenEvent,
)
from isobit.errors import IsobitError, QueueFullError, RequestError
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import pages_for
from isobit.ops import load_ops, set_threads
from isobit.ops.sample import Draw, Samples

PROGRESS_SECONDS = 0.05
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs; nothing here changes a reply.

    context: the most tokens of prompt and reply together; None = the checkpoint's window. memory_gib: the most
    anonymous memory; None = what the machine has. segment_rows: rows of a deep segment. threads: None = all cores.
    queue: how many requests may wait.
    """

    context: int | None = None
    memory_gib: float | None = None
    segment_rows: int = DEEP_ROWS
    threads: int | None = None
    queue: int = 64


@dataclass(frozen=True)
class EngineStatus:
    """What the engine is doing, for metrics and health."""

    running: int
    queued: int
    prompt_rows: int
    reply_tokens: int
    resident_bytes: int
    segment_rows: int


class Engine:
    """Serves one checkpoint. Raises IsobitError when the checkpoint cannot be served within the settings."""

    def __init__(self, folder: str | Path, settings: EngineSettings | None = None):
        settings = settings or EngineSettings()
        if settings.threads is not None:
            set_threads(settings.threads)
        self.settings = settings
        checkpoint = Checkpoint(folder)
        self.name = Path(folder).resolve().name
        self.config = checkpoint.config
        self.tokenizer = Tokenizer(folder)
        self.context = self._context(settings.context)
        self.model = load_model(checkpoint, load_ops("cpu"), self.context)
        self.state = self.model.new_state(slots=1, pages=pages_for(self.context))
        self._buffer_bytes = self._buffer_budget()
        self.segment_rows, _ = self._fit(settings.segment_rows)
        self.prompt_rows = 0
        self.reply_tokens = 0
        self._waiting: deque[Ticket] = deque()
        self._lanes: list[Lane] = []
        self._work = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._serve, name="isobit-engine", daemon=True)
        self._worker.start()

    def submit(self, request: Request, on_event: EventHandler) -> Ticket:
        """Queue a request; its events come on the worker thread.

        Raises RequestError when it can never be served, QueueFullError when too many wait.
        """
        self._check(request)
        ticket = Ticket(request, on_event, self._wake)
        with self._work:
            if self._closing:
                raise QueueFullError("the server is shutting down")
            if len(self._waiting) >= self.settings.queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already: try again later")
            self._waiting.append(ticket)
            self._work.notify()
        return ticket

    def status(self) -> EngineStatus:
        """A snapshot; safe from any thread."""
        return EngineStatus(
            running=len(self._lanes),
            queued=len(self._waiting),
            prompt_rows=self.prompt_rows,
            reply_tokens=self.reply_tokens,
            resident_bytes=memory.anonymous_resident(),
            segment_rows=self.segment_rows,
        )

    def close(self) -> None:
        """Cancel what is unfinished and stop the worker."""
        with self._work:
            self._closing = True
            for ticket in [*self._waiting, *(lane.ticket for lane in self._lanes)]:
                ticket._cancelled.set()
            self._work.notify()
        self._worker.join()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not (self._waiting or self._lanes or self._closing):
                    self._work.wait()
                if self._closing and not self._waiting and not self._lanes:
                    return
            self._admit()
            if self._lanes:
                self._round()

    def _round(self) -> None:
        """One forward for all active lanes: plan, forward, sample, commit."""
        lanes = [lane for lane in self._lanes if not self._retire_if_over(lane)]
        if not lanes:
            return
        plan = Plan(tuple(self._segment(lane) for lane in lanes))
        try:
            logits = self.model.ops.to_host(self.model.forward(self.state, plan))
            drawing = [lane for lane in lanes if not lane.prompt_left]
            samples = self.model.ops.sample(logits, [draw_of(lane) for lane in drawing])
        except Exception as error:
            log.exception("a forward failed")
            for lane in lanes:
                self._retire(lane, "error", f"{type(error).__name__}: {error}")
            return
        for segment, lane in zip(plan.segments, lanes, strict=True):
            self._count(lane, len(segment.tokens))
        for row, lane in enumerate(drawing):
            self._commit(lane, logits[row], samples, row)

    def _segment(self, lane: Lane) -> Segment:
        tokens = lane.next_tokens()
        draws = len(tokens) >= lane.prompt_left
        return Segment(lane.stream, tokens, "last" if draws else "none")

    def _count(self, lane: Lane, rows: int) -> None:
        total = len(lane.request.tokens)
        if lane.stream.rows > total:
            return
        lane.largest_segment = max(lane.largest_segment, rows)
        self.prompt_rows += rows
        now = time.monotonic()
        if not lane.prompt_left or now - lane.last_progress >= PROGRESS_SECONDS:
            lane.last_progress = now
            emit(lane.ticket, PromptProgress(lane.stream.rows, total))

    def _commit(self, lane: Lane, logits: np.ndarray, samples: Samples, row: int) -> None:
        if not lane.prompt_hash:
            lane.prompt_hash = logits_hash(logits)
        if not samples.finite[row]:
            self._retire(lane, "error", f"a logit at position {lane.stream.rows} is not finite")
            return
        if lane.first_token is None:
            lane.first_token = time.monotonic()
        token = int(samples.tokens[row])
        lane.reply.append(token)
        self.reply_tokens += 1
        emit(lane.ticket, self._token_event(lane, logits, token, float(samples.logprob[row])))
        self._retire_if_over(lane)

    def _token_event(self, lane: Lane, logits: np.ndarray, token: int, logprob: float) -> TokenEvent:
        count = lane.request.logprobs
        if not count:
            return TokenEvent(token, None if count is None else logprob)
        ids, logprobs = self.model.ops.top_logprobs(logits[None], count)
        alternatives = tuple((int(i), float(p)) for i, p in zip(ids[0], logprobs[0], strict=True))
        return TokenEvent(token, logprob, alternatives)

    def _admit(self) -> None:
        """Drop the waiting requests that were cancelled; start the others while a lane is free."""
        with self._work:
            dropped = [ticket for ticket in self._waiting if ticket.cancelled]
            waiting = [ticket for ticket in self._waiting if not ticket.cancelled]
            starting = waiting[: self.state.free_slots]
            self._waiting = deque(waiting[self.state.free_slots :])
        for ticket in dropped:
            emit(ticket, never_started(ticket))
        for ticket in starting:
            request = ticket.request
            asked = segment_limit(request.prefill, request.segment_rows, self.settings.segment_rows)
            rows, notice = self._fit(min(asked, len(request.tokens)))
            room = self.context - len(request.tokens)
            limit = room if request.max_tokens is None else min(request.max_tokens, room)
            lane = Lane(ticket, self.state.open(), limit, rows, notice, time.monotonic())
            self._lanes.append(lane)

    def _fit(self, rows: int) -> tuple[int, str | None]:
        """As many of the asked rows as the buffers can be had for, and what to tell the user if they are fewer."""
        fitting = rows
        while fitting > 1 and not self._can_buffer(fitting):
            fitting //= 2
        if fitting == rows:
            return rows, None
        return fitting, f"prompt segments of {fitting} rows, not {rows}: there is no memory for larger buffers"

    def _can_buffer(self, rows: int) -> bool:
        needed = self.model.workspace_bytes(rows)
        return needed <= self._buffer_bytes and can_allocate(needed)

    def _retire_if_over(self, lane: Lane) -> bool:
        reason = lane.end_reason()
        if reason is not None:
            self._retire(lane, reason)
        return reason is not None

    def _retire(self, lane: Lane, reason: FinishReason, error: str | None = None) -> None:
        event = lane.finished(reason, error)
        self.state.close(lane.stream)
        self._lanes.remove(lane)
        emit(lane.ticket, event)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _check(self, request: Request) -> None:
        if not request.tokens:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        outside = [token for token in request.tokens if not 0 <= token < self.config.vocab_size]
        if outside:
            raise RequestError(
                f"token id {outside[0]} is outside the vocabulary: expected 0 to {self.config.vocab_size - 1}", "prompt"
            )
        if len(request.tokens) >= self.context:
            raise RequestError(
                f"the prompt has {len(request.tokens)} tokens, but the context holds {self.context} with the reply: "
                "shorten the prompt or start the server with a larger --context",
                "prompt",
                "context_length_exceeded",
            )

    def _context(self, asked: int | None) -> int:
        window = self.config.max_position_embeddings
        if asked is not None and not 2 <= asked <= window:
            raise IsobitError(f"--context is {asked}: expected 2 to {window}, the checkpoint's window")
        return asked if asked is not None else window

    def _buffer_budget(self) -> int:
        """Bytes that a forward's buffers may take in the memory limit; raises IsobitError if one row's do not fit."""
        loaded, asked = memory.anonymous_resident(), self.settings.memory_gib
        limit = loaded + memory.available() if asked is None else int(asked * memory.GIB)
        left = limit - loaded - self.state.nbytes
        if self.model.workspace_bytes(1) > left:
            raise IsobitError(
                f"the memory limit is {memory.gib(limit)}, but the weights take {memory.gib(loaded)}, the state of "
                f"{self.context} tokens {memory.gib(self.state.nbytes)} and one row's buffers "
                f"{memory.gib(self.model.workspace_bytes(1))}: raise --memory-gib or lower --context"
            )
        return left


def draw_of(lane: Lane) -> Draw:
    """How the lane's next token is drawn: keyed by the request's seed and the token's absolute position."""
    sampling = lane.request.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=lane.stream.rows,
    )


def emit(ticket: Ticket, event: Event) -> None:
    """Tell the caller; a caller that fails to listen must not stop the worker."""
    try:
        ticket.on_event(event)
    except Exception:
        log.exception("an event handler failed")


def never_started(ticket: Ticket) -> Finished:
    """The end of a request that was cancelled while it waited."""
    waited = time.monotonic() - ticket.submitted
    return Finished(
        reason="cancelled",
        tokens=(),
        token_hash=token_hash(()),
        logits_hash="",
        prefill=ticket.request.prefill,
        segment_rows=0,
        rows_computed=0,
        rows_reused=0,
        timings=Timings(waited, waited, waited, 0.0, 0.0),
    )


def can_allocate(count: int) -> bool:
    """Whether the process can get `count` more bytes."""
    try:
        np.empty(count, dtype=np.uint8)
    except MemoryError:
        return False
    return True
