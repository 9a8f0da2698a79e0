"""Reading a checkpoint ahead of its use: the disk works while weights are prepared and go to the device."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from isobit.checkpoint.reader import Checkpoint, ExpertLinears
from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding
from isobit.ops import environment

READERS = 16  # pieces of files that are read at a time: what keeps a fast disk busy
EMBEDDING = "embed_tokens"
LAST = (EMBEDDING, "lm_head")
AHEAD = 2  # threads that begin readings: one makes a layer's experts while the other has the next layer read
ROUTED = ".mlp.experts."  # in the names of the experts' tensors
FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")  # all experts' in one tensor, whose rows are read
MAPPED = ".ple_embedding."  # in the names of what is not read at load


class ReadAhead:
    """The layers of a checkpoint in the order of their use; while one is prepared the next is read.

    layers: the prefixes of their tensors. copies: whether preparing copies all weights: the memory of a layer's experts
    then serves the next layer but one, and the token embeddings are read too, which stay in their file otherwise. The
    host holds the weights of two layers at most, and what comes last. As a context manager it stops reading at the end.
    """

    def __init__(self, checkpoint: Checkpoint, layers: Sequence[str], copies: bool = False):
        self._checkpoint, self._layers, self._copies = checkpoint, tuple(layers), copies
        self._blocks = [np.empty(0, np.uint8)] * 2
        self._readers = ThreadPoolExecutor(READERS, "isobit-read", initializer=environment.set_default)
        self._ahead = ThreadPoolExecutor(AHEAD, "isobit-read-ahead", initializer=environment.set_default)
        self._begun = 0
        self._fetched: dict[str, Future[None]] = {}
        self._experts: dict[str, Future[ExpertLinears]] = {}
        self._begin(0)

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *exception: object) -> None:
        self._ahead.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._ahead.shutdown(wait=True)
        self._checkpoint.store.drop_fetched()

    def wait(self, layer: str) -> None:
        """Return when all tensors of a layer but its experts' are in memory; the next layer is read from now on."""
        self._begin(self._layers.index(layer) + 1)
        self._fetched.pop(layer).result()

    def experts(self, layer: str) -> ExpertLinears:
        """The routed experts of a layer; the next layer is read from now on. Raises CheckpointError as reading does."""
        self._begin(self._layers.index(layer) + 1)
        return self._experts.pop(layer).result()

    def embedding(self) -> PlainEmbedding | QuantizedEmbedding:
        """The token embeddings, after the layers; the head is in memory then. Raises CheckpointError as they do."""
        return self._last.result()

    def _begin(self, place: int) -> None:
        if place < self._begun:
            return
        self._begun = place + 1
        if place < len(self._layers):
            layer = self._layers[place]
            self._fetched[layer] = self._ahead.submit(self._fetch, layer)
            routed = self._ahead.submit(self._fetch_routed, layer, place % 2)
            self._experts[layer] = self._ahead.submit(self._make, layer, routed)
        else:
            self._last: Future[PlainEmbedding | QuantizedEmbedding] = self._ahead.submit(self._fetch_last)

    def _fetch(self, layer: str) -> None:
        names = [name for name in tensor_names(self._checkpoint, layer) if ROUTED not in name]
        self._checkpoint.store.fetch(names, self._readers.map)

    def _fetch_routed(self, layer: str, block: int) -> bool:
        """Read the experts' tensors, unless one holds all of theirs: whether they are read."""
        names = [name for name in tensor_names(self._checkpoint, layer) if ROUTED in name]
        if any(name.endswith(FUSED) for name in names):
            return False
        self._checkpoint.store.fetch(names, self._readers.map, self._block(block, names))
        return True

    def _make(self, layer: str, routed: "Future[bool]") -> ExpertLinears:
        """The experts when their tensors are read; rows of a tensor of all experts are read now."""
        return self._checkpoint.experts(f"{layer}.mlp", map if routed.result() else self._readers.map)

    def _block(self, number: int, names: Sequence[str]) -> np.ndarray:
        """Memory for the experts' tensors; of two blocks in turn, one is free again when the next but one is read."""
        nbytes = self._checkpoint.store.block_bytes(names)
        if not self._copies:
            return np.empty(nbytes, np.uint8)
        if self._blocks[number].nbytes < nbytes:
            self._blocks[number] = np.empty(nbytes, np.uint8)
        return self._blocks[number]

    def _fetch_last(self) -> PlainEmbedding | QuantizedEmbedding:
        names = {part: tensor_names(self._checkpoint, part) for part in LAST}
        if not self._copies:
            self._checkpoint.store.will_need(names.pop(EMBEDDING))
        for part in names.values():
            self._checkpoint.store.fetch(part, self._readers.map)
        return self._checkpoint.embedding(self._readers.map)


def tensor_names(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """The stored names below a canonical prefix, without what is not read at load."""
    return [name for name in checkpoint.store.names_under(checkpoint.file_name(f"{prefix}.")) if MAPPED not in name]


def stored_bytes(checkpoint: Checkpoint, prefix: str) -> int:
    """Bytes of the tensors below a canonical prefix, as stored."""
    return sum(checkpoint.store.info(name).nbytes for name in tensor_names(checkpoint, prefix))
