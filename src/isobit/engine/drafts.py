"""Drafts: tokens that may follow in a lane, proposed before one forward verifies them all.

A draft is accepted exactly as far as it equals the tokens that its positions draw, so drafts change speed alone.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from isobit.engine.guard import DraftCounters, DraftGuard, RoundCosts
from isobit.engine.request import Sampling
from isobit.model.drafting import propose_mtp
from isobit.model.flash_next import FlashNext
from isobit.model.state import StatePool, Stream
from isobit.ops.sample import Draw

COPIES, MTP = "copies", "mtp"

SHORT_MATCH, SURE_MATCH, LONGEST_MATCH = 2, 4, 8  # tokens that must, should, and at most do match before a copy
MOST_COPIED = 12  # tokens in one copied draft
PLACES_LOOKED_AT = 64  # earlier places of the same tokens that are compared
INDEXED_AT_ONCE = 8192  # tokens that one search adds to the index at most
SLOTS = 1 << 16

FIRST_ACCEPTANCE = 0.7
LEAST_FIRST_ACCEPTANCE = 0.4  # of a new lane, whose text may be of another kind than the last one's
ACCEPTANCE_STEP = 0.1  # weight of the newest drafted token in the running acceptance
LEAST_CHANCE = 0.4  # of being accepted with all before it, for one more token to be drafted


class MatchIndex:
    """A lane's tokens, prompt and reply, with the earlier places of their pairs and of their fours.

    Hashed chains as in LZ77 coders: 12 bytes a token, constant time a token; nothing but the tokens is compared.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens = array("i", tokens)
        self._indexed = 0
        self._latest = {length: array("i", [-1]) * SLOTS for length in (SHORT_MATCH, SURE_MATCH)}
        self._earlier = {length: array("i") for length in self._latest}

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the end."""
        self.tokens.extend(tokens)

    def continuation(self, count: int, shortest: int = SHORT_MATCH) -> list[int]:
        """`count` tokens that followed the longest earlier match of the last `shortest` to LONGEST_MATCH tokens.

        The latest of equally long matches counts; a continuation that reaches the end goes on with itself. Empty
        without a match among the PLACES_LOOKED_AT latest places.
        """
        self._index(len(self.tokens) - 1)
        length, place = max((self._longest(order) for order in self._latest), default=(0, -1))
        if length < shortest:
            return []
        period = len(self.tokens) - place - 1
        return [self.tokens[place + 1 + i % period] for i in range(count)]

    def _longest(self, order: int) -> tuple[int, int]:
        """The longest match of at least `order` tokens, and where it ends; (0, -1) if there is none."""
        best, place, end = 0, -1, len(self.tokens) - 1
        if end + 1 < order:
            return best, place
        candidate = self._latest[order][self._slot(order, end)]
        for _ in range(PLACES_LOOKED_AT):
            if candidate < 0 or best == LONGEST_MATCH:
                break
            length = self._matching(candidate, end)
            if length >= order and length > best:
                best, place = length, candidate
            candidate = self._earlier[order][candidate]
        return best, place

    def _matching(self, place: int, end: int) -> int:
        """How many tokens before and at `place` equal those before and at `end`, LONGEST_MATCH at most."""
        tokens, length = self.tokens, 0
        while length < LONGEST_MATCH and length <= place and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def _index(self, end: int) -> None:
        """Enter the places before `end`, so far as one search may."""
        last = min(end, self._indexed + INDEXED_AT_ONCE)
        for order, latest in self._latest.items():
            earlier = self._earlier[order]
            for place in range(self._indexed, last):
                if place + 1 < order:
                    earlier.append(-1)
                    continue
                slot = self._slot(order, place)
                earlier.append(latest[slot])
                latest[slot] = place
        self._indexed = max(last, self._indexed)

    def _slot(self, order: int, place: int) -> int:
        """The chain of the `order` tokens that end at `place`."""
        mixed = 0
        for token in self.tokens[place - order + 1 : place + 1]:
            mixed = (mixed * 0x2F0B4C47 + token + 1) & 0xFFFFFFFF
        return (mixed * 0x9E3779B1 & 0xFFFFFFFF) >> 16


class RunningDepth:
    """How many tokens to draft, from the share of drafted tokens that were accepted lately, at first `acceptance`."""

    def __init__(self, acceptance: float = FIRST_ACCEPTANCE) -> None:
        self.acceptance = acceptance

    def observe(self, proposed: int, accepted: int) -> None:
        """A draft of `proposed` tokens, the first `accepted` of them right; those after a wrong one tell nothing."""
        for _ in range(accepted):
            self.acceptance += ACCEPTANCE_STEP * (1.0 - self.acceptance)
        if accepted < proposed:
            self.acceptance -= ACCEPTANCE_STEP * self.acceptance

    def depth(self, most: int) -> int:
        """1 to `most` tokens: as many as are accepted together with a chance of LEAST_CHANCE."""
        depth, chance = 1, self.acceptance * self.acceptance
        while depth < most and chance >= LEAST_CHANCE:
            depth, chance = depth + 1, chance * self.acceptance
        return min(depth, most)


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the proposer they come from; no tokens: the lane goes on by one row."""

    tokens: tuple[int, ...] = ()
    source: str = ""


