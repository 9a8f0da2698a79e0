"""The ways of computing a reply, and choices of them in which every pair of values occurs."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product

import numpy as np

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "prefill": ("serial", "batched", "deep small", "deep middle", "deep whole"),
    "company": ("alone", "among strangers", "strangers mid-prefill"),
    "drafts": ("off", "mtp", "copies", "both", "half right"),
    "start": ("fresh", "resumed", "from host memory", "after restart"),
    "sampling": ("greedy", "sampled"),
    "threads": ("1", "2"),
}


@dataclass(frozen=True)
class Cell:
    """One value of each dimension; the fields are named as in DIMENSIONS."""

    prefill: str
    company: str
    drafts: str
    start: str
    sampling: str
    threads: str

    def __str__(self) -> str:
        return ", ".join([*astuple(self)[:-1], f"{self.threads} thread{'s' if self.threads != '1' else ''}"])

    @property
    def pairs(self) -> frozenset[tuple[int, str, int, str]]:
        """The pairs of values that this cell covers, as (dimension, value, dimension, value)."""
        values = astuple(self)
        return frozenset((i, values[i], j, values[j]) for i, j in combinations(range(len(values)), 2))


def all_cells() -> Iterator[Cell]:
    """The whole product."""
    return (Cell(*values) for values in product(*DIMENSIONS.values()))


def all_pairs() -> frozenset[tuple[int, str, int, str]]:
    """Every pair of values of two dimensions."""
    names = list(DIMENSIONS)
    return frozenset(
        (i, one, j, other)
        for i, j in combinations(range(len(names)), 2)
        for one in DIMENSIONS[names[i]]
        for other in DIMENSIONS[names[j]]
    )


def covering_cells(rng: np.random.Generator) -> list[Cell]:
    """Cells in which every pair of values occurs: greedily, the cell that covers most of what is left."""
    cells = list(all_cells())
    order = rng.permutation(len(cells))
    missing = set(all_pairs())
    chosen = []
    while missing:
        best = max(order, key=lambda i: len(cells[i].pairs & missing))
        chosen.append(cells[best])
        missing -= cells[best].pairs
    return chosen


def random_cell(rng: np.random.Generator) -> Cell:
    """Any cell of the product."""
    return Cell(*(values[rng.integers(len(values))] for values in DIMENSIONS.values()))
