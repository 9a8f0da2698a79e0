"""The journal of a state pool: copies of streams' state after chosen rows, from which a forward is taken back.

A forward that verifies drafts may keep only its first rows; a row's journaled state is put back then, not recomputed.
"""

import numpy as np

from isobit.ops.batch import Batch

NO_PLACES = np.empty(0, np.int32)


def journal_arguments(batch: Batch, journal: np.ndarray | None, pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a CPU kernel gets: (places int32 [R], journal [J, the shape of a slot]), both empty without a journal."""
    if journal is None or batch.journal is None:
        return NO_PLACES, pool[:0]
    return batch.journal, journal