@dataclass
class LaneDrafts:
    """What drafting knows of one lane. `index`: prompt and reply; the last token is drawn, not in the stream yet."""

    stream: Stream
    index: MatchIndex
    sampling: Sampling
    depths: dict[str, RunningDepth] = field(default_factory=dict)
    guards: dict[str, DraftGuard] = field(default_factory=dict)

    @property
    def tokens(self) -> array:
        """Prompt and reply so far."""
        return self.index.tokens


class Proposer(Protocol):
    """A source of drafts. `most`: the most tokens that it proposes at a time."""

    name: str
    most: int

    def propose(self, lanes: Sequence[LaneDrafts], depths: Sequence[int]) -> list[list[int]]:
        """For each lane up to depths[i] tokens that may follow its tokens; [] for none."""


class CopyProposer:
    """What followed the last few tokens when they were there before, in the prompt or in the reply.

    shortest: how many tokens must match. While copies are seldom accepted, LONGEST_MATCH of them must.
    """

    name = COPIES
    most = MOST_COPIED

    def __init__(self, shortest: int = SURE_MATCH):
        self.shortest = shortest

    def propose(self, lanes: Sequence[LaneDrafts], depths: Sequence[int]) -> list[list[int]]:
        return [lane.index.continuation(depth, self._needed(lane)) for lane, depth in zip(lanes, depths, strict=True)]

    def _needed(self, lane: LaneDrafts) -> int:
        depth = lane.depths.get(self.name)
        return self.shortest if depth is None or depth.acceptance >= 0.5 else LONGEST_MATCH


class MtpProposer:
    """Chains of the MTP head, all lanes at once, each token drawn as its lane draws. most: the longest chain."""

    name = MTP

    def __init__(self, model: FlashNext, state: StatePool, most: int):
        self.model, self.state, self.most = model, state, most

    def propose(self, lanes: Sequence[LaneDrafts], depths: Sequence[int]) -> list[list[int]]:
        streams, following = [lane.stream for lane in lanes], [lane.tokens[-1] for lane in lanes]
        draws = [draw_like(lane.sampling) for lane in lanes]
        return propose_mtp(self.model, self.state, streams, following, depths, draws)


@dataclass(frozen=True)
class Outcome:
    """What became of a lane's draft: its first `accepted` tokens were right."""

    lane: LaneDrafts
    draft: Draft
    accepted: int


