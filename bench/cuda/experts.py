"""Speed of the router and the experts on this GPU: `python bench/cuda/experts.py [--quick | --shapes]`.

Milliseconds a layer, beside the time that the chosen experts' stored weights take at the card's copy rate, or the
products at its tensor rate. Few rows run in a graph of calls that choose experts anew; many rows kernel by kernel too.
--shapes: few rows alone, with every way in which thread blocks may share the columns of one of their two kernels.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from timing import COPY_RATE, TENSOR_RATE, Action, Entry, graph_milliseconds, milliseconds, show

from isobit.checkpoint.weights import CODEBOOKS
from isobit.cuda import kernels, memory
from isobit.ops.experts import cuda
from isobit.ops.experts.cuda_layers import BLOCK, LAYER, PlacedLayers
from isobit.ops.experts.cuda_shapes import Products, Shape

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
        outer_counters=memory.zeros((EXPERTS + 1, cuda.MOST_PARTS, HIDDEN // BLOCK), torch.int32),
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


Shapes = dict[int, tuple[Shape, ...]]
SHAPES: dict[str, Shapes] = {  # to compare with the op's own, by rows
    "multiply_gate_up": {
        1: (Shape(7, 3, 1, 3, 21), Shape(7, 2, 1, 3, 28), Shape(8, 3, 1, 3, 28), Shape(4, 4, 1, 3, 32),
            Shape(3, 4, 1, 3, 28), Shape(10, 2, 1, 3, 28), Shape(5, 4, 1, 3, 28), Shape(4, 1, 1, 2, 32)),
        2: (Shape(14, 2, 1, 3, 28), Shape(7, 4, 1, 3, 28), Shape(14, 1, 1, 3, 28), Shape(7, 1, 1, 3, 28),
            Shape(4, 1, 1, 2, 32)),
        4: (Shape(5, 2, 1, 3, 28), Shape(10, 1, 1, 3, 28), Shape(7, 1, 1, 3, 28), Shape(20, 1, 1, 3, 28),
            Shape(4, 1, 1, 2, 32), Shape(14, 2, 1, 3, 28)),
        8: (Shape(5, 1, 1, 2, 32), Shape(8, 1, 2, 2, 32), Shape(10, 1, 1, 2, 32), Shape(20, 1, 1, 2, 32)),
    },
    "multiply_down": {
        1: (Shape(14, 1, 1, 3, 28), Shape(14, 2, 1, 3, 28), Shape(7, 4, 1, 3, 28), Shape(5, 2, 1, 3, 28),
            Shape(7, 3, 1, 3, 21), Shape(4, 2, 1, 3, 28), Shape(4, 1, 1, 2, 32)),
        2: (Shape(14, 1, 1, 3, 28), Shape(14, 2, 1, 3, 28), Shape(7, 1, 1, 3, 28), Shape(7, 2, 1, 3, 28),
            Shape(4, 1, 1, 2, 32)),
        4: (Shape(5, 1, 1, 3, 28), Shape(10, 1, 2, 3, 28), Shape(20, 1, 2, 3, 28), Shape(8, 1, 2, 2, 32),
            Shape(8, 1, 1, 3, 28), Shape(4, 1, 1, 3, 28)),
        8: (Shape(8, 1, 2, 2, 32), Shape(16, 1, 4, 2, 32), Shape(10, 1, 2, 2, 32), Shape(20, 1, 2, 2, 32)),
    },
}  # fmt: skip


def shape_times(handle: cuda.ExpertsHandle, rows: int) -> Iterator[Entry]:
    """Few rows with other shapes of one kernel's thread blocks than the op's own; the outputs' bytes are the same."""
    calls = [random_inputs(rows) for _ in range(CALLS)]
    own_shape = cuda.few_shape
    expected = [cuda.experts(*call, handle) for call in calls]
    label = ", ".join(
        f"{name} {own_shape(name, cuda.few_products(name, handle, rows, CHOSEN), rows <= cuda.MOST_FUSED_ROWS)}"
        for name in SHAPES
    )
    taken = graph_milliseconds([partial(cuda.experts, *call, handle) for call in calls])
    yield entry(f"experts, {rows} rows, {label}", taken, 0.0)
    for kernel, shapes in SHAPES.items():
        for shape in shapes[rows]:

            def chosen(name: str, products: Products, fused: bool, kernel=kernel, shape=shape) -> Shape:
                return shape if name == kernel else own_shape(name, products, fused)

            with patch.object(cuda, "few_shape", chosen):
                taken = graph_milliseconds([partial(cuda.experts, *call, handle) for call in calls])
                same = all(torch.equal(cuda.experts(*call, handle), y) for call, y in zip(calls, expected, strict=True))
            yield entry(f"  {rows} rows, {kernel} {shape}", taken, 0.0, "same bytes" if same else "OTHER BYTES")


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


def all_shape_times() -> Iterator[Entry]:
    """One entry a number of rows and a shape."""
    handle = random_handle()
    for rows in (1, 2, 4, 8):
        yield from shape_times(handle, rows)


def times(quick: bool) -> Iterator[Entry]:
    """One entry a number of rows and a kernel: what, ms, floor_ms, rate."""
    handle = random_handle()
    for rows in (1, 4, 64) if quick else (1, 2, 4, 8, 9, 16, 32, 64):
        yield from few_times(handle, rows)
    for rows in (6144,) if quick else (65, 256, 1024, 3001, 6144, 8192):
        yield from many_times(handle, rows)
    for rows in (1, 64, 6144):
        yield from route_times(rows)


if __name__ == "__main__":
    show(all_shape_times() if "--shapes" in sys.argv else times("--quick" in sys.argv))
