"""Products of many rows with half weights: isobit's own kernel, or cuBLAS where it is known to give the same bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from isobit.cuda import kernels, memory

OWN_TILE = 128  # rows and outputs of a block
OWN_THREADS = 256
OWN_SHARED = 4 * 2 * OWN_TILE * 64  # bytes: stages of a tile of inputs and one of weights
PASS_ROWS = (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)  # that cuBLAS is called with: it sums by them
SCRATCH_VALUES = 1 << 28  # of a pass's sums, at most: 1 GiB
OUTPUT_BLOCK = 128  # that are rotated together
CHECKED_ARCHITECTURES = ((9, 0),)
MOST_PLANS = 1 << 12  # of products' shapes that are kept

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pass:
    """Rows and outputs that are computed at once, and the rows that their arrays have."""

    first_row: int
    rows: int
    first_output: int
    outputs: int
    stored_rows: int

    def rows_of(self, array: torch.Tensor) -> torch.Tensor:
        """The pass's rows of an array of all rows."""
        return array if len(array) == self.rows else array[self.first_row : self.first_row + self.rows]

    def outputs_of(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights [N, K] of the pass's outputs."""
        if len(weights) == self.outputs:
            return weights
        return weights[self.first_output : self.first_output + self.outputs]


def passes(rows: int, outputs: int, terms: int) -> tuple[Pass, ...]:
    """Cut a product whose outputs are sums of `terms` chains so that each pass fits the scratch; row after row."""
    return _passes(memory.architecture(), rows, outputs, terms)


@lru_cache(maxsize=MOST_PLANS)
def _passes(architecture: tuple[int, int], rows: int, outputs: int, terms: int) -> tuple[Pass, ...]:
    return tuple(_cut(architecture, rows, outputs, terms))


def _cut(architecture: tuple[int, int], rows: int, outputs: int, terms: int) -> Iterator[Pass]:
    most_rows = PASS_ROWS[-1]
    for first_row in range(0, rows, most_rows):
        count = min(rows - first_row, most_rows)
        stored_rows = rows_for(architecture, count)
        blocks = SCRATCH_VALUES // (terms * stored_rows * OUTPUT_BLOCK)
        most_outputs = max(1, blocks) * OUTPUT_BLOCK
        for first_output in range(0, outputs, most_outputs):
            width = min(outputs - first_output, most_outputs)
            yield Pass(first_row, count, first_output, width, stored_rows)


def rows_for(architecture: tuple[int, int], rows: int) -> int:
    """The rows that the arrays of a pass of `rows` rows have: where cuBLAS may run, a count of PASS_ROWS."""
    if architecture not in CHECKED_ARCHITECTURES:
        return rows
    return min((count for count in PASS_ROWS if count >= rows), default=rows)


def products(x: torch.Tensor, weights: torch.Tensor, bounds: Bounds, sums: torch.Tensor, own_kernel: bool) -> None:
    """sums [shards, R, N] = x [R, K] weights [N, K]^T over each shard's inputs; one float32 chain an output.

    x and weights are float16, K a multiple of 16; every shard's sums are contiguous. own_kernel: never cuBLAS; changes
    no byte.
    """
    rows, inputs = x.shape
    if own_kernel or not _all_in_order(memory.architecture(), rows, len(weights), bounds, inputs):
        by_own_kernel(x, weights, sums)
    elif len(bounds) == 1:
        by_cublas(x, weights, sums[0])
    else:
        for (first, last), out in zip(bounds, sums, strict=True):
            by_cublas(x[:, first:last], weights[:, first:last], out)


def by_own_kernel(x: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor) -> None:
    """The same on isobit's kernel, which cuts K into shards as linear does."""
    rows, inputs = x.shape
    outputs = len(weights)
    tiles = -(-rows // OWN_TILE) * -(-outputs // OWN_TILE)
    kernel = kernels.load("ops/linear/product.cu", "product")
    grid = tiles, len(sums)
    kernel(grid, OWN_THREADS, x, weights, sums, sums.stride(0), rows, outputs, inputs, shared=OWN_SHARED)


def by_cublas(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, N] float32 = x [R, K] weights [N, K]^T; the views' rows may lie apart."""
    torch.mm(x, weights.T, out_dtype=torch.float32, out=out)


@lru_cache(maxsize=MOST_PLANS)
def _all_in_order(architecture: tuple[int, int], rows: int, outputs: int, bounds: Bounds, row_stride: int) -> bool:
    """Whether cuBLAS gives the bits of one ascending chain for each shard on this device; else it splits k."""
    if architecture not in CHECKED_ARCHITECTURES or rows not in PASS_ROWS:
        return False
    widths = {last - first for first, last in bounds}
    return all(_same_bits(rows, outputs, width, row_stride) for width in widths)


@cache
def _same_bits(rows: int, outputs: int, inputs: int, row_stride: int) -> bool:
    """Compare cuBLAS with the own kernel on random halves; a different order of sums shows in most outputs."""
    generator = torch.Generator(device=memory.device()).manual_seed(1)

    def halves(count: int) -> torch.Tensor:
        return torch.randn((count, row_stride), generator=generator, device=memory.device(), dtype=torch.float16)

    x, weights = halves(rows)[:, :inputs], halves(outputs)[:, :inputs]
    theirs = torch.empty((rows, outputs), device=memory.device())
    try:
        by_cublas(x, weights, theirs)
    except (RuntimeError, TypeError):
        return False
    ours = torch.empty((1, rows, outputs), device=memory.device())
    by_own_kernel(x.contiguous(), weights.contiguous(), ours)
    return torch.equal(theirs.view(torch.int32), ours[0].view(torch.int32))
