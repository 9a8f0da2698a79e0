"""Safetensors files as a folder of tensors: read lazily, written whole or not at all.

The format (https://github.com/huggingface/safetensors#format): eight little-endian bytes give the header's length, the
header is JSON {name: {dtype, shape, data_offsets}}, the rest is the tensors' bytes, row-major and little-endian.
"""

import bisect
import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint.mapped import FileStamp, MappedFile
from isobit.errors import CheckpointError

# bfloat16 and the 8-bit floats have no NumPy type: they are held as unsigned integers of their size.
NUMPY_TYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}
FORMAT_NAMES: dict[np.dtype, str] = {
    kind: name for name, kind in NUMPY_TYPES.items() if name not in ("BF16", "F8_E4M3", "F8_E5M2")
}
HEADER_LIMIT = 100_000_000  # bytes; the safetensors package refuses longer headers too
MAX_AXES = 64  # NumPy's
INCOMPLETE = "; not a complete safetensors file, download or convert it again"  # ends what is said of a malformed one
SHOWN = 80  # characters of a wrong value that a message repeats
Each = Callable[..., Iterable[Any]]  # a `map`, whose calls may go to several threads

READ_BYTES = 1 << 30  # one pread cannot return more than 2 GiB
RUN_BYTES = 8 << 20  # that one call reads of tensors that are fetched
RUN_TENSORS = 512  # that it reads at most; systems take up to 1,024 places
ALIGNMENT = 64  # bytes, of tensors that share memory


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its file's header describes it. dtype: the format's name, e.g. "BF16"; offset: bytes into `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class TensorStore:
    """All tensors of a folder's *.safetensors files: their union, whatever an index file says.

    Headers are read and checked at once, data when asked for. Every file is opened once and never changed.
    Raises CheckpointError for a missing folder, a malformed file, or one tensor name in two files.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._files: dict[Path, _File] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._fetched: dict[str, np.ndarray] = {}
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._tensors))

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files, sorted by name."""
        return tuple(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def names_under(self, prefix: str) -> tuple[str, ...]:
        """The names that begin with `prefix`, sorted."""
        begin = bisect.bisect_left(self.names, prefix)
        return tuple(itertools.takewhile(lambda name: name.startswith(prefix), self.names[begin:]))

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor; CheckpointError if no file holds it."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.folder}: no tensor {name} in its *.safetensors files; the checkpoint is incomplete, "
                "download or convert it again"
            ) from None

    def map(self, name: str) -> np.ndarray:
        """A read-only view of the file's bytes, paged in on use, or what was fetched. bfloat16 comes as uint16."""
        info = self.info(name)
        fetched = self._fetched.pop(name, None)
        if fetched is not None:
            fetched.flags.writeable = False
            return fetched
        if info.nbytes == 0:
            empty = np.empty(info.shape, NUMPY_TYPES[info.dtype])
            empty.flags.writeable = False
            return empty
        return np.ndarray(info.shape, NUMPY_TYPES[info.dtype], self._files[info.file].mapped().bytes, info.offset)

    @property
    def mapped_files(self) -> tuple[MappedFile, ...]:
        """The files that `map` has shown tensors in."""
        return tuple(file.mapped() for file in self._files.values() if file.is_mapped)

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        """What each file was when its header was read."""
        return tuple(file.stamp for file in self._files.values())

    def check_unedited(self) -> None:
        """Raise CheckpointError if one of the files, which must be open, was edited since its header was read."""
        for file in self._files.values():
            file.check_unedited()

    def check_in_place(self) -> None:
        """Raise CheckpointError unless each path leads to what was there when its file's header was read."""
        for path, file in self._files.items():
            file.stamp.check(path, path)

    def read(self, name: str) -> np.ndarray:
        """An owned, writable, aligned, C-contiguous copy of a tensor. bfloat16 comes as uint16."""
        fetched = self._fetched.pop(name, None)
        if fetched is not None:
            return fetched
        info = self.info(name)
        array = np.empty(info.shape, NUMPY_TYPES[info.dtype])
        self._files[info.file].read_into(info.offset, _bytes_of(array))
        return array

    def read_rows(self, name: str, first: int, count: int) -> np.ndarray:
        """An owned copy [count, last axis] of rows from row `first`, all leading axes taken together as rows."""
        info = self.info(name)
        kind = NUMPY_TYPES[info.dtype]
        rows, width = math.prod(info.shape[:-1]), info.shape[-1]
        if not 0 <= first <= first + count <= rows:
            raise CheckpointError(f"{info.file}: tensor {name} has {rows} rows, asked for {first} to {first + count}")
        array = np.empty((count, width), kind)
        self._files[info.file].read_into(info.offset + first * width * kind.itemsize, _bytes_of(array))
        return array

    def fetch(self, names: Iterable[str], each: Each, block: np.ndarray | None = None) -> None:
        """Read tensors now, neighbours in one call; the next `read` or `map` of each gives it away.

        each: a `map`, whose calls may go to several threads. block: uint8, memory of `block_bytes` that they lie in;
        without, each has its own. Raises CheckpointError as `read` does.
        """
        place = {path: number for number, path in enumerate(self._files)}
        infos = sorted(map(self.info, names), key=lambda info: (place[info.file], info.offset))
        arrays = [_unread(info) for info in infos] if block is None else _in_block(infos, block)
        for _ in each(lambda run: run.file.read_into(run.offset, *run.targets), self._runs(infos, arrays)):
            pass
        self._fetched.update((info.name, array) for info, array in zip(infos, arrays, strict=True))

    def block_bytes(self, names: Iterable[str]) -> int:
        """Bytes that a block takes which these tensors are fetched to."""
        return sum(_aligned(self.info(name).nbytes) for name in names)

    def drop_fetched(self) -> None:
        """Forget what was fetched and not asked for since."""
        self._fetched.clear()

    def will_need(self, names: Sequence[str]) -> None:
        """Have the system read these tensors ahead, where it can."""
        for info in map(self.info, names):
            self._files[info.file].will_need(info.offset, info.nbytes)

    def close(self) -> None:
        """Close the files. Views given out by `map` stay valid."""
        self.drop_fetched()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "TensorStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _runs(self, infos: Sequence[TensorInfo], arrays: Sequence[np.ndarray]) -> "Iterator[_Run]":
        """What to read at a time of tensors in file order: bytes that follow each other, not too many."""
        run = None
        for info, array in zip(infos, arrays, strict=True):
            file, data = self._files[info.file], _bytes_of(array)
            for first in range(0, len(data), RUN_BYTES):
                piece = data[first : first + RUN_BYTES]
                if run is None or not run.continues(file, info.offset + first, len(piece)):
                    if run is not None:
                        yield run
                    run = _Run(file, info.offset + first)
                run.add(piece)
        if run is not None:
            yield run

    def _open_all(self) -> None:
        if not self.folder.is_dir():
            problem = "is not a folder" if self.folder.exists() else "does not exist"
            raise CheckpointError(f"{self.folder} {problem}; expected a checkpoint folder with *.safetensors files")
        paths = sorted(path for path in self.folder.glob("*.safetensors") if not path.name.startswith("."))
        if not paths:
            raise CheckpointError(f"{self.folder} holds no *.safetensors files; expected a checkpoint folder")
        for path in paths:
            self._files[path] = file = _File(path)
            for info in file.tensors():
                other = self._tensors.setdefault(info.name, info)
                if other is not info:
                    raise CheckpointError(
                        f"{self.folder}: tensor {info.name} is in both {other.file.name} and {path.name}; "
                        "remove the file that does not belong to this checkpoint"
                    )


class _File:
    """One open safetensors file."""

    def __init__(self, path: Path):
        self.path = path
        self._map: MappedFile | None = None
        self._lock = threading.Lock()
        # Opening a pipe would wait for a writer.
        if path.exists() and not path.is_file():
            raise self._bad("is no regular file")
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
        self.stamp = FileStamp.of(path, self._descriptor)
        self.size = self.stamp.size
        self.metadata: Any = {}

    def tensors(self) -> list[TensorInfo]:
        """The header's tensors in file order, all of them checked; `metadata` is its metadata afterwards, unchecked."""
        if self.size < 8:
            raise self._bad(f"has {self.size} bytes, too few for a header")
        prefix = np.zeros(1, "<u8")
        self.read_into(0, _bytes_of(prefix))
        length = int(prefix[0])
        if length > HEADER_LIMIT:
            raise self._bad(f"claims a header of {length} bytes, expected at most {HEADER_LIMIT}")
        if 8 + length > self.size:
            raise self._bad(f"is truncated: its header should take {8 + length} bytes, the file has {self.size}")
        text = np.empty(length, np.uint8)
        self.read_into(8, _bytes_of(text))
        entries = self._parse(text.tobytes())
        self.metadata = entries.get("__metadata__", {})
        infos = [self._tensor(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"]
        self._check_layout(infos, 8 + length)
        return infos

    def mapped(self) -> MappedFile:
        with self._lock:
            if self._map is None:
                self._map = MappedFile(self.path, self._open_descriptor(), self.stamp)
            return self._map

    @property
    def is_mapped(self) -> bool:
        return self._map is not None

    def check_unedited(self) -> None:
        self.stamp.check(self.path, self._open_descriptor())

    def read_into(self, offset: int, *targets: memoryview) -> None:
        """Read bytes that follow each other into the targets in turn."""
        descriptor = self._open_descriptor()
        left = [target for target in targets if len(target)]
        while left:
            try:
                count = os.preadv(descriptor, [left[0][:READ_BYTES]] if len(left) == 1 else left, offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise self._bad(f"is truncated: it ends at byte {offset}")
            offset += count
            left = _without(left, count)

    def will_need(self, offset: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._open_descriptor(), offset, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None
            self._map = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise CheckpointError(f"{self.path}: was closed before it was read")
        return self._descriptor

    def _bad(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {problem}{INCOMPLETE}")

    def _parse(self, text: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            entries = dict(pairs)
            if len(entries) != len(pairs):
                raise ValueError("a name occurs twice")
            return entries

        try:
            entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise self._bad(f"has a header that is not valid JSON ({error})") from None
        if not isinstance(entries, dict):
            raise self._bad("has a header that is not a JSON object")
        return entries

    def _tensor(self, name: str, entry: Any, data_start: int) -> TensorInfo:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._bad(f"describes tensor {name} without dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in NUMPY_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} has the unknown dtype {_shown(dtype)}; "
                f"expected one of {', '.join(NUMPY_TYPES)}"
            )
        if not _counts(shape) or len(shape) > MAX_AXES:
            raise self._bad(f"gives tensor {name} the shape {_shown(shape)}, expected up to {MAX_AXES} sizes")
        if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._bad(f"gives tensor {name} the data_offsets {_shown(offsets)}, expected [begin, end]")
        nbytes = math.prod(shape) * NUMPY_TYPES[dtype].itemsize
        if offsets[1] - offsets[0] != nbytes:
            raise self._bad(
                f"gives tensor {name} {offsets[1] - offsets[0]} bytes, but {dtype} {shape} takes {nbytes} bytes"
            )
        return TensorInfo(name, dtype, tuple(shape), self.path, data_start + offsets[0], nbytes)

    def _check_layout(self, infos: list[TensorInfo], data_start: int) -> None:
        end, previous = data_start, "the header"
        for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
            if info.offset < end:
                raise self._bad(f"has tensors {previous} and {info.name} overlap")
            if info.offset > end:
                raise self._bad(f"has {info.offset - end} bytes between {previous} and {info.name} that nothing claims")
            end, previous = info.offset + info.nbytes, info.name
        if end > self.size:
            raise self._bad(f"is truncated: its tensors take {end} bytes, the file has {self.size}")
        if end < self.size:
            raise self._bad(f"has {self.size - end} bytes after its last tensor that nothing claims")


class _Run:
    """Bytes of a file from `offset` on, and the places in memory that they are read into in turn."""

    def __init__(self, file: _File, offset: int):
        self.file, self.offset, self.nbytes = file, offset, 0
        self.targets: list[memoryview] = []

    def continues(self, file: _File, offset: int, nbytes: int) -> bool:
        """Whether so many bytes at `offset` follow the run's, and may be read with them."""
        follows = file is self.file and offset == self.offset + self.nbytes
        return follows and self.nbytes + nbytes <= RUN_BYTES and len(self.targets) < RUN_TENSORS

    def add(self, target: memoryview) -> None:
        self.targets.append(target)
        self.nbytes += len(target)


def read_tensors(
    path: str | os.PathLike[str], names: Sequence[str] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Owned copies of one file's tensors, of all or of those in `names`, and the file's metadata.

    The whole header is checked, and that the file is complete. Raises CheckpointError for a malformed or truncated
    file, for metadata that are not strings, and for a name that the file does not hold.
    """
    file = _File(Path(path))
    try:
        infos = {info.name: info for info in file.tensors()}
        arrays = {}
        for name in infos if names is None else names:
            if name not in infos:
                raise CheckpointError(f"{path}: no tensor {name}; expected it in this file")
            arrays[name] = np.empty(infos[name].shape, NUMPY_TYPES[infos[name].dtype])
            file.read_into(infos[name].offset, _bytes_of(arrays[name]))
        if not isinstance(file.metadata, dict) or not all(isinstance(v, str) for v in file.metadata.values()):
            raise CheckpointError(f"{path}: its metadata are no object of strings; expected a safetensors file")
        return arrays, file.metadata
    finally:
        file.close()


class TensorWriter:
    """Writes one safetensors file that appears under `path` whole, or not at all.

    All tensors are declared first, `tensors`: {name: (dtype, shape)} with the format's dtype names. Their data follow
    in any order, each at once (`write`) or in consecutive pieces (`append`), so a table may be larger than memory. The
    bytes depend on the declared tensors and their data alone. As a context manager it commits, or discards on an error:

        with TensorWriter(path, {"table": ("I16", (rows, 51))}) as writer:
            for piece in pieces:
                writer.append("table", piece)

    durable: whether the file outlives a power cut once it is committed; without, it outlives the process alone, and
    whoever reads it after a power cut must be able to tell. Raises CheckpointError for an unknown dtype, data that do
    not fit what was declared, or a disk that is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        durable: bool = True,
    ):
        self.path = Path(path)
        self.durable = durable
        header, self._slots = _layout(self.path, tensors, {"format": "pt"} if metadata is None else metadata)
        self._data_start = len(header)
        size = self._data_start + sum(slot.nbytes for slot in self._slots.values())
        self._partial = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.partial")
        self._descriptor: int | None = None
        try:
            if shutil.disk_usage(self.path.parent).free < size:
                raise CheckpointError(f"{self.path}: needs {size} bytes, more than its disk has free; make room for it")
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            os.ftruncate(self._descriptor, size)
            self._put(0, memoryview(header))
        except OSError as error:
            self.discard()
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from None
        except BaseException:
            self.discard()
            raise

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a whole tensor; `array` has the declared shape and dtype (uint16 for BF16)."""
        slot = self._slot(name)
        if tuple(array.shape) != slot.shape or slot.done:
            problem = "was begun already" if slot.done else f"has shape {list(array.shape)}"
            raise CheckpointError(f"{self.path}: tensor {name} {problem}, declared as {list(slot.shape)}")
        self.append(name, array)

    def append(self, name: str, piece: np.ndarray) -> None:
        """Write the next values of a tensor in row-major order; pieces may end anywhere."""
        slot = self._slot(name)
        if piece.dtype != NUMPY_TYPES[slot.dtype]:
            raise CheckpointError(
                f"{self.path}: tensor {name} got {piece.dtype} data, declared as {slot.dtype} "
                f"({NUMPY_TYPES[slot.dtype]} in NumPy)"
            )
        if slot.done + piece.nbytes > slot.nbytes:
            raise CheckpointError(
                f"{self.path}: tensor {name} got more data than {slot.dtype} {list(slot.shape)} takes"
            )
        try:
            self._put(self._data_start + slot.offset + slot.done, _bytes_of(np.ascontiguousarray(piece)))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from None
        slot.done += piece.nbytes

    def commit(self) -> None:
        """Give the file its name, on the disk if durable; CheckpointError (and no file) if a tensor is incomplete."""
        unfinished = [name for name, slot in self._slots.items() if slot.done != slot.nbytes]
        if unfinished:
            self.discard()
            raise CheckpointError(f"{self.path}: tensor {unfinished[0]} was declared but not fully written")
        try:
            if self.durable:
                os.fsync(self._open_descriptor())
            self._close()
            os.replace(self._partial, self.path)
            if self.durable:
                _sync_folder(self.path.parent)
        except OSError as error:
            self.discard()
            raise CheckpointError(f"{self.path}: cannot be written ({error.strerror})") from None

    def discard(self) -> None:
        """Drop what was written; nothing appears under `path`."""
        self._close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    def _slot(self, name: str) -> "_Slot":
        if name not in self._slots:
            raise CheckpointError(f"{self.path}: tensor {name} was not declared before its data")
        return self._slots[name]

    def _put(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._open_descriptor(), data[done : done + READ_BYTES], offset + done)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise CheckpointError(f"{self.path}: was committed or discarded already")
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def write_tensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    bfloat16: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> None:
    """Write `arrays` as one safetensors file; names in `bfloat16` are uint16 arrays that hold bfloat16 bits."""
    declared = {
        name: ("BF16" if name in bfloat16 else format_name(array.dtype), array.shape) for name, array in arrays.items()
    }
    with TensorWriter(path, declared, metadata, durable) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def format_name(dtype: np.dtype) -> str:
    """The safetensors name of a NumPy dtype, e.g. "F16"; CheckpointError if the format has none."""
    try:
        return FORMAT_NAMES[np.dtype(dtype)]
    except KeyError:
        raise CheckpointError(f"safetensors cannot hold {dtype}; expected one of {', '.join(NUMPY_TYPES)}") from None


@dataclass
class _Slot:
    """A declared tensor's place after the header, and how many of its bytes are written."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    done: int = 0


def _layout(
    path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, _Slot]]:
    for name, (dtype, shape) in tensors.items():
        if dtype not in NUMPY_TYPES:
            raise CheckpointError(f"{path}: tensor {name} is declared as {dtype}, expected {', '.join(NUMPY_TYPES)}")
        if not _counts([int(size) for size in shape]):
            raise CheckpointError(f"{path}: tensor {name} is declared with shape {list(shape)}")
    slots: dict[str, _Slot] = {}
    offset = 0
    for name in _aligned_order(tensors):
        dtype, sizes = tensors[name]
        shape = tuple(int(size) for size in sizes)
        nbytes = math.prod(shape) * NUMPY_TYPES[dtype].itemsize
        slots[name] = _Slot(dtype, shape, offset, nbytes)
        offset += nbytes
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for name, slot in slots.items():
        offsets = [slot.offset, slot.offset + slot.nbytes]
        entries[name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, slots


def _aligned_order(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Iterator[str]:
    """Wide types first, so that every tensor lies at a multiple of its item size."""
    yield from sorted(tensors, key=lambda name: (-NUMPY_TYPES[tensors[name][0]].itemsize, name))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _counts(values: Any) -> bool:
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < 1 << 63)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8).data)


def _without(targets: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the targets when `count` bytes of them are filled."""
    for number, target in enumerate(targets):
        if count < len(target):
            return [target[count:], *targets[number + 1 :]]
        count -= len(target)
    return []


def _unread(info: TensorInfo) -> np.ndarray:
    return np.empty(info.shape, NUMPY_TYPES[info.dtype])


def _in_block(infos: Sequence[TensorInfo], block: np.ndarray) -> list[np.ndarray]:
    """Room for the tensors, one after the other."""
    places = itertools.accumulate((_aligned(info.nbytes) for info in infos), initial=0)
    return [
        np.ndarray(info.shape, NUMPY_TYPES[info.dtype], block, place)
        for info, place in zip(infos, places, strict=False)
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` last through a power cut, where the system allows it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