class Drafter:
    """Proposes for all lanes, the first proposer that has something for a lane first; learns from every round.

    `counters`: by the proposer's name, for metrics. most_tokens: drafted tokens of one round over all lanes, each an
    equal share: what there is memory for (`FlashNext.journal_bytes`); None sets no limit. `clock` gives seconds.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        clock: Callable[[], float] = time.perf_counter,
        most_tokens: int | None = None,
    ):
        self.proposers = tuple(proposers)
        self.most_tokens = most_tokens
        self.counters = {proposer.name: DraftCounters() for proposer in self.proposers}
        self.costs = RoundCosts()
        self._rests: dict[str, tuple[int, int]] = {}
        self._acceptances = dict.fromkeys(self.counters, FIRST_ACCEPTANCE)
        self.clock = clock
        self._proposing_seconds = 0.0

    def open(self, stream: Stream, tokens: Sequence[int], sampling: Sampling) -> LaneDrafts:
        """A lane that begins with `tokens`, its prompt."""
        return LaneDrafts(
            stream,
            MatchIndex(tokens),
            sampling,
            {name: RunningDepth(max(last, LEAST_FIRST_ACCEPTANCE)) for name, last in self._acceptances.items()},
            {name: DraftGuard(counters, self._rests.get(name)) for name, counters in self.counters.items()},
        )

    def close(self, lane: LaneDrafts) -> None:
        """The lane ends."""
        self._rests = {name: guard.rests for name, guard in lane.guards.items()}
        self._acceptances = {name: depth.acceptance for name, depth in lane.depths.items()}
        for guard in lane.guards.values():
            guard.close()

    def propose(self, lanes: Sequence[LaneDrafts], room: Sequence[int]) -> list[Draft]:
        """A draft for each lane, of room[i] tokens at most: what the reply's limit, the context and the pages allow."""
        drafts = [Draft() for _ in lanes]
        self._proposing_seconds = 0.0
        if not lanes or self.costs.needs_plain_round(len(lanes)):
            return drafts
        if self.most_tokens is not None:
            room = [min(tokens, self.most_tokens // len(lanes)) for tokens in room]
        start = self.clock()
        for proposer in self.proposers:
            waiting = [
                i
                for i, lane in enumerate(lanes)
                if room[i] > 0 and not drafts[i].tokens and lane.guards[proposer.name].open
            ]
            if not waiting:
                continue
            depths = [lanes[i].depths[proposer.name].depth(min(proposer.most, room[i])) for i in waiting]
            proposed = proposer.propose([lanes[i] for i in waiting], depths)
            for i, tokens in zip(waiting, proposed, strict=True):
                drafts[i] = Draft(tuple(tokens), proposer.name) if tokens else drafts[i]
        self._proposing_seconds = self.clock() - start
        return drafts

    def learn(self, outcomes: Sequence[Outcome], seconds: float | None) -> None:
        """What a round gave: an outcome for each decoding lane, also without a draft.

        seconds: of the forward and the sampling, without the proposing; None for a round that also held prompt rows,
        which tells nothing about what decoding costs.
        """
        for outcome in outcomes:
            self._count(outcome)
        if seconds is None or not outcomes:
            return
        lanes, drafted = len(outcomes), sum(len(outcome.draft.tokens) for outcome in outcomes)
        self.costs.observe(lanes, lanes + drafted, seconds + self._proposing_seconds)
        lost = self.costs.lost_tokens(lanes, lanes + drafted) if drafted else None
        for outcome in outcomes:
            draft = outcome.draft
            for source, guard in outcome.lane.guards.items():
                if source != draft.source:
                    guard.rest()
                elif lost is not None:
                    guard.observe(outcome.accepted, lost * len(draft.tokens) / drafted)

    def _count(self, outcome: Outcome) -> None:
        draft = outcome.draft
        if not draft.tokens:
            return
        outcome.lane.depths[draft.source].observe(len(draft.tokens), outcome.accepted)
        counters = self.counters[draft.source]
        counters.drafts += 1
        counters.proposed_tokens += len(draft.tokens)
        counters.accepted_tokens += outcome.accepted


def accepted_tokens(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the drafted tokens are right: drawn[i] is what the position of draft[i] draws, if all before are."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == drawn[accepted]:
        accepted += 1
    return accepted


def draw_like(sampling: Sampling) -> Draw:
    """How a request's tokens are drawn, at a position still to be named."""
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed)
