"""Drafts from the MTP head: chains of tokens that may follow, for several streams at once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from isobit.model.blocks import Pass
from isobit.model.flash_next import TRUNK, FlashNext
from isobit.model.mtp import draft_batch
from isobit.model.state import StateFullError, StatePool, Stream
from isobit.ops.batch import Array, Batch
from isobit.ops.passes import PassInputs
from isobit.ops.sample import Draw

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
    logit is not finite. The state stays as it was for every later forward; the streams need no journal.
    """
    depths = [depth] * len(streams) if isinstance(depth, int) else list(depth)
    lengths = [_length(model, state, stream, wanted) for stream, wanted in zip(streams, depths, strict=True)]
    drafts: list[list[int]] = [[] for _ in streams]
    active = [i for i, length in enumerate(lengths) if length > 0]
    if not active:
        return drafts
    following = [tokens[i] for i in active]
    residual = model.ops.take_rows(state.recurrent["mtp.streams"], [streams[i].slot for i in active])
    for step in range(max(lengths)):
        batch = draft_batch([streams[i] for i in active], step)
        residual, logits = _draft_rows(model, state, batch, residual, following)
        chosen = [GREEDY if draws is None else draws[i] for i in active]
        positioned = [
            replace(draw, position=streams[i].rows + 1 + step) for i, draw in zip(active, chosen, strict=True)
        ]
        drawn = model.ops.to_host(model.ops.sample(logits, positioned).tokens).tolist()
        for i, token in zip(active, drawn, strict=True):
            drafts[i] += [token] if token >= 0 else []
        going_on = [row for row, i in enumerate(active) if drawn[row] >= 0 and step + 1 < lengths[i]]
        if not going_on:
            break
        if len(going_on) < len(active):
            residual = model.ops.take_rows(residual, going_on)
        active, following = [active[row] for row in going_on], [drawn[row] for row in going_on]
    return drafts


def _draft_rows(
    model: FlashNext, state: StatePool, batch: Batch, residual: Array, following: Sequence[int]
) -> tuple[Array, Array]:
    """One draft row a stream: the head's output streams [R, S, H] and the logits [R, vocabulary]."""
    head = model.mtp
    assert head is not None, "the checkpoint has no MTP head"

    def draft(given: PassInputs) -> tuple[Array, Array]:
        run = Pass(model.ops, state, given.batches[TRUNK], given)
        embedded = model.ops.embed(given.arrays["tokens"], model.embedding)
        out = head.propose(run, given.arrays["streams"], embedded)
        return out, model.logits(out, head.mixer)

    arrays = {"tokens": np.array(following, dtype=np.int32), "streams": residual}
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
