"""Kernels of few rows on this GPU, one after the other in a graph: `python bench/cuda/few_rows.py [--layers 16]`.

Microseconds a call of chains of 48 calls at real widths, each with the next layer's weights: kernels that begin when
the one before has ended, beside kernels that begin early and read their weights meanwhile; and a whole forward of few
rows. Both must give the same bytes; exit code 1 if they do not, or if a graph cannot be had.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from unittest.mock import patch

import numpy as np
import torch
from timing import COPY_RATE, event_times, milliseconds

from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.cuda import kernels, memory
from isobit.cuda.errors import KernelError
from isobit.model.blocks import GatedDeltaNet
from isobit.model.flash_next import FlashNext
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import pages_for
from isobit.ops import load_ops
from isobit.ops.delta_rule import cuda as delta
from isobit.ops.experts import cuda as experts
from isobit.ops.gated_residual import cuda as residual
from isobit.ops.linear import cuda as linear
from isobit.ops.linear.cuda_layers import HalfLayer

CALLS, REPLAYS = 48, 9
CONTEXT, PROMPT, STEPS = 2048, 256, 24
Outputs = Sequence[torch.Tensor]
Call = Callable[[], Outputs]


@dataclass
class Chain:
    """Calls in turn; `moving`: what they change in place; `nbytes`: weights or state that one call reads."""

    what: str
    actions: Sequence[Call]
    nbytes: float
    moving: Sequence[torch.Tensor] = ()


def replayed(chain: Chain, early: bool) -> tuple[float, list[torch.Tensor]]:
    """Microseconds a call, and what the calls of the first replay give."""
    begun = [tensor.clone() for tensor in chain.moving]
    for action in chain.actions:
        action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with patch.object(kernels, "EARLY_IN_GRAPHS", early), torch.cuda.graph(graph):
        outputs = [output for action in islice(cycle(chain.actions), CALLS) for output in action()]
    for tensor, value in zip(chain.moving, begun, strict=True):
        tensor.copy_(value)
    for output in outputs:
        output.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    found = [output.clone() for output in (*outputs, *chain.moving)]
    taken = milliseconds(graph.replay, REPLAYS) * 1e3 / CALLS
    for tensor, value in zip(chain.moving, begun, strict=True):
        tensor.copy_(value)
    return taken, found


def same_bytes(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=memory.device())


def layer_chain(what: str, layers: Sequence, rows: int) -> Chain:
    x = normal(rows, layers[0].in_features)
    actions = [lambda layer=layer: (linear.linear(x, layer),) for layer in layers]
    return Chain(f"{what} {layers[0].in_features} x {layers[0].out_features}", actions, layers[0].nbytes)


def linear_chains(model: FlashNext, rows: int) -> Iterator[Chain]:
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDeltaNet)]
    for name in ("in_qkv", "in_z", "in_b", "out"):
        yield layer_chain(name, [getattr(mixer, name) for mixer in mixers], rows)
    sides = [(mixer.in_qkv, mixer.in_z, mixer.in_a, mixer.in_b) for mixer in mixers]
    x = normal(rows, mixers[0].in_qkv.in_features)
    beside = [lambda layers=layers: linear.linears(x, layers) for layers in sides]
    yield Chain("the four of one input, side by side", beside, sum(layer.nbytes for layer in sides[0]))
    yield layer_chain("router", [layer.experts.router for layer in model.layers], rows)
    yield layer_chain("head", [model.head], rows)


def residual_chains(model: FlashNext, rows: int) -> Iterator[Chain]:
    """Reads after writes, and their first halves: blocks of several shapes, and norms in a launch of their own."""
    sites = [site for layer in model.layers for site in (layer.mixer_site, layer.experts_site)]
    width, hidden, streams = sites[0].streams, sites[0].hidden, normal(rows, sites[0].streams, sites[0].hidden)
    injection, y = normal(rows, width), normal(rows, hidden)

    def half(site: residual.GatedResidual) -> Outputs:
        shape = residual.down_few_shape(site, rows)
        if shape is not None:
            return residual.down_few(streams, site, (injection, y), shape)
        assert isinstance(site.down, HalfLayer)
        normed = residual.norm_streams(streams, site, (injection, y))
        return (linear.plain_sums(normed.view(rows, width * hidden), site.down),)

    def whole(site: residual.GatedResidual) -> Outputs:
        mixed, injected = residual.gated_write_read(streams, injection, y, site)
        return (mixed,) if injected is None else (mixed, injected)

    first, second = sites[0].down.nbytes, sites[0].up.nbytes
    for how, changes in RESIDUAL_SHAPES.items():
        yield Chain(f"norms and down, {how}", patched(half, sites, changes), first, [streams])
        yield Chain(f"the whole gated write and read, {how}", patched(whole, sites, changes), first + second, [streams])


RESIDUAL_SHAPES: dict[str, dict[str, object]] = {
    "as the model does": {},
    "32 tiles a feeder": {"CHUNK_TILES": 32},
    "norms by themselves": {"MOST_NORMED_ROWS": 0},
}


def patched(
    step: Callable[[residual.GatedResidual], Outputs], sites: Sequence, changes: dict[str, object]
) -> Sequence[Call]:
    """The step at each site, with changes to the module's constants."""

    def call(site: residual.GatedResidual) -> Outputs:
        with patch.multiple(residual, **changes) if changes else nullcontext():
            return step(site)

    return [lambda site=site: call(site) for site in sites]


