"""Opening a checkpoint folder, whether it holds weights or a recipe for them."""

from pathlib import Path

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import TensorStore
from isobit.checkpoint.synth_memory import SyntheticCheckpoint
from isobit.checkpoint.synth_recipe import has_recipe


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint of a folder, from its files, or made in memory where it holds a recipe (`synth_recipe`).

    Raises CheckpointError as `Checkpoint` does, and for a recipe that cannot be followed.
    """
    return SyntheticCheckpoint.of_folder(folder) if has_recipe(folder) else Checkpoint(folder)


def open_store(folder: str | Path) -> TensorStore:
    """The tensors of a folder alone; errors as those of `open_checkpoint`."""
    return SyntheticCheckpoint.of_folder(folder).store if has_recipe(folder) else TensorStore(folder)
