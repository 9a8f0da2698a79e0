"""Shapes of the kernel of wide trellis layers on this GPU: `python bench/cuda/wide.py [--all]`.

Milliseconds a call, rotations included, of every shape of cuda_dealt.py's kernel beside the kernel whose warps have
columns of their own and whose bytes all must give; then the best for each layer. Exit code 1 where bytes differ.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from timing import COPY_RATE, graph_milliseconds, show

from isobit.cuda import memory
from isobit.cuda.errors import KernelError
from isobit.ops.linear import cuda, cuda_dealt
from isobit.ops.linear.cuda_dealt import DealtShape
from isobit.ops.linear.cuda_layers import TrellisLayer
from linear import copies, trellis_layer

INPUTS, OUTPUTS, HEAD_OUTPUTS = 2560, 98304, 248320
LAYERS = (
    (OUTPUTS, 3, (1, 8, 16)),
    (OUTPUTS, 4, (1, 8)),
    (HEAD_OUTPUTS, 5, (1, 4)),
)
MORE_LAYERS = ((OUTPUTS, 2, (1, 8)), (OUTPUTS, 5, (1, 8, 16)), (HEAD_OUTPUTS, 5, (16,)))
PARTS = ((0, 10), (32, 2), (32, 5), (48, 2), (48, 5))  # columns dealt in parts, and a part's chunks of 16 tiles


def shapes(bits: int, rows: int) -> Iterator[DealtShape]:
    """By decoding of two groups at once, by warps, and by parts; other ways to stage and to decode with two of them."""
    for groups in (1, 2):
        for warps in (20, 24, 28, 32):
            for split, part_chunks in PARTS:
                yield DealtShape(warps, 16, 2, split, part_chunks, groups=groups)
    for warps, split in ((24, 0), (32, 0), (24, 48), (32, 48)):
        if rows == 1:
            yield from (DealtShape(warps, 16, 2, split, 2, groups, products=1) for groups in (1, 2))
        if rows == 1 and bits == 3:
            yield DealtShape(warps, 8, 3, split, 4)


def few_rows(layers: list[TrellisLayer], x: torch.Tensor, chosen: tuple[DealtShape, ...]) -> tuple[float, torch.Tensor]:
    """Milliseconds a call in a graph, and the first layer's outputs; no shapes: warps with columns of their own."""
    with patch.object(cuda_dealt, "SHAPES", chosen):
        y = cuda.linear(x, layers[0])
        return graph_milliseconds([partial(cuda.linear, x, layer) for layer in layers]), y


def named(shape: DealtShape) -> str:
    what = f"{shape.warps} warps, {shape.stages} stages of {shape.chunk_tiles} tiles, {shape.groups} groups"
    parts = f"{shape.split} columns in parts of {shape.part_chunks}" if shape.split else "no parts"
    return f"{what}, {parts}" + (f", {shape.products} by product" if shape.products else "")


def times(more: bool, differ: Callable[[str], None]) -> Iterator[dict]:
    for outputs, bits, row_counts in (*LAYERS, *MORE_LAYERS) if more else LAYERS:
        layers = copies(partial(trellis_layer, INPUTS, outputs, bits))
        size = layers[0].nbytes
        for rows in row_counts:
            layer, best = f"{INPUTS}x{outputs} {bits} bits, {rows} rows", []
            x = torch.randn((rows, INPUTS), device=memory.device())
            taken, expected = few_rows(layers, x, ())
            candidates = [shape for shape in shapes(bits, rows) if fits(shape, layers[0], rows)]
            yield entry(f"{layer}, columns of their own", taken, size)
            for shape in candidates:
                what = f"{layer}, {named(shape)}"
                try:
                    taken, found = few_rows(layers, x, (shape,))
                except (KernelError, RuntimeError) as error:
                    differ(f"{what}: {error}")
                    continue
                if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
                    differ(f"{what}: DIFFERENT BYTES")
                best.append((taken, named(shape)))
                yield entry(what, taken, size)
            for taken, name in sorted(best)[:4]:
                yield entry(f"BEST {layer}, {name}", taken, size)


def fits(shape: DealtShape, layer: TrellisLayer, rows: int) -> bool:
    with patch.object(cuda_dealt, "SHAPES", (shape,)):
        return cuda_dealt.dealt_shape(layer, rows) is not None


def entry(what: str, taken: float, size: int) -> dict:
    return {"what": what, "ms": taken, "floor_ms": 1e3 * size / COPY_RATE, "rate": f"{size / taken / 1e9:.3f} TB/s"}


def main() -> int:
    problems: list[str] = []
    torch.manual_seed(0)
    show(times("--all" in sys.argv, problems.append))
    print("\n".join(problems) or "all shapes give the same bytes", flush=True)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
