"""A checkpoint's weights for the plain float64 network."""

from pathlib import Path

import numpy as np

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.parameters import parameters, table_gathers
from tests.model.reference_network import Weights


class GatheredTable:
    """An n-gram table of which only the rows asked for are read."""

    def __init__(self, gather):
        self._gather = gather

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return self._gather(ids).astype(np.float64)


def checkpoint_weights(folder: Path) -> Weights:
    """Every weight by the network's names, float64; n-gram constants int64."""
    checkpoint = Checkpoint(folder)
    weights = {
        name.removeprefix("model."): array if array.dtype == np.int64 else array.astype(np.float64)
        for name, array in parameters(checkpoint, mtp=checkpoint.config.has_mtp)
    }
    for layer, gather in table_gathers(checkpoint).items():
        weights[f"layers.{layer}.ple.ple_embedding.ngram_embedding.weight"] = GatheredTable(gather)
    return weights
