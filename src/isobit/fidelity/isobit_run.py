"""isobit's side of the comparison: deep segments with every row's logits and a trace of the choices."""

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.choices import LayerChoices, Recording, Run
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import pages_for
from isobit.model.trace import LayerTrace, Trace
from isobit.ops import load_ops

SEGMENT_ROWS = 512


def run_isobit(checkpoint: Checkpoint, tokens: np.ndarray) -> Run:
    """Teacher-force the tokens, int [T], from the start of a stream."""
    ops = load_ops("cpu")
    model = load_model(checkpoint, ops, len(tokens))
    state = model.new_state(slots=1, pages=pages_for(len(tokens)))
    stream = state.open()
    logits, recording = [], Recording()
    for start in range(0, len(tokens), SEGMENT_ROWS):
        trace = Trace()
        segment = Segment(stream, tuple(tokens[start : start + SEGMENT_ROWS].tolist()), logits="all")
        logits.append(ops.to_host(model.forward(state, Plan((segment,)), trace)).copy())
        for layer in range(checkpoint.config.num_hidden_layers):
            _record(recording, layer, trace.layer(f"layers.{layer}"))
    return Run(np.concatenate(logits), recording)


def _record(recording: Recording, layer: int, trace: LayerTrace) -> None:
    router = recording.setdefault(("router", layer), LayerChoices())
    for scores, ids in zip(trace.router_logits, trace.router_ids, strict=True):
        router.add(scores, ids)
    if trace.blocks is None:
        return
    blocks = recording.setdefault(("blocks", layer), LayerChoices())
    for scores, ids, count in zip(trace.block_scores, trace.blocks, trace.block_counts, strict=True):
        blocks.add(scores, ids[:count])
