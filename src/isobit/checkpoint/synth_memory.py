"""A synthetic checkpoint that is never written: the tensors of `synth`, made in memory when they are asked for.

The values have the distributions of `synth`, not its bytes: large tensors are cut from pools of random values, so that
a checkpoint of the real size is there in seconds. They are a function of the options alone.
"""

import hashlib
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from isobit.checkpoint.config import FlashNextConfig, load_config, load_stop_tokens
from isobit.checkpoint.names import PUBLISHED_PREFIX
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import NUMPY_TYPES, Each, TensorInfo, TensorStore
from isobit.checkpoint.synth import plan_layout
from isobit.checkpoint.synth_options import SynthOptions
from isobit.checkpoint.synth_recipe import MAKE_AGAIN, RECIPE_FILE, read_recipe
from isobit.checkpoint.synth_values import Tensor
from isobit.errors import CheckpointError, IsobitError

POOL_VALUES = 4_194_301  # a prime, so that rows cut from a repeated pool do not repeat
ALIGNED_VALUES = 8  # of two bytes or more
OWN_VALUES = 1 << 16  # a tensor of no more values has its own


class SyntheticCheckpoint(Checkpoint):
    """What `Checkpoint` reads from a folder, without its weights. preset, options: fields of SynthOptions."""

    def __init__(self, preset: str = "full", **options: Any):
        self._make(Path(f"synthetic-{preset}"), SynthOptions(preset, **options))
        self.stop_tokens = frozenset(self.config.eos_token_ids)

    @classmethod
    def of_folder(cls, folder: str | Path) -> "SyntheticCheckpoint":
        """The checkpoint of a folder with a recipe; CheckpointError if it cannot be made, or config.json is another's.

        The folder is read, never changed.
        """
        folder = Path(folder)
        options = read_recipe(folder)
        made = cls.__new__(cls)
        try:
            made._make(folder, options)
        except IsobitError as error:
            raise CheckpointError(f"{folder / RECIPE_FILE}: {error}; {MAKE_AGAIN}") from None
        declared = load_config(folder)
        _check_same(folder, declared, made.config)
        made.config = declared
        made.stop_tokens = load_stop_tokens(folder, declared)
        return made

    def _make(self, folder: Path, options: SynthOptions) -> None:
        layout, _ = plan_layout(options)
        self.folder, self.config = folder, layout.config
        self.store: MemoryStore = MemoryStore(layout.tensors() | layout.table(), options, folder)
        self.prefix = PUBLISHED_PREFIX
        self.lacks_mtp = False


class MemoryStore(TensorStore):
    """A `TensorStore` without files, over tensors that are made when they are read, by any number of threads."""

    def __init__(self, tensors: dict[str, Tensor], options: SynthOptions, folder: Path):
        self.folder, self.options = folder, options
        self._files = {}
        self._fetched = {}
        self._made = tensors
        self._tensors = {name: _info(name, tensor, folder) for name, tensor in tensors.items()}
        self._pools: dict[Hashable, np.ndarray] = {}
        self._making = Lock()

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, C-contiguous; bfloat16 comes as uint16. Not to be changed: others may share them."""
        info, tensor = self.info(name), self._made[name]
        if tensor.whole or (tensor.count <= OWN_VALUES and not _is_numerous(name)):
            return _drawn(tensor, self.options.seed, name).reshape(info.shape)
        pool = self._pool(name, tensor)
        period = len(pool) // 2
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % period
        # Rings begin with their scale, what a fill draws together stays together, and kernels read aligned words.
        start -= start % math.lcm(tensor.unit, ALIGNED_VALUES)
        if tensor.count <= period:
            return pool[start : start + tensor.count].reshape(tensor.shape)
        return np.resize(pool[start : start + period], tensor.shape)

    map = read

    def read_rows(self, name: str, first: int, count: int) -> np.ndarray:
        """Rows as `TensorStore.read_rows` gives them, not to be changed either."""
        info = self.info(name)
        rows = self.read(name).reshape(-1, info.shape[-1])
        if not 0 <= first <= first + count <= len(rows):
            raise CheckpointError(f"{info.file}: {name} has {len(rows)} rows, asked for {first} to {first + count}")
        return rows[first : first + count]

    def fetch(self, names: Iterable[str], each: Each, block: np.ndarray | None = None) -> None:
        """Nothing is read from anywhere."""

    def block_bytes(self, names: Iterable[str]) -> int:
        """Nothing is put anywhere."""
        return 0

    def will_need(self, names: Sequence[str]) -> None:
        """Nothing is read from anywhere."""

    def close(self) -> None:
        """Give up the memory that only further reads would need."""
        self._pools.clear()

    def _pool(self, name: str, tensor: Tensor) -> np.ndarray:
        """Values of the tensor's kind, in whole units, twice. They depend on nothing but what is in the key."""
        kind, unit = re.sub(r"\d+", "#", name), tensor.unit
        key = kind, tensor.dtype, unit, tensor.fill
        with self._making:
            if key not in self._pools:
                count = max(POOL_VALUES // unit, 2) * unit
                drawn = Tensor(tensor.dtype, (count,), tensor.fill, unit)
                self._pools[key] = np.tile(_drawn(drawn, self.options.seed, kind), 2)
            return self._pools[key]


def _info(name: str, tensor: Tensor, folder: Path) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tensor.shape, folder, 0, tensor.nbytes)


def _drawn(tensor: Tensor, seed: int, name: str) -> np.ndarray:
    """All of a tensor's values, flat, as `synth` writes them."""
    values, end = np.empty(tensor.count, NUMPY_TYPES[tensor.dtype]), 0
    for piece in tensor.pieces(seed, name):
        values[end : end + len(piece)] = piece
        end += len(piece)
    return values


def _is_numerous(name: str) -> bool:
    """Whether there are so many tensors like it that drawing each by itself would take long."""
    return ".experts." in name and not name.endswith((".mul1", ".mcg"))


def _check_same(folder: Path, declared: FlashNextConfig, made: FlashNextConfig) -> None:
    """Refuse a config.json that is not the recipe's."""
    ours, theirs = made.model_dump(exclude={"quantization"}), declared.model_dump(exclude={"quantization"})
    for field in ours:
        if ours[field] != theirs[field]:
            raise CheckpointError(
                f"{folder / 'config.json'}: {field} is {theirs[field]}, expected {ours[field]}, as {RECIPE_FILE} makes "
                f"it; {MAKE_AGAIN}"
            )
