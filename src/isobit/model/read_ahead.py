"""Reading a checkpoint ahead of its use: the disk works while weights are prepared and go to the device."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from isobit.checkpoint.reader import Checkpoint, ExpertLinears
from isobit.ops import environment

READERS = 16  # experts that are read at a time: what keeps a fast disk busy
LAST = ("embed_tokens", "lm_head")
ROUTED = ".mlp.experts."  # in the names of what the readers read
MAPPED = ".ple_embedding."  # in the names of what is not read at load


class ReadAhead:
    """The layers of a checkpoint in the order of their use; while one is prepared the next is read.

    layers: the prefixes of their tensors. The host holds the experts of two layers at most. As a context manager it
    stops reading at the end.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[str]):
        self._checkpoint, self._layers = checkpoint, tuple(layers)
        self._readers = ThreadPoolExecutor(READERS, "isobit-read", initializer=environment.set_default)
        self._ahead = ThreadPoolExecutor(1, "isobit-read-ahead", initializer=environment.set_default)
        self._reading: dict[str, Future[ExpertLinears]] = {}
        self._begin(0)

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *exception: object) -> None:
        self._ahead.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._ahead.shutdown(wait=True)

    def experts(self, layer: str) -> ExpertLinears:
        """The routed experts of a layer; the next layer is read from now on. Raises CheckpointError as reading does."""
        self._begin(self._layers.index(layer) + 1)
        return self._reading.pop(layer).result()

    def _begin(self, place: int) -> None:
        if place < len(self._layers):
            self._reading[self._layers[place]] = self._ahead.submit(self._read, self._layers[place])
        else:
            self._ahead.submit(self._will_need, *LAST)

    def _read(self, layer: str) -> ExpertLinears:
        self._will_need(layer)
        return self._checkpoint.experts(f"{layer}.mlp", self._readers.map)

    def _will_need(self, *parts: str) -> None:
        for part in parts:
            names = tensor_names(self._checkpoint, part)
            self._checkpoint.store.will_need([name for name in names if ROUTED not in name])


def tensor_names(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """The stored names below a canonical prefix, without what is not read at load."""
    return [name for name in checkpoint.store.names_under(checkpoint.file_name(f"{prefix}.")) if MAPPED not in name]


def stored_bytes(checkpoint: Checkpoint, prefix: str) -> int:
    """Bytes of the tensors below a canonical prefix, as stored."""
    return sum(checkpoint.store.info(name).nbytes for name in tensor_names(checkpoint, prefix))
