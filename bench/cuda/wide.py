"""Shapes of the kernel of wide trellis layers on this GPU: `python bench/cuda/wide.py [--quick]`.

Milliseconds a call, rotations included, of the shape that is taken and of its neighbours, beside the kernel whose warps
have columns of their own and whose bytes all must give. Exit code 1 where bytes differ.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import torch
from timing import COPY_RATE, Entry, graph_milliseconds, show

from isobit.cuda import memory
from isobit.ops.linear import cuda, cuda_dealt
from isobit.ops.linear.cuda_dealt import DealtShape
from isobit.ops.linear.cuda_layers import TrellisLayer
from linear import copies, trellis_layer

INPUTS, OUTPUTS, HEAD_OUTPUTS = 2560, 98304, 248320
LAYERS = ((OUTPUTS, 3, (1, 8, 16)), (OUTPUTS, 4, (1, 8, 16)), (HEAD_OUTPUTS, 5, (1, 4)))
MORE_LAYERS = ((OUTPUTS, 2, (1, 8)), (OUTPUTS, 5, (1, 8, 16)), (HEAD_OUTPUTS, 5, (16,)))
WARPS, CHUNK_TILES, HALVED = (16, 20, 24), (8, 16), (0, 32, 48)


def neighbours(shape: DealtShape, rows: int) -> list[DealtShape]:
    """More and fewer warps, columns in halves and none; of more than 8 rows all of these with each other."""
    if rows > 8:
        shapes = [DealtShape(*sizes) for sizes in product(WARPS, CHUNK_TILES, HALVED)]
        return [other for other in shapes if other != shape]
    warps = [replace(shape, warps=count) for count in WARPS if count != shape.warps]
    halved = [replace(shape, halved=count) for count in HALVED if count != shape.halved]
    return [*warps, *halved]


def few_rows(layers: list[TrellisLayer], x: torch.Tensor, shape: DealtShape | None) -> tuple[float, torch.Tensor]:
    """Milliseconds a call in a graph, and the first layer's outputs; no shape: warps with columns of their own."""
    with patch.object(cuda_dealt, "dealt_shape", lambda handle, rows: shape):
        y = cuda.linear(x, layers[0])
        return graph_milliseconds([partial(cuda.linear, x, layer) for layer in layers]), y


def named(shape: DealtShape) -> str:
    return f"{shape.warps} warps, chunks of {shape.chunk_tiles} tiles, {shape.halved} columns in halves"


def times(more: bool, differ: Callable[[str], None]) -> Iterator[Entry]:
    for outputs, bits, row_counts in (*LAYERS, *MORE_LAYERS) if more else LAYERS:
        layers = copies(partial(trellis_layer, INPUTS, outputs, bits))
        for rows in row_counts:
            x = torch.randn((rows, INPUTS), device=memory.device())
            yield from shape_times(layers, x, f"{INPUTS}x{outputs} {bits} bits, {rows} rows", differ)


def shape_times(
    layers: list[TrellisLayer], x: torch.Tensor, layer: str, differ: Callable[[str], None]
) -> Iterator[Entry]:
    size = layers[0].nbytes
    taken, expected = few_rows(layers, x, None)
    yield entry(f"{layer}, columns of their own", taken, size)
    chosen = cuda_dealt.dealt_shape(layers[0], len(x))
    if chosen is None:
        return
    for shape in (chosen, *neighbours(chosen, len(x))):
        if not shape.fits(layers[0], len(x)):
            continue
        what = f"{layer}, {'CHOSEN ' if shape is chosen else ''}{named(shape)}"
        taken, found = few_rows(layers, x, shape)
        if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
            differ(f"{what}: DIFFERENT BYTES")
        yield entry(what, taken, size)


def entry(what: str, taken: float, size: int) -> Entry:
    return {"what": what, "ms": taken, "floor_ms": 1e3 * size / COPY_RATE, "rate": f"{size / taken / 1e9:.3f} TB/s"}


def main() -> int:
    problems: list[str] = []
    torch.manual_seed(0)
    show(times("--quick" not in sys.argv, problems.append))
    print("\n".join(problems) or "all shapes give the same bytes", flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
