"""How the thread blocks of few_products.cu share its columns of 16 outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import gcd

TILES = 8  # of 16 inputs or outputs in a block of 128
MOST_WARPS = 28  # of a multiprocessor, each lane with registers for 128 inputs' weights
MOST_TURNS, MOST_PASSES = 4, 2
MOST_BLOCKS = 8  # of 128 outputs in a thread block
BLOCK_COST = 0.5  # of a thread block beside its columns, in columns
ALONE_COST = 1.0  # of a thread block that waits at its barriers with no other beside it, in columns
STAGES = 3
MANY_BLOCKS_WARPS, MANY_BLOCKS_STAGES, MANY_BLOCKS_MOST_WARPS = 4, 2, 32  # where blocks are many
OWN_SHARED_BYTES = 2 << 10  # of every thread block: the driver's and the kernels' own arrays


@dataclass(frozen=True)
class Products:
    """What is to be shared: `groups` of so many columns of 16 outputs, of `chunks` times 128 inputs each.

    tile_bytes: of the widest tile. long_layers: whether chains have totals. other_bytes: of shared memory that every
    thread block needs beside its tiles.
    """

    groups: int
    columns: int
    chunks: int
    tile_bytes: int
    long_layers: bool
    other_bytes: int


@dataclass(frozen=True)
class Shape:
    """columns: of a thread block, all of one group. turns: warps that share a column. passes: columns of a warp.

    stages: chunks of a warp on their way. most_warps: of a multiprocessor at a time, for which registers are divided.
    """

    columns: int
    turns: int
    passes: int
    stages: int
    most_warps: int

    @property
    def warps(self) -> int:
        return -(-self.columns // self.passes) * self.turns

    @property
    def output_blocks(self) -> int:
        """The most blocks of 128 outputs that a thread block has columns of."""
        return -(-(TILES - gcd(self.columns, TILES) + self.columns) // TILES)

    def macros(self) -> dict[str, int]:
        return {"TURNS": self.turns, "MOST_WARPS": self.most_warps, "STAGES": self.stages}

    def slices(self, products: Products) -> int:
        """Thread blocks of a group."""
        return -(-products.columns // self.columns)

    def leaves_idle_warp(self, products: Products) -> bool:
        """Whether the last warp of a group's last thread block has no column."""
        return self.passes == 1 and products.columns % self.columns > 0

    def shared_bytes(self, products: Products) -> int:
        """Shared memory of a thread block: chains handed on, tiles on their way, and the rest."""
        handed = self.columns * 32 * (48 if products.long_layers else 16) if self.turns > 1 else 0
        return handed + self.stages * self.warps * TILES * products.tile_bytes + products.other_bytes


def many_blocks(products: Products, most_columns: int, enough_blocks: int) -> Shape:
    """Thread blocks of as many columns as leave enough of them."""
    columns = MANY_BLOCKS_WARPS
    while 2 * columns <= most_columns and products.groups * products.columns // (2 * columns) >= enough_blocks:
        columns *= 2
    return Shape(columns, 1, columns // MANY_BLOCKS_WARPS, MANY_BLOCKS_STAGES, MANY_BLOCKS_MOST_WARPS)


@cache
def even_blocks(products: Products, processors: int, shared_bytes: int) -> Shape:
    """Thread blocks that give no multiprocessor more columns than they must, all there at once, with many warps.

    shared_bytes: of a multiprocessor.
    """
    return min(_shapes(products, processors, shared_bytes), key=lambda candidate: candidate[0])[1]


def _shapes(products: Products, processors: int, shared_bytes: int) -> Iterator[tuple[tuple[float, int, int], Shape]]:
    """Every shape, the better ones with smaller keys."""
    for columns in range(1, products.columns + 1):
        for turns in range(1, min(MOST_TURNS, max(products.chunks, 1)) + 1):
            for passes in range(1, (MOST_PASSES if turns == 1 else 1) + 1):
                shape = Shape(columns, turns, passes, STAGES, MOST_WARPS)
                taken = shape.shared_bytes(products) + OWN_SHARED_BYTES
                most = min(MOST_WARPS // shape.warps, shared_bytes // taken)
                if most == 0 or shape.output_blocks > MOST_BLOCKS:
                    continue
                count = products.groups * shape.slices(products)
                needed = -(-count // processors)
                rounds = needed if needed <= most else -(-needed // most) * most
                alone_cost = ALONE_COST if min(needed, most) == 1 else 0
                cost = rounds * (passes * shape.warps // turns + BLOCK_COST + alone_cost)
                yield (cost, -min(needed, most) * shape.warps, count), shape
