"""The rounds: the active lanes, and one forward for all of them at a time."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from isobit.engine import memory, schedule
from isobit.engine.budget import Budget
from isobit.engine.drafts import MOST_COPIED, Draft, Drafter, LaneDrafts, Outcome, accepted_tokens
from isobit.engine.lane import Lane, Ticket, emit, logits_hash
from isobit.engine.placement import Placement
from isobit.engine.prefill import segment_limit
from isobit.engine.prompt_cache import Kind, PromptCache
from isobit.engine.request import FinishReason, PromptProgress, Request, TokenEvent
from isobit.engine.settings import EngineSettings
from isobit.engine.shortage import OUT_OF_MEMORY, Shortage, fewer_rows
from isobit.errors import CheckpointError, IsobitError, counted, first_sentence, ran_out
from isobit.model.flash_next import FlashNext
from isobit.model.plan import Plan, Segment
from isobit.model.state import StateFullError, StatePool, Stream, pages_for
from isobit.ops.batch import Array
from isobit.ops.sample import Draw, Samples

PROGRESS_SECONDS = 0.05
WORTHWHILE_ROWS = 64  # a shared prefix shorter than this beyond what is kept is computed twice rather than waited for
KEPT_SEGMENT = 512  # a segment of at least so many rows has its end kept
DRAFT_ROWS = MOST_COPIED + 1  # the most rows of a replying lane's window
log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Turn:
    """A lane's part of a round: the tokens it feeds, drafts last, and the draws of the rows it wants logits for.

    last_try: whether the lane ends if there is no memory for it.
    """

    lane: Lane
    tokens: tuple[int, ...]
    draft: Draft
    draws: tuple[Draw, ...]
    last_try: bool = False

    @property
    def segment(self) -> Segment:
        """What the forward computes of it."""
        stream = self.lane.stream
        assert stream is not None
        return Segment(stream, self.tokens, logits_wanted(self), journal=bool(self.draft.tokens))


class Rounds:
    """The lanes of one model and what they share: state, prompt cache and drafts. Used by one thread."""

    def __init__(
        self,
        model: FlashNext,
        state: StatePool,
        cache: PromptCache,
        drafter: Drafter,
        budget: Budget,
        settings: EngineSettings,
        placement: Placement,
    ):
        self.model, self.state, self.cache, self.drafter = model, state, cache, drafter
        self.budget, self.settings, self.placement = budget, settings, placement
        self.shortage = Shortage()
        self.lanes: list[Lane] = []
        self.prompt_rows = self.reply_tokens = 0
        self.problem: str | None = None  # what every request fails with

    def run(self) -> None:
        """One forward for the active lanes, more where memory is short: choose, plan, forward, sample, commit."""
        for lane in list(self.lanes):
            self._retire_if_over(lane)
        running = [lane for lane in schedule.running(self.lanes) if self._resume(lane)]
        chosen = schedule.choose(self._arrived(running))
        lanes = self._with_pages(chosen)
        if chosen and not lanes:
            raise StateFullError("no lane can go on: every key-value page is taken")
        if not lanes:
            return
        try:
            turns = self._turns(lanes)
        except Exception as error:
            self._fail(lanes, error)
            return
        waiting = [[turn] for turn in turns] if self.shortage.apart else [turns]
        while waiting:
            waiting[:1] = self._compute(waiting[0])

    def cancel(self) -> None:
        """Have every lane end in the next round as cancelled."""
        for lane in self.lanes:
            lane.ticket.cancel()

    def abandon(self, error: Exception) -> None:
        """End every lane with an error."""
        self._fail(list(self.lanes), error)

    def _compute(self, turns: list[Turn]) -> list[list[Turn]]:
        """One forward and what comes of it; or, when there is no memory for it, the smaller ones to try instead."""
        try:
            started = self.drafter.clock()
            # Other sizes of prompts seldom come again, and serial prompts are what all else is checked against.
            recurring = not any(turn.lane.prompt_left for turn in turns)
            plan = Plan(tuple(turn.segment for turn in turns), recurring)
            logits, drawn = self.model.draw(self.state, plan, [draw for turn in turns for draw in turn.draws])
        except Exception as error:
            if not ran_out(error):
                self._fail([turn.lane for turn in turns], error)
                return []
            wanting = first_sentence(error)
        else:
            self._take(turns, logits, drawn, started)
            return []
        # The failed forward's arrays are freed only now that its traceback is gone.
        return self._smaller(turns, wanting)

    def _smaller(self, turns: list[Turn], wanting: str) -> list[list[Turn]]:
        """The forwards to try after memory ran out: a shorter segment, no drafts, each lane alone; none ends a lane."""
        self._free_memory()
        longest = max(turns, key=lambda turn: len(turn.tokens) if turn.lane.prompt_left else 0)
        if longest.lane.prompt_left and len(longest.tokens) > 1:
            rows = fewer_rows(len(longest.tokens))
            log.warning("memory ran out (%s): trying a prompt segment of %s", wanting, counted(rows, "row"))
            self.shortage.limit_rows(rows)
            return [[self._shorter(turn, rows) if turn is longest else turn for turn in turns]]
        if any(turn.draft.tokens for turn in turns):
            return [[without_draft(turn) for turn in turns]]
        if len(turns) > 1:
            log.warning("memory ran out (%s): trying each of %s alone", wanting, counted(len(turns), "lane"))
            self.shortage.part()
            return [[turn] for turn in turns]
        if not turns[0].last_try:
            return [[replace(turns[0], last_try=True)]]
        self._retire_short(turns[0].lane, wanting)
        return []

    def _shorter(self, turn: Turn, rows: int) -> Turn:
        turn.lane.tell_limit(rows)
        return replace(turn, tokens=turn.tokens[:rows], draws=())

    def _take(self, turns: list[Turn], logits: Array, drawn: Samples, started: float) -> None:
        """Take what a forward gave and drew into the lanes."""
        try:
            samples = self._with_more_memory(lambda: self.model.ops.samples_to_host(drawn))
        except Exception as error:
            self._fail([turn.lane for turn in turns], error)
            return
        self.problem = None
        self._learn(turns, samples, self.drafter.clock() - started)
        row = 0
        for turn in turns:
            try:
                self._commit(turn, logits, samples, row)
            except Exception as error:
                self._fail([turn.lane], error)
            row += len(turn.draws)

    def _fail(self, lanes: Sequence[Lane], error: Exception) -> None:
        """End lanes whose state can no longer be trusted."""
        if ran_out(error):
            for lane in lanes:
                self._retire_short(lane, first_sentence(error))
            return
        if isinstance(error, CheckpointError):
            self.problem = str(error)
        known = isinstance(error, IsobitError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        log.error("a round failed: %s", message, exc_info=None if known else error)
        for lane in lanes:
            self._retire(lane, "error", message)

    def _retire_short(self, lane: Lane, wanting: str) -> None:
        one_row = memory.gib(self.model.workspace_bytes(1))
        message = (
            f"memory ran out ({wanting}): {self.placement.free_text()}, and one row of this request needs up to "
            f"{one_row}; try again later, or have the server started with a lower --context, --parallel or "
            "--prompt-cache-gib"
        )
        log.error("a request ends: %s", message)
        self._retire(lane, "error", message, OUT_OF_MEMORY)

    def _free_memory(self) -> None:
        """Give back what is kept for forwards to come."""
        self.model.ops.passes.release()
        self.placement.release()

    def _with_more_memory(self, step: Callable[[], Result]) -> Result:
        """What a step gives; tried a second time if memory runs out in it. The step may be repeated."""
        try:
            return step()
        except Exception as error:
            if not ran_out(error):
                raise
            log.warning("memory ran out (%s): trying again", first_sentence(error))
        self._free_memory()
        return step()

    def _turns(self, lanes: list[Lane]) -> list[Turn]:
        replying = [lane for lane in lanes if not lane.prompt_left]
        drafting = [lane for lane in replying if lane.drafts is not None]
        room = [lane.limit - len(lane.reply) - 1 for lane in drafting]
        proposed = self._proposed([lane.drafts for lane in drafting if lane.drafts is not None], room)
        drafts = {id(lane): draft for lane, draft in zip(drafting, proposed, strict=True)}
        return [self._turn(lane, lanes, drafts.get(id(lane), Draft())) for lane in lanes]

    def _proposed(self, lanes: list[LaneDrafts], room: list[int]) -> list[Draft]:
        """A draft for each lane; empty ones where there is no memory to draft."""
        try:
            return self.drafter.propose(lanes, room)
        except Exception as error:
            if not ran_out(error):
                raise
            log.warning("memory ran out (%s): nothing is drafted in this round", first_sentence(error))
        self._free_memory()
        return [Draft() for _ in lanes]

    def _turn(self, lane: Lane, lanes: list[Lane], draft: Draft) -> Turn:
        if not lane.prompt_left:
            draws = tuple(lane.draw(ahead) for ahead in range(1, len(draft.tokens) + 2))
            return Turn(lane, (lane.reply[-1], *draft.tokens), draft, draws)
        rows = schedule.segment_rows(lane, lanes, self.settings.decode_share)
        most = self.shortage.rows
        if most is not None and most < min(rows, lane.prompt_left):
            lane.tell_limit(most)
            rows = most
        end = min(lane.rows + rows, lane.next_cut)
        tokens = lane.request.tokens[lane.rows : end]
        last = end == len(lane.request.tokens)
        return Turn(lane, tokens, draft, (lane.draw(len(tokens)),) if last else ())

    def _learn(self, turns: list[Turn], samples: Samples, seconds: float) -> None:
        """Tell the drafter what the round gave."""
        outcomes, row = [], 0
        for turn in turns:
            if turn.lane.reply and turn.lane.drafts is not None:
                accepted = accepted_tokens(turn.draft.tokens, samples.tokens[row:].tolist())
                outcomes.append(Outcome(turn.lane.drafts, turn.draft, accepted))
            row += len(turn.draws)
        decoding_only = all(turn.lane.reply for turn in turns)
        self.drafter.learn(outcomes, seconds if decoding_only else None)

    def _sample(self, logits: Array, draws: list[Draw]) -> Samples:
        """The draws of the rows of logits, on the host."""
        ops = self.model.ops
        return self._with_more_memory(lambda: ops.samples_to_host(ops.sample(logits, draws)))

    def _row(self, logits: Array, row: int) -> np.ndarray:
        """One row of logits as a NumPy array."""
        return self.model.ops.to_host(logits[row])

    def _commit(self, turn: Turn, logits: Array, samples: Samples, row: int) -> None:
        """Take a turn's results into its lane: the prompt's progress, then the tokens drawn while drafts are right."""
        lane, before = turn.lane, turn.lane.rows - len(turn.tokens)
        if not lane.reply:
            self._count_prompt(lane, len(turn.tokens))
            if turn.draws:
                self._prompt_done(lane, self._row(logits, row))
        failed = self._take_tokens(turn, logits, samples, row) if turn.draws else None
        lane.rows_computed += lane.rows - before
        if failed is not None:
            self._retire(lane, "error", failed)
        else:
            self._retire_if_over(lane)

    def _take_tokens(self, turn: Turn, logits: Array, samples: Samples, row: int) -> str | None:
        """Add the drawn tokens to the reply up to the first wrong draft; returns what went wrong, or None."""
        lane, taken, failed = turn.lane, 0, None
        for place, drafted in enumerate([*turn.draft.tokens, None], row):
            if not samples.finite[place]:
                failed = (
                    f"a logit at position {turn.draws[taken].position} is not finite: values of this checkpoint "
                    "overflow, or a row of its n-gram table is damaged; download or convert it again"
                )
                break
            token = int(samples.tokens[place])
            self._take_token(lane, logits, place, token, float(samples.logprob[place]))
            taken += 1
            if token != drafted or lane.end_reason() is not None:
                break
        if turn.draft.tokens and lane.stream is not None:
            stream, rows = lane.stream, max(taken, 1)
            self._with_more_memory(lambda: self.state.settle(stream, rows))
        lane.drafted += len(turn.draft.tokens)
        lane.accepted += max(taken - 1, 0)
        return failed

    def _take_token(self, lane: Lane, logits: Array, place: int, token: int, logprob: float) -> None:
        if lane.first_token is None:
            lane.first_token = time.monotonic()
        lane.reply.append(token)
        if lane.drafts is not None:
            lane.drafts.index.extend([token])
        self.reply_tokens += 1
        emit(lane.ticket, self._token_event(lane, logits, place, token, logprob))

    def _count_prompt(self, lane: Lane, rows: int) -> None:
        lane.largest_segment = max(lane.largest_segment, rows)
        self.prompt_rows += rows
        now = time.monotonic()
        if not lane.prompt_left or now - lane.last_progress >= PROGRESS_SECONDS:
            lane.last_progress = now
            emit(lane.ticket, PromptProgress(lane.rows, len(lane.request.tokens)))
        if lane.prompt_left and (lane.rows in lane.cuts or rows >= KEPT_SEGMENT):
            self._keep(lane, "message" if lane.rows in lane.cuts else "segment")

    def _prompt_done(self, lane: Lane, logits: np.ndarray) -> None:
        lane.prompt_hash = logits_hash(logits)
        self._keep(lane, "prompt", logits)

    def _keep(self, lane: Lane, kind: Kind, logits: np.ndarray | None = None) -> None:
        if lane.stream is None:
            return
        try:
            self.cache.keep(lane.history, lane.stream, logits, kind)
        except Exception as error:
            if not ran_out(error):
                raise
            log.warning("memory ran out (%s): a state is not kept", first_sentence(error))

    def _token_event(self, lane: Lane, logits: Array, place: int, token: int, logprob: float) -> TokenEvent:
        count = lane.request.logprobs
        if not count:
            return TokenEvent(token, None if count is None else logprob)
        ids, logprobs = self._with_more_memory(lambda: self.model.ops.top_logprobs(logits[place : place + 1], count))
        alternatives = tuple((int(i), float(p)) for i, p in zip(ids[0], logprobs[0], strict=True))
        return TokenEvent(token, logprob, alternatives)

    def awaits_prefix(self, request: Request) -> bool:
        """Whether a lane is just computing much of this prompt; its state will be kept where the two part."""
        prompts = [lane for lane in self.lanes if lane.prompt_left and lane.stream is not None]
        if not prompts or not request.reuse or not self.settings.prompt_cache_gib or request.priority == "background":
            return False
        kept = self.cache.kept_rows(request.tokens)
        for lane in prompts:
            shared = shared_prefix(lane.request.tokens, request.tokens)
            worth_it = shared - kept >= WORTHWHILE_ROWS and lane.rows < shared
            if worth_it and not (lane.background or lane.ticket.cancelled):
                lane.cut_at(min(shared, len(request.tokens) - 1) if shared < len(lane.request.tokens) else shared)
                return True
        return False

    def has_lane(self, request: Request) -> bool:
        """Whether pages and a slot are to be had, a background lane's if need be."""
        reserved = sum(lane.reserved_pages for lane in self.lanes)
        if reserved + pages_for(len(request.tokens) + self._limit(request)) > self.budget.pages:
            return False
        if not self.state.free_slots and request.priority != "background":
            yielding = [lane for lane in self.lanes if lane.background and lane.stream is not None]
            if yielding:
                self._suspend_if_room(yielding[-1])
        return self.state.free_slots > 0

    def start(self, ticket: Ticket) -> None:
        stream, logits = self._begun(ticket.request)
        try:
            lane = self._lane(ticket, stream)
        except BaseException:
            self.state.close(stream)
            raise
        self.lanes.append(lane)
        if logits is not None and not lane.prompt_left:
            self._resume_reply(lane, logits)

    def _lane(self, ticket: Ticket, stream: Stream) -> Lane:
        request = ticket.request
        asked = segment_limit(
            request.prefill, request.segment_rows, self.settings.segment_rows or self.placement.segment_rows
        )
        rows, notice = self.fit(min(asked, len(request.tokens)))
        lane = Lane(ticket, stream, self._limit(request), rows, notice, time.monotonic(), rows_reused=stream.rows)
        lane.cuts = set(request.keep_rows)
        if self.settings.drafts and request.draft:
            lane.drafts = self.drafter.open(stream, request.tokens, request.sampling)
        return lane

    def _begun(self, request: Request) -> tuple[Stream, np.ndarray | None]:
        """A stream for a request, from a kept state where there is one, and the logits that were kept with it."""
        try:
            hit = self.cache.lookup(request.tokens) if request.reuse else None
            if hit is not None:
                return self.cache.restore(hit), hit.logits
        except Exception as error:
            if not ran_out(error):
                raise
            log.warning("memory ran out (%s): a prompt begins at its first row", first_sentence(error))
        return self._with_more_memory(self.state.open), None

    def _resume_reply(self, lane: Lane, logits: np.ndarray) -> None:
        """A prompt whose every row was kept: its reply begins with the kept logits."""
        draw = lane.draw(0)
        emit(lane.ticket, PromptProgress(lane.rows, lane.rows))
        lane.prompt_hash = logits_hash(logits)
        try:
            samples = self._sample(logits[None], [draw])
            failed = self._take_tokens(Turn(lane, (), Draft(), (draw,)), logits[None], samples, 0)
        except Exception as error:
            self._fail([lane], error)
            return
        if failed is not None:
            self._retire(lane, "error", failed)
        else:
            self._retire_if_over(lane)

    def _suspend_if_room(self, lane: Lane) -> None:
        """Suspend a lane, unless there is no memory for its state beside the others."""
        try:
            self._with_more_memory(lambda: self._suspend(lane))
        except Exception as error:
            if not ran_out(error):
                raise
            log.warning("memory ran out (%s): a background request keeps its lane", first_sentence(error))

    def _suspend(self, lane: Lane) -> None:
        """Take a lane's slot away; it goes on from its kept state when there is room again."""
        assert lane.stream is not None
        lane.suspended = self.state.save(lane.stream)
        self.state.close(lane.stream)
        lane.stream = None

    def _resume(self, lane: Lane) -> bool:
        """Whether the lane has a slot, after taking one if it was suspended and one is free."""
        if lane.stream is None and lane.suspended is not None and self.state.free_slots:
            suspended = lane.suspended
            try:
                lane.stream = self._with_more_memory(lambda: self.state.restore(suspended))
            except Exception as error:
                self._fail([lane], error)
                return False
            self.state.drop(lane.suspended)
            lane.suspended = None
            if lane.drafts is not None:
                lane.drafts.stream = lane.stream
        return lane.stream is not None

    def _arrived(self, lanes: list[Lane]) -> list[Lane]:
        """The lanes whose states are on the device; without any, the first, whose forward then waits there."""
        return [lane for lane in lanes if lane.stream is not None and self.state.arrived(lane.stream)] or lanes[:1]

    def _with_pages(self, lanes: list[Lane]) -> list[Lane]:
        """The lanes whose next rows there are pages for, all of them together."""
        ready, taken = [], 0
        for lane in lanes:
            needed = self._pages_needed(lane)
            if self.cache.free_pages(taken + needed):
                ready.append(lane)
                taken += needed
        return ready

    def _pages_needed(self, lane: Lane) -> int:
        """The most pages that the lane's next rows take."""
        assert lane.stream is not None
        rows = min(lane.prompt_left, lane.segment_rows) if lane.prompt_left else DRAFT_ROWS
        return self.state.pages_needed(lane.stream, min(rows, len(lane.request.tokens) + lane.limit - lane.rows))

    def _limit(self, request: Request) -> int:
        """The most reply tokens of a request."""
        room = self.model.context - len(request.tokens)
        return room if request.max_tokens is None else min(request.max_tokens, room)

    def fit(self, rows: int) -> tuple[int, str | None]:
        """As many of the asked rows as the buffers can be had for, and what to tell the user if they are fewer."""
        fitting = rows
        while fitting > 1 and not self._can_buffer(fitting):
            fitting //= 2
        if fitting == rows:
            return rows, None
        return (
            fitting,
            f"prompt segments of {counted(fitting, 'row')}, not {rows:,}: there is no memory for larger buffers",
        )

    def _can_buffer(self, rows: int) -> bool:
        needed, kept = self.model.workspace_bytes(rows), self.model.replay_bytes()
        return needed + kept <= self.budget.buffer_bytes and self.placement.can_allocate(needed)

    def _retire_if_over(self, lane: Lane) -> None:
        reason = lane.end_reason()
        if reason is not None:
            self._retire(lane, reason)

    def _retire(
        self, lane: Lane, reason: FinishReason, error: str | None = None, error_code: str | None = None
    ) -> None:
        event = lane.finished(reason, error, error_code)
        self.lanes.remove(lane)
        if lane.drafts is not None:
            self.drafter.close(lane.drafts)
        if lane.suspended is not None:
            self.state.drop(lane.suspended)
        if lane.stream is not None:
            if reason != "error":
                self._keep(lane, "reply" if lane.reply else "segment")
            self.state.close(lane.stream)
        emit(lane.ticket, event)


def without_draft(turn: Turn) -> Turn:
    """A replying lane's turn with its last token alone."""
    return replace(turn, tokens=turn.tokens[:1], draft=Draft(), draws=turn.draws[:1]) if turn.draft.tokens else turn


def logits_wanted(turn: Turn) -> str:
    """Which rows of a turn need logits."""
    return "all" if len(turn.draws) == len(turn.tokens) else "last" if turn.draws else "none"


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts have in common from the start."""
    count = min(len(one), len(other))
    differing = np.flatnonzero(np.not_equal(one[:count], other[:count]))
    return int(differing[0]) if len(differing) else count
