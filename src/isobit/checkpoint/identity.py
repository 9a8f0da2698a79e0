"""What tells one checkpoint from another: for states on disk and receipts, without reading all of its data."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from isobit.checkpoint.mapped import FileStamp
from isobit.checkpoint.store import TensorStore
from isobit.checkpoint.synth_memory import MemoryStore
from isobit.checkpoint.synth_recipe import recipe_digest
from isobit.errors import CheckpointError

WHOLE_BYTES = 64 << 20  # a file up to this size is hashed whole
STRIDE_BYTES = 16 << 20  # a larger one at every multiple of this
BLOCK_BYTES = 16 << 10


def checkpoint_identity(store: TensorStore) -> str:
    """SHA-256, hexadecimal, that stands for a checkpoint folder's contents; its and its files' names do not matter.

    It covers: `config.json`, as JSON with sorted keys; each safetensors file's size; every tensor's name, dtype, shape
    and offset in its file; and of each file's bytes: all of a file of up to 64 MiB, and of a larger one the 16 KiB from
    every multiple of 16 MiB and the last 16 KiB. So checkpoints that differ in a whole layer differ here; a change that
    is confined to bytes between those blocks of large files is not seen. Of weights that are made in memory, it covers
    the recipe, which all of that follows from. Raises CheckpointError for a file that cannot be read, or is not what
    it was when the store was opened.
    """
    if isinstance(store, MemoryStore):
        return recipe_digest(store.options)
    digests = [_config_digest(store.folder), *sorted(_file_digests(store))]
    store.check_in_place()
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def files_stamp(store: TensorStore) -> str:
    """SHA-256, hexadecimal, over the sizes and modification times of a checkpoint's files: another one after any edit.

    It sees what `checkpoint_identity` does not, but a copy has another stamp as well. Weights that are made in memory
    have no files and one stamp. Raises CheckpointError for a `config.json` that is gone.
    """
    if isinstance(store, MemoryStore):
        return recipe_digest(store.options)
    config = store.folder / "config.json"
    stamps = [FileStamp.of(config, config), *store.stamps]
    return hashlib.sha256(json.dumps(sorted((s.size, s.modified) for s in stamps)).encode()).hexdigest()


def _config_digest(folder: Path) -> str:
    path = folder / "config.json"
    try:
        text = json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True)
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download or convert it again") from None
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digests(store: TensorStore) -> Iterator[str]:
    digests = {path: hashlib.sha256() for path in store.files}
    for name in store.names:
        info = store.info(name)
        digests[info.file].update(json.dumps([name, info.dtype, info.shape, info.offset]).encode())
    for path, digest in digests.items():
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(str(size).encode())
                for offset, count in _blocks(size):
                    file.seek(offset)
                    digest.update(file.read(count))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        yield digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the parts of a file that are hashed."""
    if size <= WHOLE_BYTES:
        yield from ((offset, STRIDE_BYTES) for offset in range(0, size, STRIDE_BYTES))
    else:
        yield from ((offset, BLOCK_BYTES) for offset in range(0, size, STRIDE_BYTES))
        yield size - BLOCK_BYTES, BLOCK_BYTES
