"""What a reply is a function of, beside its request."""

from dataclasses import dataclass

from isobit.checkpoint.identity import checkpoint_identity, files_stamp
from isobit.checkpoint.store import TensorStore
from isobit.ops.version import ARITHMETIC_VERSION


@dataclass(frozen=True)
class Origin:
    """Where replies come from: equal origins and equal requests give equal replies.

    checkpoint: `checkpoint_identity`; arithmetic: the version of docs/arithmetic.md; device: the kind, such as "cpu".
    """

    checkpoint: str
    arithmetic: str
    device: str


def origin_of(store: TensorStore, device: str) -> Origin:
    """The origin of what this version of isobit computes from a checkpoint folder."""
    return Origin(checkpoint_identity(store), ARITHMETIC_VERSION, device)


def spill_identity(origin: Origin, store: TensorStore) -> str:
    """Whose states on disk are trusted: those of the origin's checkpoint while its files are as they were."""
    return f"{origin.checkpoint}-{files_stamp(store)}"
