"""Drafts from the MTP head: chains of tokens that may follow, for several streams at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from isobit.model.blocks import Pass
from isobit.model.flash_next import DRAWS, TRUNK, FlashNext
from isobit.model.mtp import draft_batch
from isobit.model.state import StateFullError, StatePool, Stream
from isobit.ops.batch import Array, Batch
from isobit.ops.passes import PassInputs
from isobit.ops.sample import Draw, packed_draws

GREEDY = Draw(temperature=0.0)


def propose_mtp(
    model: FlashNext,
    state: StatePool,
    streams: Sequence[Stream],
    tokens: Sequence[int],
    depth: int | Sequence[int],
    draws: Sequence[Draw] | None = None,
) -> list[list[int]]:
    """Up to `depth` tokens (of each stream, or one number for all) that may follow `tokens[i]` in stream i.

    tokens[i] is drawn already, but not in the stream's state. draws: how each stream's tokens are drawn, their
    positions apart, since a draft drawn as its stream draws is accepted more often; None takes the likeliest, ties to
    the lower id. A chain is shorter, or empty, where the context ends, pages are short, the stream has no row yet, or a
    logit is not finite. The state stays as it was for every later forward; the streams need no journal. Raises
    CheckpointError if a file that the model reads from was edited.
    """
    model.check_files()
    depths = [depth] * len(streams) if isinstance(depth, int) else list(depth)
    lengths = [_length(model, state, stream, wanted) for stream, wanted in zip(streams, depths, strict=True)]
    # The longest chains first, so that those which go on are always the first rows.
    order = sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: -lengths[i])
    chains = [Chain(streams[i], tokens[i], lengths[i], GREEDY if draws is None else draws[i]) for i in order]
    drafts: list[list[int]] = [[] for _ in streams]
    for i, drawn in zip(order, _drawn_chains(model, state, chains), strict=True):
        drafts[i] = list(takewhile(lambda token: token >= 0, drawn))
    return drafts


@dataclass(frozen=True)
class Chain:
    """`length` tokens to draft after `token`, which follows a stream's rows, each drawn as `draw` says."""

    stream: Stream
    token: int
    length: int
    draw: Draw

    def draw_at(self, step: int) -> Draw:
        """How its token of a step is drawn, keyed by its absolute position."""
        return replace(self.draw, position=self.stream.rows + 1 + step)


def _drawn_chains(model: FlashNext, state: StatePool, chains: Sequence[Chain]) -> list[list[int]]:
    """Each chain's tokens, -1 from a logit on that is not finite; longer chains before shorter ones.

    A step's tokens go from the device's last step into the next, and to the host when all steps are under way.
    """
    ops, steps = model.ops, []
    if not chains:
        return []
    residual = ops.take_rows(state.recurrent["mtp.streams"], [chain.stream.slot for chain in chains])
    following = np.array([chain.token for chain in chains], np.int32)
    for step in range(chains[0].length):
        active = [chain for chain in chains if chain.length > step]
        if len(active) < len(following):
            residual, following = (ops.take_rows(rows, range(len(active))) for rows in (residual, following))
        batch = draft_batch([chain.stream for chain in active], step)
        draws = packed_draws([chain.draw_at(step) for chain in active])
        residual, following = _draft_rows(model, state, batch, residual, following, draws)
        steps.append(ops.download(following))
    drawn = [arrived().tolist() for arrived in steps]
    return [[tokens[row] for tokens in drawn[: chain.length]] for row, chain in enumerate(chains)]


def _draft_rows(
    model: FlashNext, state: StatePool, batch: Batch, residual: Array, following: Array, draws: np.ndarray
) -> tuple[Array, Array]:
    """One draft row a stream: the head's output streams [R, S, H], and the tokens int32 [R] drawn from its logits."""
    head = model.mtp
    assert head is not None, "the checkpoint has no MTP head"

    def draft(given: PassInputs) -> tuple[Array, Array]:
        run = Pass(model.ops, state, given.batches[TRUNK], given)
        embedded = model.ops.embed(given.arrays["tokens"], model.embedding)
        out = head.propose(run, given.arrays["streams"], embedded)
        return out, model.ops.sample(model.logits(out, head.mixer), given.arrays[DRAWS]).tokens

    arrays = {"tokens": following, "streams": residual, DRAWS: draws}
    return model.ops.passes.run(("draft", state), PassInputs({TRUNK: batch}, arrays), draft)


def _length(model: FlashNext, state: StatePool, stream: Stream, wanted: int) -> int:
    """How many tokens can be drafted and then verified; pages for the head's draft rows are reserved."""
    length = min(wanted, model.context - 1 - stream.rows) if stream.rows else 0
    if length > 0:
        try:
            state.reserve(stream, length - 1)
        except StateFullError:
            return 0
    return length