def experts_chains(model: FlashNext, rows: int) -> Iterator[Chain]:
    blocks = [layer.experts for layer in model.layers]
    count, chosen = blocks[0].router.out_features, blocks[0].chosen
    logits, x = normal(rows, count), normal(rows, blocks[0].router.in_features)

    def choice(_: object) -> Outputs:
        return experts.route(logits, chosen, blocks[0].renormalise)

    ids, weights = choice(None)

    def products(block) -> Outputs:
        return (experts.experts(x, ids, weights, block.experts),)

    expert_bytes = blocks[0].experts.nbytes / (count + 1)
    yield Chain("router's choice", [lambda block=block: choice(block) for block in blocks], 0.0)
    actions = [lambda block=block: products(block) for block in blocks]
    yield Chain(f"experts, {chosen} of {count}", actions, (rows * chosen + 1) * expert_bytes)


def delta_chains(model: FlashNext, rows: int) -> Iterator[Chain]:
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDeltaNet)]
    state = model.new_state(slots=rows, pages=rows * pages_for(CONTEXT))
    batch = state.batch(Plan(tuple(Segment(state.open(), (1,)) for _ in range(rows))))
    qkv, z = normal(rows, mixers[0].in_qkv.out_features), normal(rows, mixers[0].in_z.out_features)
    a, b = (normal(rows, mixers[0].in_a.out_features) for _ in range(2))
    convs = [state.recurrent[f"{mixer.name}.conv"] for mixer in mixers]
    pools = [state.recurrent[f"{mixer.name}.recurrent"] for mixer in mixers]

    def convolved(mixer: GatedDeltaNet, conv: torch.Tensor) -> Outputs:
        return (delta.causal_conv(qkv, mixer.delta, conv, batch),)

    def moved_on(mixer: GatedDeltaNet, pool: torch.Tensor) -> Outputs:
        return (delta.gated_norm(delta.delta_rule(qkv, a, b, mixer.delta, pool, batch), z, mixer.delta),)

    for what, step, moving, size in (
        ("convolution", convolved, convs, 0.0),
        ("recurrence and its norm", moved_on, pools, 2.0 * rows * pools[0][0].nbytes),
    ):
        pairs = zip(mixers, moving, strict=True)
        yield Chain(what, [lambda own=own, step=step: step(*own) for own in pairs], size, moving)


def chains(model: FlashNext, rows: int) -> Iterator[Chain]:
    for kind in (residual_chains, linear_chains, delta_chains, experts_chains):
        yield from kind(model, rows)


def forwards(model: FlashNext, rows: int, early: bool) -> tuple[float, list[torch.Tensor]]:
    """Milliseconds of a replayed forward of a row of each of `rows` streams, and the logits of all of them."""
    rng = np.random.default_rng(rows)
    state = model.new_state(slots=rows, pages=rows * pages_for(CONTEXT))
    streams = [state.open() for _ in range(rows)]
    vocabulary, logits, times = model.config.vocab_size, [], []
    with patch.object(kernels, "EARLY_IN_GRAPHS", early):
        for stream in streams:
            tokens = tuple(rng.integers(0, vocabulary, PROMPT).tolist())
            model.forward(state, Plan((Segment(stream, tokens),)))
        for _ in range(STEPS):
            drawn = rng.integers(0, vocabulary, rows).tolist()
            plan = Plan(tuple(Segment(stream, (token,)) for stream, token in zip(streams, drawn, strict=True)))
            times.append(event_times(lambda plan=plan: logits.append(model.forward(state, plan).clone())))
    return statistics.median(times[3:]), logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--quick", action="store_true", help="the first count of rows only")
    arguments = parser.parse_args()
    model = load_model(SyntheticCheckpoint("full", layers=arguments.layers), load_ops("cuda"), CONTEXT)
    torch.manual_seed(0)
    different = 0

    def note(what: str, late: float, early: float, floor: str, same: bool) -> None:
        nonlocal different
        different += not same
        verdict = "" if same else "   DIFFERENT BYTES"
        print(f"{what:56} late {late:8.2f}   early {early:8.2f}   {floor}{verdict}", flush=True)

    for rows in arguments.rows[: 1 if arguments.quick else None]:
        print(f"--- {rows} rows, microseconds a call ---")
        for chain in chains(model, rows):
            try:
                (late, expected), (early, found) = (replayed(chain, early) for early in (False, True))
            except (RuntimeError, KernelError) as error:
                print(f"{chain.what:56} FAILED: {error}", flush=True)
                different += 1
                continue
            floor = f"floor {1e6 * chain.nbytes / COPY_RATE:6.2f}"
            note(chain.what, late, early, floor, same_bytes(expected, found))
        print(f"--- {rows} rows, milliseconds a forward of {arguments.layers} layers ---")
        (late, expected), (early, found) = (forwards(model, rows, early) for early in (False, True))
        note("forward", late, early, "", same_bytes(expected, found))
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
