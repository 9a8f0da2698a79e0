"""Token embeddings on CUDA."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding
from isobit.cuda import kernels, memory
from isobit.cuda.staging import upload_one
from isobit.ops.embedding import cpu

__all__ = ["embed", "prepare_embedding"]

SOURCE = "ops/embedding/embedding.cu"
FLOAT32, HALF, BFLOAT16 = 0, 1, 2
THREADS, THREAD_COLUMNS = 64, 8
WARP = 32


@dataclass(frozen=True)
class EmbeddingHandle:
    """A table on the device: [vocabulary, hidden], 16-bit values as int16, or rings [vocabulary, words] with signs.

    kind: FLOAT32, HALF or BFLOAT16 of a plain table. signs: float32 [G, 256] of a quantized one, else None.
    """

    table: torch.Tensor
    hidden: int
    kind: int
    bits: int
    signs: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + (0 if self.signs is None else self.signs.nbytes)


def prepare_embedding(weights: PlainEmbedding | QuantizedEmbedding) -> EmbeddingHandle:
    """A table's handle, on the device. Raises CheckpointError when its tensors do not fit each other."""
    checked = cpu.prepare_embedding(weights)
    if checked.signs is not None:
        table = upload_one(checked.table.view(np.int16))
        return EmbeddingHandle(table, checked.hidden, 0, checked.bits, memory.to_device(checked.signs))
    rows = checked.table[:, : checked.hidden]
    if rows.dtype == np.float32:
        return EmbeddingHandle(upload_one(rows), checked.hidden, FLOAT32, 0, None)
    kind = BFLOAT16 if checked.bfloat16 else HALF
    return EmbeddingHandle(upload_one(np.ascontiguousarray(rows).view(np.int16)), checked.hidden, kind, 0, None)


def embed(ids: np.ndarray | torch.Tensor, handle: EmbeddingHandle) -> torch.Tensor:
    """The rows of int32 ids [R]: float32 [R, hidden].

    Raises IndexError for an id on the host that is outside the table; one on the device gives a row of NaN.
    """
    vocabulary = len(handle.table)
    if isinstance(ids, np.ndarray):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
            raise IndexError(f"ids from {ids.min()} to {ids.max()} for a table of {vocabulary} rows")
        ids = memory.to_device(np.asarray(ids, np.int32))
    elif ids.dtype != torch.int32:
        raise TypeError(f"embed: ids are {ids.dtype}, expected int32")
    rows, hidden = len(ids), handle.hidden
    out = memory.empty((rows, hidden))
    if not rows:
        return out
    if handle.signs is not None:
        groups = len(handle.signs)
        kernel = kernels.load(SOURCE, "quantized_rows", BITS=handle.bits)
        kernel((groups, rows), WARP, ids, handle.table, handle.signs, out, vocabulary, hidden, groups)
    else:
        kernel = kernels.load(SOURCE, "plain_rows", KIND=handle.kind)
        kernel((-(-hidden // (THREADS * THREAD_COLUMNS)), rows), THREADS, ids, handle.table, out, vocabulary, hidden)
    return out
