"""Token embeddings on the CPU."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding
from isobit.errors import CheckpointError
from isobit.ops.buffers import empty
from isobit.ops.rings import decode_ring
from isobit.ops.tape import do
from isobit.ops.work import run_split

__all__ = ["embed", "prepare_embedding"]

GROUP = 256
SIXTEENTH = np.float32(1 / 16)


@dataclass(frozen=True)
class EmbeddingHandle:
    """A table ready to read. signs: float32 [G, 256] of a quantized table, else None."""

    table: np.ndarray
    hidden: int
    bfloat16: bool
    bits: int
    signs: np.ndarray | None

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + (0 if self.signs is None else self.signs.nbytes)


def prepare_embedding(weights: PlainEmbedding | QuantizedEmbedding) -> EmbeddingHandle:
    """A table's handle; nothing is read yet. Raises CheckpointError when its tensors do not fit each other."""
    if isinstance(weights, PlainEmbedding):
        if weights.rows.ndim != 2 or weights.rows.shape[1] < weights.hidden:
            raise CheckpointError(f"{weights.name}: shape {weights.rows.shape}, expected [vocab, {weights.hidden}]")
        return EmbeddingHandle(np.asarray(weights.rows), weights.hidden, weights.bfloat16, 0, None)
    groups = -(-weights.hidden // GROUP)
    words = groups * (1 + 16 * weights.bits)
    if weights.trellis.shape[1:] != (words,) or weights.signs.shape != (groups, GROUP):
        raise CheckpointError(
            f"{weights.name}: trellis {weights.trellis.shape} and signs {weights.signs.shape}, "
            f"expected [vocab, {words}] and [{groups}, {GROUP}]"
        )
    signs = np.array(weights.signs, np.float32, order="C")
    return EmbeddingHandle(np.asarray(weights.trellis), weights.hidden, False, weights.bits, signs)


def embed(ids: np.ndarray, handle: EmbeddingHandle) -> np.ndarray:
    """The rows of int32 ids [R]: float32 [R, hidden]. Raises IndexError for an id outside the table."""
    out = empty((len(ids), handle.hidden))
    do(_embed, ids, handle, out)
    return out


def _embed(ids: np.ndarray, handle: EmbeddingHandle, out: np.ndarray) -> None:
    stored = handle.table[ids]
    if handle.signs is not None:
        run_split(decode_rows, 16 * out.size, len(ids), stored.view(np.uint16), handle.bits, handle.signs, out)
    elif handle.bfloat16:
        out[...] = (stored[:, : handle.hidden].astype(np.uint32) << 16).view(np.float32)
    else:
        out[...] = stored[:, : handle.hidden]


@njit(nogil=True, cache=True, error_model="numpy")
def decode_rows(stored, bits, signs, out, first, last):
    """Rows first to last - 1 of uint16 [R, G * (1 + 16 * bits)] to float32 [R, hidden]."""
    words, hidden = stored.ravel(), out.shape[1]
    ring_words = 1 + 16 * bits
    values = np.empty(GROUP, np.float32)
    for row in range(first, last):
        for group in range(signs.shape[0]):
            decode_ring(words, row * stored.shape[1] + group * ring_words, bits, GROUP, values, 0)
            rotate(values)
            for i in range(min(GROUP, hidden - group * GROUP)):
                out[row, group * GROUP + i] = (values[i] * SIXTEENTH) * signs[group, i]


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(values):
    """The butterfly over 256 values in place, strides 1, 2, ..., 128."""
    stride = 1
    while stride < values.size:
        for start in range(0, values.size, 2 * stride):
            for i in range(start, start + stride):
                a, b = values[i], values[i + stride]
                values[i] = a + b
                values[i + stride] = a - b
        stride *= 2
