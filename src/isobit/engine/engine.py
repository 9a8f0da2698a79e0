"""The engine: a queue of requests, and one worker thread that serves them in rounds."""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from isobit.checkpoint.opening import open_checkpoint
from isobit.checkpoint.tokenizer import Tokenizer
from isobit.engine import memory
from isobit.engine.budget import allot
from isobit.engine.drafts import CopyProposer, Drafter, MtpProposer, Proposer
from isobit.engine.guard import DraftCounters
from isobit.engine.lane import Ticket, emit, token_hash
from isobit.engine.loading import load_within, new_state_within
from isobit.engine.origin import Origin, origin_of, spill_identity
from isobit.engine.placement import Placement, chosen_device
from isobit.engine.prompt_cache import CacheMetrics, PromptCache
from isobit.engine.request import EventHandler, Finished, FinishReason, Request, Timings
from isobit.engine.rounds import Rounds
from isobit.engine.settings import EngineSettings
from isobit.engine.shortage import OUT_OF_MEMORY
from isobit.engine.spill import SpillStore
from isobit.engine.spill_writer import QUEUE_BYTES
from isobit.errors import IsobitError, QueueFullError, RequestError, counted, first_sentence, ran_out
from isobit.model.flash_next import FlashNext
from isobit.model.load import Progress
from isobit.model.state import StatePool
from isobit.ops import environment, set_threads

__all__ = ["Engine", "EngineSettings", "EngineStatus"]

IDLE_SECONDS = 1.0  # without work, after which the first request is not soon expected
SPILL_QUEUE_PART = 4  # at most one part in so many of the prompt cache's memory holds states that wait for the disk

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStatus:
    """What the engine is doing, for metrics and health. problem: what requests fail with, until one does not."""

    running: int
    queued: int
    lanes: int
    prompt_rows: int
    reply_tokens: int
    drafts: dict[str, DraftCounters]
    free_pages: int
    resident_bytes: int
    segment_rows: int
    cache: CacheMetrics
    problem: str | None = None


