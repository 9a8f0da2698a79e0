"""Trellis layers of many outputs for up to 16 rows: a multiprocessor's columns are dealt to its warps."""

from dataclasses import dataclass, replace

import torch

from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant
from isobit.ops.linear.cuda_layers import BLOCK, TILE, TrellisLayer

WARP = 32
ROW_TILE = 8  # rows of a product
CHAIN_BYTES = 16  # of a lane and 8 rows, that wait for their column's next part
MOST_WARPS = {1: 32, 2: 28}  # of a block, by its tiles of 8 rows; with more tiles columns are not dealt


@dataclass(frozen=True)
class DealtShape:
    """A multiprocessor's block: its warps, chunks of so many tiles staged ahead, columns at the end dealt in parts.

    part_chunks: of a part. groups: of 8 tiles, decoded without a branch. products: of a lane's four pairs of values,
    those put together by multiplication. operand_rows: of the operand in shared memory, 0: in global memory.
    """

    warps: int
    chunk_tiles: int
    stages: int
    split: int
    part_chunks: int
    groups: int = 1
    products: int = 0
    operand_rows: int = 0

    def defines(self, rows: int) -> dict[str, int]:
        return {
            "ROW_TILES": row_tiles(rows),
            "CHUNK_TILES": self.chunk_tiles,
            "STAGES": self.stages,
            "GROUPS_AT_ONCE": self.groups,
            "PRODUCTS": self.products,
            "OPERAND_ROWS": self.operand_rows,
        }

    def shared_bytes(self, handle: TrellisLayer, rows: int) -> int:
        stages = self.warps * self.stages * self.chunk_tiles * TILE * handle.defines["TWICE_BITS"]
        operand = 2 * BLOCK * handle.input_blocks * self.operand_rows
        return stages + operand + self.split * (row_tiles(rows) * WARP * CHAIN_BYTES + 4) + 4

    def fits(self, handle: TrellisLayer, rows: int) -> bool:
        """Whether a block has room for it, and the inputs are whole chunks and parts that keep the stages filled."""
        chunks, left = divmod(handle.input_blocks * (BLOCK // TILE), self.chunk_tiles)
        parts_fit = self.split == 0 or (chunks % self.part_chunks == 0 and self.part_chunks >= self.stages)
        room = self.shared_bytes(handle, rows) <= memory.most_shared_bytes()
        return left == 0 and chunks >= self.stages and parts_fit and room and self.warps <= MOST_WARPS[row_tiles(rows)]


SHAPES = (
    DealtShape(32, 16, 2, 32, 2),
    DealtShape(24, 16, 2, 32, 2),
    DealtShape(24, 8, 2, 32, 4),
    DealtShape(24, 8, 2, 0, 1),
    DealtShape(16, 8, 2, 0, 1),
)


def row_tiles(rows: int) -> int:
    return -(-rows // ROW_TILE)


def dealt_shape(handle: TrellisLayer, rows: int) -> DealtShape | None:
    """The first of the shapes that fits with its operand in shared memory, or else without; None: there is none."""
    if row_tiles(rows) not in MOST_WARPS:
        return None
    near = 1 if rows == 1 else ROW_TILE * row_tiles(rows)
    shapes = (replace(shape, operand_rows=kept) for kept in (near, 0) for shape in SHAPES)
    return next((shape for shape in shapes if shape.fits(handle, rows)), None)


def dealt_rows(operand: torch.Tensor, handle: TrellisLayer, y: torch.Tensor, shape: DealtShape) -> None:
    """y float32 [R, out_features] from the rotated rows in the order of the product's operand."""
    rows = len(y)
    kernels.load("ops/linear/few_rows_dealt.cu", "few_rows_dealt", **shape.defines(rows), **handle.defines)(
        memory.multiprocessors(),
        shape.warps * WARP,
        Constant(handle.trellis),
        operand,
        memory.empty((rows, handle.stored_outputs)),
        handle.counters,
        handle.stored_outputs // TILE,
        handle.input_blocks,
        rows,
        Constant(handle.svh),
        Constant(handle.bias),
        y,
        handle.out_features,
        shape.split,
        shape.part_chunks,
        shared=shape.shared_bytes(handle, rows),
        early=True,
    )
