"""A synthetic checkpoint that is never written: the tensors of `synth`, made in memory when they are asked for.

The values have the distributions of `synth`, not its bytes: large tensors are cut from pools of random values, so that
a checkpoint of the real size is there in seconds.
"""

import hashlib
import re
from bisect import bisect_left
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint.names import PUBLISHED_PREFIX
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import NUMPY_TYPES, TensorInfo
from isobit.checkpoint.synth import plan_layout
from isobit.checkpoint.synth_values import Tensor
from isobit.errors import CheckpointError

POOL_VALUES = 4_194_301  # a prime, so that rows cut from a repeated pool do not repeat
OWN_VALUES = 1 << 16  # a tensor of no more values has its own


class SyntheticCheckpoint(Checkpoint):
    """What `Checkpoint` reads from a folder, without one. options: those of `synthesize` that choose tensors."""

    def __init__(self, preset: str = "full", **options: Any):
        layout, _ = plan_layout(preset, **options)
        self.folder = Path(f"synthetic-{preset}")
        self.config = layout.config
        self.stop_tokens = frozenset(layout.config.eos_token_ids)
        self.store: Any = MemoryStore(layout.tensors() | layout.table(), layout.seed, self.folder)
        self.prefix = PUBLISHED_PREFIX
        self.lacks_mtp = False


class MemoryStore:
    """The reading side of `TensorStore` over tensors that are made when they are read."""

    def __init__(self, tensors: dict[str, Tensor], seed: int, folder: Path):
        self.folder = folder
        self.names = tuple(sorted(tensors))
        self._tensors, self._seed = tensors, seed
        self._pools: dict[str, np.ndarray] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names_under(self, prefix: str) -> tuple[str, ...]:
        """The names that begin with `prefix`, sorted."""
        begin = bisect_left(self.names, prefix)
        return tuple(takewhile(lambda name: name.startswith(prefix), self.names[begin:]))

    def info(self, name: str) -> TensorInfo:
        """A tensor's type and shape; CheckpointError if there is none of that name."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: no tensor {name}")
        tensor = self._tensors[name]
        return TensorInfo(name, tensor.dtype, tensor.shape, self.folder / "memory", 0, tensor.nbytes)

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, C-contiguous; bfloat16 comes as uint16. Not to be changed."""
        tensor = self._tensors[name]
        kind = NUMPY_TYPES[tensor.dtype]
        if tensor.count <= OWN_VALUES and not _is_numerous(name):
            pieces = list(tensor.pieces(self._seed, name))
            return np.concatenate(pieces).astype(kind, copy=False).reshape(tensor.shape)
        pool = self._pool(name, tensor)
        period = len(pool) // 2
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % period
        # Rings begin with their scale, and what a fill draws together stays together.
        start -= start % max(tensor.unit, 1)
        if tensor.count <= period:
            return pool[start : start + tensor.count].reshape(tensor.shape)
        return np.resize(pool[start : start + period], tensor.shape)

    map = read

    def close(self) -> None:
        """Nothing is open."""

    def _pool(self, name: str, tensor: Tensor) -> np.ndarray:
        """Values of the tensor's kind, in whole units, twice."""
        kind = re.sub(r"\d+", "#", name)
        if kind not in self._pools:
            unit = max(tensor.unit, 1)
            count = max(POOL_VALUES // unit, 2) * unit
            drawn = Tensor(tensor.dtype, (count,), tensor.fill, unit, kind)
            self._pools[kind] = np.concatenate(list(drawn.pieces(self._seed, kind)) * 2)
        return self._pools[kind]


def _is_numerous(name: str) -> bool:
    """Whether there are so many tensors like it that drawing each by itself would take long."""
    return ".experts." in name and not name.endswith((".mul1", ".mcg"))
