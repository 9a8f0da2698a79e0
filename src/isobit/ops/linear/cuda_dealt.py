"""Trellis layers of many outputs for up to 16 rows: a multiprocessor's columns are dealt to its warps."""

from dataclasses import dataclass
from typing import Any

import torch

from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant
from isobit.ops.linear.cuda_layers import BLOCK, TILE, TrellisLayer

WARP = 32
ROW_TILE = 8  # rows of a product
STAGES = 2  # chunks that a warp stages ahead
CHAIN_BYTES = 16  # of a lane and 8 rows, that wait for their column's lower half
MOST_WARPS = 24  # of a block, as in few_rows_dealt.cu


@dataclass(frozen=True)
class DealtShape:
    """A multiprocessor's block: its warps, a chunk's tiles, and how many columns at the end are dealt in halves."""

    warps: int
    chunk_tiles: int
    halved: int

    def defines(self, rows: int) -> dict[str, int]:
        tiles, kept = row_tiles(rows), operand_rows(rows)
        return {"ROW_TILES": tiles, "CHUNK_TILES": self.chunk_tiles, "OPERAND_ROWS": kept}

    def shared_bytes(self, handle: TrellisLayer, rows: int) -> int:
        stages = self.warps * STAGES * self.chunk_tiles * TILE * handle.defines["TWICE_BITS"]
        operand = 2 * BLOCK * handle.input_blocks * operand_rows(rows)
        return stages + operand + self.halved * (row_tiles(rows) * WARP * CHAIN_BYTES + 4) + 4

    def fits(self, handle: TrellisLayer, rows: int) -> bool:
        """Whether a block has room for it, and the inputs are whole chunks, enough to stage ahead in every half."""
        chunks, left = divmod(handle.input_blocks * (BLOCK // TILE), self.chunk_tiles)
        fewest = chunks // 2 if self.halved else chunks
        room = self.shared_bytes(handle, rows) <= memory.most_shared_bytes()
        return left == 0 and fewest >= STAGES and room and self.warps <= MOST_WARPS


# By tiles of 8 rows, the best first; the others are for little shared memory and for few inputs. Of two tiles a column
# takes so much longer that all those of a layer with few more columns than warps are halved.
SHAPES = {
    tiles: (
        DealtShape(24, 16, halved),
        DealtShape(24, 8, halved),
        DealtShape(24, 8, 0),
        DealtShape(16, 8, 0),
    )
    for tiles, halved in ((1, 32), (2, 48))
}


def row_tiles(rows: int) -> int:
    return -(-rows // ROW_TILE)


def operand_rows(rows: int) -> int:
    """The rows of the operand that a block keeps."""
    return 1 if rows == 1 else ROW_TILE * row_tiles(rows)


def dealt_shape(handle: TrellisLayer, rows: int) -> DealtShape | None:
    """The first of the shapes that fits; None: there is none."""
    return next((shape for shape in SHAPES.get(row_tiles(rows), ()) if shape.fits(handle, rows)), None)


def wide_arguments(operand: torch.Tensor, handle: TrellisLayer, y: torch.Tensor) -> tuple[Any, ...]:
    """What the kernels of wide layers take first: y float32 [R, out_features] from the rotated rows."""
    rows = len(y)
    layer = Constant(handle.trellis), operand, memory.empty((rows, handle.stored_outputs)), handle.counters
    sizes = handle.stored_outputs // TILE, handle.input_blocks, rows
    return *layer, *sizes, Constant(handle.svh), Constant(handle.bias), y, handle.out_features


def dealt_rows(
    operand: torch.Tensor, handle: TrellisLayer, y: torch.Tensor, shape: DealtShape, processors: int
) -> None:
    """y float32 [R, out_features] from the rotated rows in the product's order, by a block on each multiprocessor."""
    rows = len(y)
    kernels.load("ops/linear/few_rows_dealt.cu", "few_rows_dealt", **shape.defines(rows), **handle.defines)(
        processors,
        shape.warps * WARP,
        *wide_arguments(operand, handle, y),
        shape.halved,
        shared=shape.shared_bytes(handle, rows),
        early=True,
    )
