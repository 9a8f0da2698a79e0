"""Which pages a cache's entries hold, each page counted once, and how many pages only one entry holds."""

import numpy as np


class PageLedger:
    """Counts over the pages of a pool. Owners are distinct positive ints.

    A page knows how many owners it has and the sum of their ids: when one is left, the sum is that owner.
    """

    def __init__(self, pages: int):
        self._users = np.zeros(pages, np.int64)
        self._id_sums = np.zeros(pages, np.int64)
        self._exclusive: dict[int, int] = {}
        self.held = 0

    def users(self) -> np.ndarray:
        """int64 [pages], how many owners each page has."""
        return self._users.copy()

    def exclusive(self, owner: int) -> int:
        """How many pages only this owner holds."""
        return self._exclusive[owner]

    def count_new(self, pages: np.ndarray) -> int:
        """How many of the pages nobody holds."""
        return int(np.count_nonzero(self._users[pages] == 0))

    def add(self, owner: int, pages: np.ndarray) -> None:
        """`owner` holds these pages (int64, each once) from now on."""
        self._count_sole_owners(pages, -1)
        new = self.count_new(pages)
        self._users[pages] += 1
        self._id_sums[pages] += owner
        self._exclusive[owner] = new
        self.held += new

    def drop(self, owner: int, pages: np.ndarray) -> list[int]:
        """`owner` gives up the pages that it added; returns the owners that now hold some of them alone."""
        self.held -= self._exclusive.pop(owner)
        self._users[pages] -= 1
        self._id_sums[pages] -= owner
        return self._count_sole_owners(pages, 1)

    def _count_sole_owners(self, pages: np.ndarray, change: int) -> list[int]:
        sole = self._id_sums[pages][self._users[pages] == 1]
        owners, counts = np.unique(sole, return_counts=True)
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
            self._exclusive[owner] += change * count
        return owners.tolist()
