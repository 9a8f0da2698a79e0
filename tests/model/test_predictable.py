"""The predictable checkpoint: the MTP head foresees most tokens, and the tokens are no loop."""

from dataclasses import replace
from itertools import pairwise

import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.model.drafting import GREEDY, propose_mtp
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops
from isobit.ops.sample import Draw

LENGTH = 200


@pytest.fixture(scope="module")
def predictable(make_checkpoint):
    return load_model(Checkpoint(make_checkpoint("test", predictable=True)), load_ops("cpu"), context=512)


def reply_and_drafts(model, prompt, draw: Draw, drawn_like: Draw) -> tuple[list[int], list[int]]:
    """LENGTH tokens drawn one by one, and for each the token that the MTP head drafts in its place."""
    state = model.new_state(slots=1, pages=4)
    stream, reply, drafts = state.open(), [], []
    following = tuple(prompt)
    for _ in range(LENGTH):
        logits = model.forward(state, Plan((Segment(stream, following),)))
        (token,) = model.ops.sample(logits, [replace(draw, position=stream.rows)]).tokens.tolist()
        reply.append(token)
        drafts += propose_mtp(model, state, [stream], [token], 1, [drawn_like])[0]
        following = (token,)
    return reply, drafts


@pytest.mark.parametrize("drawn_like", [GREEDY, Draw(seed=5)], ids=["likeliest", "as the reply draws"])
def test_most_sampled_tokens_are_foreseen(predictable, drawn_like):
    reply, drafts = reply_and_drafts(predictable, (1, 2, 3), Draw(seed=5), drawn_like)
    foreseen = sum(token == draft for token, draft in zip(reply[1:], drafts, strict=False))
    assert foreseen > 0.8 * (LENGTH - 1)
    assert len(set(reply)) > LENGTH // 2
    assert len(set(pairwise(reply))) > LENGTH // 2


def test_the_usual_checkpoint_foresees_nothing(model):
    reply, drafts = reply_and_drafts(model, (1, 2, 3), Draw(seed=5), GREEDY)
    assert sum(token == draft for token, draft in zip(reply[1:], drafts, strict=False)) < 0.2 * LENGTH
