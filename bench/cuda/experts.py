"""Speed of the router and the experts on this GPU at real widths: `python bench/cuda/experts.py [--quick]`.

Milliseconds a layer, beside the time that the chosen experts' stored weights take at the card's copy rate, or the
products at its tensor rate. Few rows run in a graph of calls that choose experts anew; many rows kernel by kernel too.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from timing import COPY_RATE, TENSOR_RATE, Action, Entry, graph_milliseconds, milliseconds, show

from isobit.checkpoint.weights import CODEBOOKS
from isobit.cuda import kernels, memory
from isobit.ops.experts import cuda
from isobit.ops.experts.cuda_layers import BLOCK, LAYER, PlacedLayers

EXPERTS, CHOSEN, HIDDEN, INNER = 512, 10, 2560, 640
BITS, SHARED_BITS = 3, 4
FORMATS = {bits: 32 * CODEBOOKS.index("mul1") + 2 * bits for bits in (BITS, SHARED_BITS)}
EXPERT_VALUES = 3 * HIDDEN * INNER
CALLS = 8  # in a graph
REPEATS = 7


def random_layers() -> PlacedLayers:
    """One layer's experts of random tiles, made on the device; the shared expert wider."""
    count = 3 * (EXPERTS + 1)
    bits = np.repeat([*(BITS,) * EXPERTS, SHARED_BITS], 3)
    tile_bytes = HIDDEN * INNER // 8 * bits
    block = torch.randint(
        -(2**15),
        2**15,
        (int(tile_bytes.sum()) // 2 + count * (HIDDEN + INNER),),
        dtype=torch.int16,
        device=memory.device(),
    )
    scales = block[int(tile_bytes.sum()) // 2 :].view(torch.float16)
    scales.copy_(torch.randn(len(scales), device=memory.device()) / 32)
    down = np.arange(count) % 3 == 2
    table = np.zeros(count, LAYER)
    table["inputs"], table["outputs"] = np.where(down, INNER, HIDDEN), np.where(down, HIDDEN, INNER)
    table["weights"] = block.data_ptr() + np.cumsum(tile_bytes) - tile_bytes
    table["input_scales"] = scales.data_ptr() + 2 * (HIDDEN + INNER) * np.arange(count)
    table["output_scales"] = table["input_scales"] + 2 * table["inputs"]
    table["real_outputs"], table["format"] = table["outputs"], [FORMATS[int(width)] for width in bits]
    macros = {"THREE_INST_WIDTHS": 0, "MCG_WIDTHS": 0, "PLAIN_LAYERS": 0, "LONG_LAYERS": 0}
    macros["MUL1_WIDTHS"] = 1 << 2 * BITS | 1 << 2 * SHARED_BITS
    return PlacedLayers(memory.to_device(table.view(np.uint8)), block, macros)


def random_handle() -> cuda.ExpertsHandle:
    layers = random_layers()
    return cuda.ExpertsHandle(
        routed=EXPERTS,
        hidden=HIDDEN,
        width=HIDDEN,
        inner_width=INNER,
        layers=layers,
        gate=torch.randn(HIDDEN, device=memory.device()) / HIDDEN**0.5,
        gate_bias=None,
        gate_linear=None,
        inner_counters=memory.zeros((EXPERTS + 1, cuda.MOST_PARTS, INNER // BLOCK), torch.int32),
        row_counters=memory.zeros((cuda.MOST_FEW_ROWS, HIDDEN // BLOCK), torch.int32),
        nbytes=layers.nbytes,
    )


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(rows: int) -> Inputs:
    """x, ids and weights of rows that choose any experts with equal likelihood."""
    chosen = torch.rand((rows, EXPERTS)).topk(CHOSEN).indices.sort().values
    return tuple(memory.to_device(a) for a in (torch.randn(rows, HIDDEN), chosen.int(), torch.rand(rows, CHOSEN)))


def by_kernel(action: Action) -> dict[str, float]:
    """Milliseconds of each kernel that an action launches, by name."""
    marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    launch = kernels.Kernel.__call__

    def marked(kernel, grid, block, *arguments, shared=0, early=False):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch(kernel, grid, block, *arguments, shared=shared, early=early)
        end.record()
        marks.append((kernel.name, begin, end))

    kernels.Kernel.__call__ = marked
    try:
        for _ in range(REPEATS):
            action()
    finally:
        kernels.Kernel.__call__ = launch
    torch.cuda.synchronize()
    times = defaultdict(list)
    for name, begin, end in marks:
        times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(taken) for name, taken in times.items()}


def entry(what: str, taken: float, floor: float, rate: str = "-") -> Entry:
    return {"what": what, "ms": taken, "floor_ms": floor, "rate": rate}


def few_times(handle: cuda.ExpertsHandle, rows: int) -> Iterator[Entry]:
    calls = [random_inputs(rows) for _ in range(CALLS)]
    taken = graph_milliseconds([partial(cuda.experts, *call, handle) for call in calls])
    distinct = statistics.mean(len(ids.unique()) for _, ids, _ in calls)
    size = EXPERT_VALUES * (distinct * BITS + SHARED_BITS) / 8
    yield entry(
        f"experts, {rows} rows, {distinct:.0f} chosen", taken, 1e3 * size / COPY_RATE, f"{size / taken / 1e9:.3f} TB/s"
    )
    for name, part in by_kernel(lambda: cuda.experts(*calls[0], handle)).items():
        yield entry(f"  {name}, outside a graph", part, 0.0)


VARIANTS = (  # of how warps share the work: TURNS, ENOUGH_BLOCKS, MOST_FUSED_ROWS of ops/experts/cuda.py
    {"TURNS": 1},
    {"TURNS": 2},
    {"ENOUGH_BLOCKS": 512},
    {"ENOUGH_BLOCKS": 2048},
    {"MOST_FUSED_ROWS": 0},
    {"MOST_FUSED_ROWS": 8},
)


def variant_times(handle: cuda.ExpertsHandle, rows: int) -> Iterator[Entry]:
    """Few rows with other constants than the op's own; the outputs' bytes are the same."""
    calls = [random_inputs(rows) for _ in range(CALLS)]
    for variant in VARIANTS:
        own = {name: getattr(cuda, name) for name in variant}
        try:
            for name, value in variant.items():
                setattr(cuda, name, value)
            taken = graph_milliseconds([partial(cuda.experts, *call, handle) for call in calls])
        finally:
            for name, value in own.items():
                setattr(cuda, name, value)
        label = ", ".join(f"{name} {value}" for name, value in variant.items())
        yield entry(f"  {rows} rows, {label}", taken, 0.0)


def many_times(handle: cuda.ExpertsHandle, rows: int) -> Iterator[Entry]:
    call = random_inputs(rows)
    operations = 2.0 * rows * (CHOSEN + 1) * EXPERT_VALUES

    def run() -> None:
        cuda.experts(*call, handle, cuda.MANY_ROWS)

    taken = milliseconds(run)
    rate = f"{operations / taken / 1e9:.0f} TFLOP/s"
    yield entry(f"experts, {rows} rows", taken, 1e3 * operations / TENSOR_RATE, rate)
    for name, part in by_kernel(run).items():
        yield entry(f"  {name}", part, 0.0)


def route_times(rows: int) -> Iterator[Entry]:
    logits = torch.randn((rows, EXPERTS), device=memory.device())
    taken = graph_milliseconds([partial(cuda.route, logits, CHOSEN, True)], CALLS)
    yield entry(f"route, {rows} rows", taken, 1e3 * logits.nbytes / COPY_RATE)


def times(quick: bool) -> Iterator[Entry]:
    """One entry a number of rows and a kernel: what, ms, floor_ms, rate."""
    handle = random_handle()
    for rows in (1, 4, 64) if quick else (1, 2, 4, 8, 9, 16, 32, 64):
        yield from few_times(handle, rows)
        yield from variant_times(handle, rows)
    for rows in (6144,) if quick else (65, 256, 1024, 3001, 6144, 8192):
        yield from many_times(handle, rows)
    for rows in (1, 64, 6144):
        yield from route_times(rows)


if __name__ == "__main__":
    show(times("--quick" in sys.argv))
