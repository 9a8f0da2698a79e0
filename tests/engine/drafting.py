"""Serving replies with drafts by the plainest loop there is, and a proposer that knows what is right."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from isobit.engine.drafts import Drafter, LaneDrafts, Outcome, accepted_tokens, draw_like
from isobit.engine.request import Sampling
from isobit.model.plan import Plan, Segment
from isobit.model.state import StatePool, Stream


@dataclass(frozen=True)
class Wanted:
    """A reply to compute: its prompt, its number of tokens, its sampling."""

    prompt: tuple[int, ...]
    length: int
    sampling: Sampling


@dataclass(frozen=True)
class Reply:
    tokens: list[int]
    digest: str


class OracleProposer:
    """Proposes the tokens that really follow, each wrong with a probability; `truth`: reply by prompt."""

    name = "oracle"

    def __init__(self, truth: dict[tuple[int, ...], list[int]], probability: float, rng, most: int = 8):
        self.truth, self.probability, self.rng, self.most = truth, probability, rng, most

    def propose(self, lanes: Sequence[LaneDrafts], depths: Sequence[int]) -> list[list[int]]:
        return [self._of_lane(lane, depth) for lane, depth in zip(lanes, depths, strict=True)]

    def _of_lane(self, lane: LaneDrafts, depth: int) -> list[int]:
        known = next((*prompt, *reply) for prompt, reply in self.truth.items() if is_prefix(prompt, lane.tokens))
        following = known[len(lane.tokens) :][:depth]
        return [token if self.rng.random() < self.probability else token ^ 1 for token in following]


def is_prefix(prefix: Sequence[int], tokens: Sequence[int]) -> bool:
    return tuple(tokens[: len(prefix)]) == tuple(prefix)


def serial_reply(model, wanted: Wanted) -> Reply:
    """The oracle: alone, one row a forward, no drafts."""
    state = model.new_state(slots=1, pages=8)
    stream, tokens = state.open(), list(wanted.prompt)
    while len(tokens) < len(wanted.prompt) + wanted.length:
        logits = model.forward(state, Plan((Segment(stream, (tokens[stream.rows],)),)))
        if stream.rows == len(tokens):
            tokens += draws(model, logits, wanted.sampling, stream.rows, 1)
    return Reply(tokens[len(wanted.prompt) :], state.digest(stream))


def drafted_replies(model, state: StatePool, drafter: Drafter, requests: Sequence[Wanted]) -> list[Reply]:
    """All requests at once, a lane each, in rounds with drafts; lanes end when their reply has its length."""
    lanes = [begin(model, state, drafter, wanted) for wanted in requests]
    replies: list[Reply | None] = [None] * len(lanes)
    while running := [i for i, reply in enumerate(replies) if reply is None]:
        room = [left(lanes[i], requests[i]) - 1 for i in running]
        drafts = drafter.propose([lanes[i] for i in running], room)
        segments = [
            Segment(lanes[i].stream, (lanes[i].tokens[-1], *draft.tokens), "all", journal=True)
            for i, draft in zip(running, drafts, strict=True)
        ]
        firsts = [segment.stream.rows + 1 for segment in segments]
        plan = Plan(tuple(segments))
        logits = model.forward(state, plan)
        outcomes = []
        for i, draft, first, start in zip(running, drafts, firsts, plan.starts, strict=False):
            rows = logits[start : start + 1 + len(draft.tokens)]
            drawn = draws(model, rows, requests[i].sampling, first, len(rows))
            accepted = accepted_tokens(draft.tokens, drawn)
            state.settle(lanes[i].stream, accepted + 1)
            lanes[i].index.extend(drawn[: accepted + 1])
            outcomes.append(Outcome(lanes[i], draft, accepted))
        drafter.learn(outcomes, seconds=1.0 + 0.1 * len(logits))
        for i in running:
            if left(lanes[i], requests[i]) == 0:
                replies[i] = Reply(list(lanes[i].tokens[len(requests[i].prompt) :]), state.digest(lanes[i].stream))
                drafter.close(lanes[i])
                state.close(lanes[i].stream)
    return [reply for reply in replies if reply is not None]


def begin(model, state: StatePool, drafter: Drafter, wanted: Wanted) -> LaneDrafts:
    """A lane with its prompt in the state and its first token drawn."""
    stream: Stream = state.open()
    lane = drafter.open(stream, wanted.prompt, wanted.sampling)
    logits = model.forward(state, Plan((Segment(stream, wanted.prompt),)))
    lane.index.extend(draws(model, logits, wanted.sampling, stream.rows, 1))
    return lane


def left(lane: LaneDrafts, wanted: Wanted) -> int:
    """Tokens that the reply still lacks."""
    return len(wanted.prompt) + wanted.length - len(lane.tokens)


def draws(model, logits: np.ndarray, sampling: Sampling, first: int, count: int) -> list[int]:
    """The tokens that positions first to first + count - 1 draw from their rows of logits."""
    at = [replace(draw_like(sampling), position=first + i) for i in range(count)]
    return model.ops.sample(logits, at).tokens.tolist()
