"""Speed of the linear layer on this GPU at real widths: `python bench/cuda/linear.py [--quick | --shapes]`.

Milliseconds a call, rotations included, beside the time that the stored weights take at the card's copy rate, or the
products at its tensor rate. Few rows run in a graph over layers that together are larger than the second-level cache.
`--shapes`: the trellis layers of a decoded row through the shapes that a block can have, the chosen one marked, beside
what few_rows_cycles says.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest.mock import patch

import torch
from timing import COPY_RATE, TENSOR_RATE, Action, Entry, graph_milliseconds, milliseconds, show

from isobit.cuda import memory
from isobit.ops.linear import cuda, cuda_products
from isobit.ops.linear.cuda_layers import (
    BLOCK,
    MOST_PASSED_ROWS,
    TILE,
    HalfLayer,
    TrellisLayer,
    trellis_defines,
)

CACHE_BYTES = 160 << 20  # of distinct weights, so that every call reads its own from memory
MOST_LAYERS = 48
LAUNCHES = 192  # of a measured graph
TRELLIS = ((2560, 12288, 3), (2560, 98304, 3), (2560, 98304, 4), (6144, 2560, 4), (2560, 10240, 4), (2560, 512, 4))
MORE_TRELLIS = ((2560, 6144, 4), (640, 2560, 4), (2560, 640, 4), (2560, 248320, 5), (2560, 98304, 2), (2560, 98304, 5))
PLAIN = ((10240, 336), (320, 10240), (2560, 512), (2560, 48))
SWEPT = (
    ("in_qkv", 2560, (10240,), 4),
    ("in_z", 2560, (6144,), 4),
    ("in_qkv and in_z", 2560, (10240, 6144), 4),
    ("out", 6144, (2560,), 4),
    ("q and gate", 2560, (12288,), 4),
    ("q and gate", 2560, (12288,), 3),
    ("index_qk, k and v", 2560, (640, 512, 512), 4),
    ("k", 2560, (512,), 4),
    ("down", 640, (2560,), 4),
)  # name, inputs, outputs of the layers of one launch, bits
SWEPT_TURNS = {1: (4, 8), 2: (3, 4, 8), 3: (3, 4, 8), 4: (3, 4, 6), 5: (2, 3, 4), 6: (2, 3, 4), 8: (2, 3), 12: (2,)}
SWEPT_LONG = ((2, 5), (2, 6), (3, 2), (3, 4), (4, 3), (5, 2), (6, 2))  # turns of 256 inputs
SWEPT_APART = ((3, 4), (5, 4), (6, 2), (6, 4), (8, 2), (8, 3))
SWEPT_OF_MANY = ((1, 4), (1, 8), (2, 4), (3, 2), (3, 4), (4, 2), (5, 2), (6, 1), (6, 2), (8, 1))  # of more than 16 rows
SWEPT_ROWS = (1, 4)
SWEPT_MORE_ROWS = {
    ("in_qkv", 4): (64,),
    ("in_qkv and in_z", 4): (16,),
    ("out", 4): (64,),
    ("q and gate", 4): (16,),
    ("q and gate", 3): (16, 32, 64),
}  # by name and bits
SCHEDULER_CLOCK = 1.8e9
MANY = ((2560, 12288, 4), (6144, 2560, 4), (2560, 640, 4))


def trellis_layer(inputs: int, outputs: int, bits: int) -> TrellisLayer:
    """A random layer, made on the device."""
    device = memory.device()
    shape = inputs // TILE, outputs // TILE, 16 * bits
    trellis = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    suh = (torch.randn(inputs, device=device) / inputs**0.5).half()
    svh = torch.ones(outputs, device=device).half()
    counters = memory.zeros((outputs // BLOCK,), torch.int32)
    passed = memory.zeros((MOST_PASSED_ROWS, outputs), torch.int64)
    defines = trellis_defines("mul1", bits)
    return TrellisLayer(inputs, outputs, inputs, outputs, None, defines, trellis, suh, svh, counters, passed)


def half_layer(inputs: int, outputs: int) -> HalfLayer:
    """The same of plain weights."""
    columns = outputs // TILE
    fragments = (torch.randn((columns, inputs // TILE, 32, 8), device=memory.device()) / inputs**0.5).half()
    counters = memory.zeros((2 * columns,), torch.int32)
    return HalfLayer(inputs, outputs, inputs, outputs, None, 2 if outputs <= 512 else 1, fragments, counters)


def copies(make: Callable[[], TrellisLayer | HalfLayer]) -> list:
    """As many layers of one shape as do not fit the cache together, and no more than MOST_LAYERS."""
    first = make()
    count = min(MOST_LAYERS, max(2, -(-CACHE_BYTES // first.nbytes)))
    return [first, *(make() for _ in range(count - 1))]


def few_rows(layers: list, rows: int) -> float:
    x = torch.randn((rows, layers[0].in_features), device=memory.device())
    return in_a_graph([partial(cuda.linear, x, layer) for layer in layers])


def in_a_graph(actions: Sequence[Action]) -> float:
    """Median milliseconds of an action, in a graph so long that its start is no part of them, as a token's is."""
    return graph_milliseconds(actions, -(-LAUNCHES // len(actions)))


def entry(what: str, taken: float, floor: float, amount: float, unit: str) -> Entry:
    """amount: bytes or operations of the call, shown as a rate in `unit` a second (T)."""
    return {"what": what, "ms": taken, "floor_ms": 1e3 * floor, "rate": f"{amount / taken / 1e9:.3f} {unit}"}


def few_times(layers: list, name: str, row_counts: Sequence[int]) -> Iterator[Entry]:
    size = layers[0].nbytes
    for rows in row_counts:
        yield entry(f"{name}, {rows} rows", few_rows(layers, rows), size / COPY_RATE, size, "TB/s")


def swept_shapes(shards: int, chunks: int, rows: int, chosen: cuda.FewRowsShape) -> list[cuda.FewRowsShape]:
    """The chosen one first; rotated apart only some."""
    shapes = [cuda.FewRowsShape(columns, turns, True) for columns, own in SWEPT_TURNS.items() for turns in own]
    if rows == 1:
        shapes += [cuda.FewRowsShape(*own, True, 2) for own in SWEPT_LONG]
    shapes += [cuda.FewRowsShape(*own, False) for own in (SWEPT_APART if cuda.tiles_of(rows) <= 2 else SWEPT_OF_MANY)]
    possible = set(cuda.possible_shapes(shards, chunks, rows)) - {chosen}
    return [chosen, *(shape for shape in shapes if shape in possible)]


def shape_times() -> Iterator[Entry]:
    """The layers of one input through many shapes of a block, to choose among them: early kernels in a graph."""
    for name, inputs, outputs, bits in SWEPT:
        size = sum(inputs * width * bits // 8 for width in outputs)
        count = min(MOST_LAYERS, max(2, -(-CACHE_BYTES // size)))
        groups = [[trellis_layer(inputs, width, bits) for width in outputs] for _ in range(count)]
        layer, columns = groups[0][0], tuple(width // TILE for width in outputs)
        for rows in (*SWEPT_ROWS, *SWEPT_MORE_ROWS.get((name, bits), ())):
            x = torch.randn((rows, inputs), device=memory.device())
            sizes = columns, layer.shards, layer.input_blocks, rows
            chosen = cuda.few_rows_shape(*sizes)
            for shape in swept_shapes(*sizes[1:], chosen):
                cost = cuda.few_rows_cycles(shape, *sizes, memory.multiprocessors()) / SCHEDULER_CLOCK
                with patch.object(cuda, "few_rows_shape", lambda *sizes, shape=shape: shape):
                    taken = in_a_graph([partial(cuda.linears, x, group) for group in groups])
                apart, mark = "" if shape.fused else ", apart", " (chosen)" if shape == chosen else ""
                what = f"{name} {inputs}x{'+'.join(map(str, outputs))} {bits} bits, {rows} rows, "
                long = "" if shape.turn_blocks == 1 else ", 256 inputs"
                what += f"{shape.columns} columns x {shape.turns}{long}{apart}{mark}, expected {1e3 * cost:.4f}"
                yield entry(what, taken, size / COPY_RATE, size, "TB/s")


def many_times(inputs: int, outputs: int, bits: int, rows: int) -> Iterator[Entry]:
    """A layer of a prompt and its parts; the product on cuBLAS, where it gives the bits, and on the own kernel."""
    layer = trellis_layer(inputs, outputs, bits)
    x = torch.randn((rows, inputs), device=memory.device())
    operations, floor = 2.0 * rows * inputs * outputs, 2.0 * rows * inputs * outputs / TENSOR_RATE
    name = f"{inputs}x{outputs} {bits} bits, {rows} rows"
    for what, how in (("by choice", cuda.MANY_ROWS), ("own product", cuda.OWN_PRODUCT)):
        taken = milliseconds(partial(cuda.linear, x, layer, how), 5)
        yield entry(f"{name}, {what}", taken, floor, operations, "TFLOP/s")
    expand = milliseconds(partial(cuda.expanded, layer), 5)
    yield entry(f"{name}, expand", expand, 2.0 * inputs * outputs / COPY_RATE, 0, "-")
    weights, part = cuda.expanded(layer), cuda_products.passes(rows, outputs, layer.shards)[0]
    count, width = part.stored_rows, part.outputs
    halves = torch.randn((1, count, inputs), device=memory.device()).half()
    sums = memory.empty((layer.shards, 1, count, width))
    own_x, y = torch.randn((count, inputs), device=memory.device()), memory.empty((count, outputs))
    rotate_in = milliseconds(partial(cuda.round_inputs, own_x, layer, halves), 5)
    rotate_out = milliseconds(partial(cuda.finish_outputs, sums, layer, y), 5)
    yield entry(f"{name}, {count} rows rotated in", rotate_in, 6.0 * count * inputs / COPY_RATE, 0, "-")
    outputs_floor = 4.0 * (layer.shards + 1) * count * width / COPY_RATE
    yield entry(f"{name}, {count} rows, {width} outputs rotated out", rotate_out, outputs_floor, 0, "-")
    operations = 2.0 * count * inputs * width
    for what, own in (("cuBLAS or own", False), ("own", True)):
        multiply = partial(cuda_products.products, halves[0], weights[:width], layer.shard_bounds, sums[:, 0], own)
        product = milliseconds(multiply, 5)
        what = f"{name}, product of {count} rows, {width} outputs, {what}"
        yield entry(what, product, operations / TENSOR_RATE, operations, "TFLOP/s")


def times(quick: bool) -> Iterator[Entry]:
    """One entry a shape: what, ms, floor_ms, rate."""
    for inputs, outputs, bits in TRELLIS if quick else (*TRELLIS, *MORE_TRELLIS):
        layers = copies(partial(trellis_layer, inputs, outputs, bits))
        name = f"{inputs}x{outputs} {bits} bits"
        yield from few_times(layers, name, (1, 8, 16, 64) if quick else (1, 2, 4, 8, 16, 32, 64))
        if outputs == 98304:
            with patch.object(cuda, "WIDE_COLUMNS", 1 << 20):
                yield from few_times(layers, f"{name}, in turns", (1, 16))
    for inputs, outputs in PLAIN:
        layers = copies(partial(half_layer, inputs, outputs))
        yield from few_times(layers, f"{inputs}x{outputs} plain", (1, 8, 64) if quick else (1, 4, 8, 16, 64))
    for inputs, outputs, bits in MANY[:2] if quick else MANY:
        yield from many_times(inputs, outputs, bits, 6144)


if __name__ == "__main__":
    show(shape_times() if "--shapes" in sys.argv else times("--quick" in sys.argv))
