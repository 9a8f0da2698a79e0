"""isobit's side of the comparison: deep segments with every row's logits, choices and streams."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.boundaries import part_names
from isobit.fidelity.choices import LayerChoices, Recording, Run
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import pages_for
from isobit.model.trace import LayerTrace, Trace
from isobit.ops import load_ops

SEGMENT_ROWS = 512


def run_isobit(checkpoint: Checkpoint, tokens: np.ndarray, device: str = "cpu") -> Run:
    """Teacher-force the tokens, int [T], from the start of a stream."""
    ops, taken = tapped(load_ops(device))
    model = load_model(checkpoint, ops, len(tokens))
    state = model.new_state(slots=1, pages=pages_for(len(tokens)))
    stream = state.open()
    cuts = len(part_names(checkpoint.config))
    logits, boundaries, recording = [], [], Recording()
    for start in range(0, len(tokens), SEGMENT_ROWS):
        trace = Trace()
        segment = Segment(stream, tuple(tokens[start : start + SEGMENT_ROWS].tolist()), logits="all")
        logits.append(ops.to_host(model.forward(state, Plan((segment,)), trace)).copy())
        boundaries.append([*taken[: cuts - 1], taken[-1]])  # between them, the MTP head reads
        taken.clear()
        for layer in range(checkpoint.config.num_hidden_layers):
            _record(ops, recording, layer, trace.layer(f"layers.{layer}"))
    return Run(np.concatenate(logits), recording, [np.concatenate(pieces) for pieces in zip(*boundaries, strict=True)])


def tapped(ops: Any) -> tuple[Any, list[np.ndarray]]:
    """The ops, and a list that gets copies of the streams after each change, and of all that is read of them."""
    taken: list[np.ndarray] = []

    def take(array: Any) -> None:
        taken.append(ops.to_host(array).copy())

    def expand_streams(*arguments: Any) -> Any:
        streams = ops.expand_streams(*arguments)
        take(streams)
        return streams

    def gated_read(*arguments: Any) -> Any:
        mixed, injection = ops.gated_read(*arguments)
        take(mixed)
        return mixed, injection

    def gated_write(streams: Any, *arguments: Any) -> None:
        ops.gated_write(streams, *arguments)
        take(streams)

    def gated_write_read(streams: Any, injection: Any, y: Any, site: Any) -> Any:
        gated_write(streams, injection, y)
        return gated_read(streams, site)

    def ple_inject(streams: Any, *arguments: Any) -> None:
        ops.ple_inject(streams, *arguments)
        take(streams)

    taps = (expand_streams, gated_read, gated_write, gated_write_read, ple_inject)
    return SimpleNamespace(**{**vars(ops), **{tap.__name__: tap for tap in taps}}), taken


def _record(ops: Any, recording: Recording, layer: int, trace: LayerTrace) -> None:
    router = recording.setdefault(("router", layer), LayerChoices())
    for scores, ids in zip(ops.to_host(trace.router_logits), ops.to_host(trace.router_ids), strict=True):
        router.add(scores, ids)
    if trace.blocks is None:
        return
    blocks = recording.setdefault(("blocks", layer), LayerChoices())
    chosen, counts = ops.to_host(trace.blocks), ops.to_host(trace.block_counts)
    for scores, ids, count in zip(trace.block_scores, chosen, counts, strict=True):
        blocks.add(ops.to_host(scores), ids[:count])
