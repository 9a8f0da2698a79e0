"""Running token sequences through a model under different cuts."""

import numpy as np

from isobit.model.plan import Plan, Segment
from isobit.model.state import StatePool, Stream


def run(model, state: StatePool, stream: Stream, tokens, cuts=(), logits="all") -> np.ndarray:
    """Feed tokens to the stream in segments that end at `cuts` and at the end; the logits of all rows."""
    parts, begin = [], 0
    for end in [*sorted(set(cuts) & set(range(1, len(tokens)))), len(tokens)]:
        parts.append(model.forward(state, Plan((Segment(stream, tuple(tokens[begin:end]), logits),))))
        begin = end
    return np.concatenate(parts)


def serially(model, tokens) -> tuple[np.ndarray, list[str]]:
    """The oracle: one row a forward. The logits of all rows, and the state's digest after each."""
    state = model.new_state(slots=1, pages=16)
    stream = state.open()
    logits, digests = [], []
    for token in tokens:
        logits.append(run(model, state, stream, [token]))
        digests.append(state.digest(stream))
    return np.concatenate(logits), digests