class Engine:
    """Serves one checkpoint. Raises IsobitError when the checkpoint cannot be served within the settings.

    rounds: the class that computes them. model: the checkpoint's, when it is loaded already, for the same context.
    progress: told the bytes loaded and the bytes in all.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: EngineSettings | None = None,
        rounds: type[Rounds] = Rounds,
        model: FlashNext | None = None,
        progress: Progress | None = None,
    ):
        self.settings = settings = settings or EngineSettings()
        if settings.threads is not None:
            set_threads(settings.threads)
        checkpoint = open_checkpoint(folder)
        self._store = checkpoint.store
        self.folder = Path(folder).resolve()
        self.name = self.folder.name
        self.config = checkpoint.config
        self.tokenizer = Tokenizer(folder)
        self.context = self._context(settings.context)
        placement = Placement(chosen_device(settings.device) if model is None else model.ops.family)
        segment_rows = settings.segment_rows or placement.segment_rows
        self.settings = settings = replace(settings, segment_rows=segment_rows)
        self.model = model or load_within(checkpoint, placement, self.context, settings.memory_gib, progress)
        checkpoint.close()
        loaded, limit = placement.loaded(), placement.limit(settings.memory_gib)
        cache_bytes = int(settings.prompt_cache_gib * memory.GIB)
        host_bytes = placement.host_cache_bytes(settings.host_cache_gib) if cache_bytes else 0
        counted_bytes = placement.within_limit(host_bytes)
        self.budget = allot(self.model, limit, loaded, settings.parallel, cache_bytes, counted_bytes)
        state = new_state_within(self.model, self.budget, placement)
        spill = self._spill_store(cache_bytes)
        cache = PromptCache(state, cache_bytes - (0 if spill is None else spill.queue_bytes), spill, host_bytes)
        sources = proposers(self.model, state, settings.mtp_drafts)
        # A thread's processor time does not count what other processes take.
        clock = time.thread_time if placement.device == "cpu" else time.perf_counter
        drafter = Drafter(sources, clock, self.budget.drafted_tokens)
        self.rounds = rounds(self.model, state, cache, drafter, self.budget, settings, placement)
        self.segment_rows, _ = self.rounds.fit(segment_rows)
        self._waiting: deque[Ticket] = deque()
        self._work = threading.Condition()
        self._closing = self._prepared = False
        self._worker = threading.Thread(target=self._serve, name="isobit-engine", daemon=True)
        self._worker.start()

    @cached_property
    def origin(self) -> Origin:
        """Where its replies come from; the first call reads samples of the checkpoint's files."""
        return origin_of(self._store, self.model.ops.device)

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
                waiting = counted(len(self._waiting), "request is", "requests are")
                raise QueueFullError(f"{waiting} waiting already: try again later")
            self._waiting.append(ticket)
            self._work.notify()
        return ticket

    def status(self) -> EngineStatus:
        """A snapshot; safe from any thread."""
        return EngineStatus(
            running=len(self.rounds.lanes),
            queued=len(self._waiting),
            lanes=self.budget.lanes,
            prompt_rows=self.rounds.prompt_rows,
            reply_tokens=self.rounds.reply_tokens,
            drafts={name: replace(counters) for name, counters in self.rounds.drafter.counters.items()},
            free_pages=self.rounds.state.free_pages,
            resident_bytes=memory.anonymous_resident(),
            segment_rows=self.segment_rows,
            cache=self.rounds.cache.metrics(),
            problem=self.rounds.problem,
        )

    def hurry(self) -> None:
        """Have `close` write no more kept states to disk; safe from any thread."""
        self.rounds.cache.hurry()

    def close(self) -> None:
        """Cancel what is unfinished, write kept states to the spill folder, if there is one, and stop the worker."""
        with self._work:
            self._closing = True
            for ticket in self._waiting:
                ticket._cancelled.set()
            self._work.notify()
        self._worker.join()

    def _serve(self) -> None:
        environment.set_default()
        rounds = self.rounds
        while self._await_work():
            try:
                self._admit()
                if self._closing:
                    rounds.cancel()
                rounds.run()
            except Exception as error:
                rounds.abandon(error)
        rounds.cache.close()

    def _await_work(self) -> bool:
        """Wait until there is something to do; whether there is. Time that nobody needs goes into what comes seldom."""
        with self._work:
            idle = not self._work.wait_for(self._has_work, None if self._prepared else IDLE_SECONDS)
        if idle:
            self._prepare_seldom()
        with self._work:
            self._work.wait_for(self._has_work)
            return bool(self._waiting or self.rounds.lanes)

    def _has_work(self) -> bool:
        return bool(self._waiting or self.rounds.lanes or self._closing)

    def _prepare_seldom(self) -> None:
        """Have compiled what most requests do without: otherwise all lanes would wait for it in a round."""
        self._prepared = True
        ops = self.model.ops
        try:
            ops.top_logprobs(ops.zeros((1, self.config.vocab_size), "float32"), 1)
        except Exception as error:
            log.info("logprobs are prepared when they are asked for (%s)", first_sentence(error))

    def _admit(self) -> None:
        """Drop the waiting requests that were cancelled; start the others in order, as far as lanes and pages go."""
        with self._work:
            dropped = [ticket for ticket in self._waiting if ticket.cancelled]
            waiting = [ticket for ticket in self._waiting if not ticket.cancelled]
            self._waiting = deque(waiting)
        for ticket in dropped:
            emit(ticket, never_started(ticket, "cancelled"))
        for ticket in sorted(waiting, key=lambda ticket: ticket.request.priority == "background"):
            if self.rounds.awaits_prefix(ticket.request):
                continue
            if not self.rounds.has_lane(ticket.request):
                break
            with self._work:
                self._waiting.remove(ticket)
            try:
                self.rounds.start(ticket)
            except Exception as error:
                log.exception("a request could not be started")
                code = OUT_OF_MEMORY if ran_out(error) else None
                emit(ticket, never_started(ticket, "error", f"{type(error).__name__}: {error}", code))

    def _spill_store(self, cache_bytes: int) -> SpillStore | None:
        settings = self.settings
        if settings.spill_dir is None or not settings.prompt_cache_gib:
            return None
        folder, limit = Path(settings.spill_dir), int(settings.spill_gib * memory.GIB)
        if folder.resolve() == self.folder:
            raise IsobitError(f"--spill-dir is the checkpoint's own folder {folder}: expected a folder of its own")
        queue = min(QUEUE_BYTES, cache_bytes // SPILL_QUEUE_PART)
        return SpillStore(folder, limit, spill_identity(self.origin, self._store), self.origin.device, queue)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _check(self, request: Request) -> None:
        if not request.tokens:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        for place, token in enumerate(request.tokens):
            if not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"prompt[{place}] is {token}: expected a token id, 0 to {self.config.vocab_size - 1}", "prompt"
                )
        if len(request.tokens) >= self.context:
            raise RequestError(self._too_long(len(request.tokens)), "prompt", "context_length_exceeded")

    def _too_long(self, tokens: int) -> str:
        window = self.config.max_position_embeddings
        advice = (
            f"shorten it, or raise --context, up to the model's window of {window:,}"
            if self.context < window
            else "shorten it, as this is the model's whole window"
        )
        return (
            f"the prompt has {counted(tokens, 'token')}, but {self.context - 1:,} fit in a context of "
            f"{self.context:,} with a reply: {advice}"
        )

    def _context(self, asked: int | None) -> int:
        window = self.config.max_position_embeddings
        if asked is not None and not 2 <= asked <= window:
            raise IsobitError(f"--context is {asked}: expected 2 to {window}, the checkpoint's window")
        return asked if asked is not None else window


def proposers(model: FlashNext, state: StatePool, mtp_drafts: int) -> list[Proposer]:
    """The sources of drafts, the first asked first."""
    sources: list[Proposer] = [CopyProposer()]
    if model.mtp is not None and mtp_drafts:
        sources.append(MtpProposer(model, state, mtp_drafts))
    return sources


def never_started(
    ticket: Ticket, reason: FinishReason, error: str | None = None, error_code: str | None = None
) -> Finished:
    """The end of a request that never got a lane."""
    waited = time.monotonic() - ticket.submitted
    return Finished(
        reason=reason,
        tokens=(),
        token_hash=token_hash(()),
        logits_hash="",
        prefill=ticket.request.prefill,
        segment_rows=0,
        rows_computed=0,
        rows_reused=0,
        timings=Timings(waited, waited, waited, 0.0, 0.0),
        error=error,
        error_code=error_code,
    )
