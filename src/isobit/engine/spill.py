"""Kept states on disk: evicted from the prompt cache, found again after a restart, trusted only when whole.

A state is one file, `<key>.state.safetensors`: its tokens, recurrent arrays and last logits, and the cache rows after
the last multiple of CHUNK_ROWS. The rows before it lie in files of CHUNK_ROWS rows, `<key>.rows.safetensors`, which all
states share whose tokens begin alike: a row depends on the tokens up to it alone. A key is the SHA-256 of the tokens
and of what the bytes belong to (checkpoint, arithmetic version, device kind). The metadata repeats that, with a SHA-256
over itself and all data, which is checked whenever a file is read back.

Files are written by a thread of their own (`spill_writer.py`); a state that is not written yet is read from memory.
They appear under their names whole, a state's after its rows'. So a process that is killed leaves at most files that
nothing names, which the next one removes.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from isobit.checkpoint.store import INCOMPLETE, read_tensors
from isobit.engine.radix import Node, RadixTree, Tokens, as_tokens
from isobit.engine.spill_writer import QUEUE_BYTES, SpillWriter, Write, checksum, unlink
from isobit.errors import IsobitError, counted, ran_out
from isobit.model.kept import Arrays, RowPiece
from isobit.ops.copies import ARRIVED, Arrival
from isobit.ops.version import ARITHMETIC_VERSION

CHUNK_ROWS = 4096  # a multiple of PAGE_ROWS
FORMAT = "1"
STATE_SUFFIX, ROWS_SUFFIX = ".state.safetensors", ".rows.safetensors"
ENTRY_BYTES = 128  # a tensor's entry in a header is shorter, its name aside
METADATA_BYTES = 512  # and so is what the metadata say beside whom the file belongs to
RECURRENT, ROWS = "recurrent.", "rows."

log = logging.getLogger(__name__)


class SpillDamagedError(IsobitError):
    """A state's files are not what was written; they are gone now."""


class NoRoomError(IsobitError):
    """The limit has no room for a state."""


@dataclass(eq=False)
class RowsFile:
    """The rows of one chunk. `users`: the states that need it."""

    path: Path
    nbytes: int
    users: int = 0


@dataclass(eq=False)
class SpilledState:
    """A state on disk. `chunks`: the keys of its rows files in order; `used`: when it was last wanted, in ns."""

    path: Path
    rows: int
    chunks: tuple[str, ...]
    logits_nbytes: int
    nbytes: int
    used: int
    node: Node["SpilledState"] | None = None

    @property
    def has_logits(self) -> bool:
        return self.logits_nbytes > 0


@dataclass(eq=False)
class ForeignFile:
    """A file of another checkpoint, arithmetic version or device: of no use here, but it takes room."""

    path: Path
    nbytes: int
    used: int


@dataclass(frozen=True)
class LoadedState:
    """A state's arrays as `import_kept` takes them; reading `pieces` raises SpillDamagedError for damaged rows.

    arrival: when the arrays hold it.
    """

    recurrent: Arrays
    logits: np.ndarray | None
    pieces: Iterator[RowPiece]
    arrival: Arrival = ARRIVED


class SpillStore:
    """The states in a folder, of at most `limit_bytes` together, least recently used given up first.

    identity: of the checkpoint (`checkpoint_identity`). device: the device kind whose bits these are. queue_bytes: of
    states that wait to be written. One process at a time uses a folder: for another one the store is not `active` and
    holds nothing, with a logged warning. Raises IsobitError when the folder cannot be made or written to.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        identity: str,
        device: str = "cpu",
        queue_bytes: int = QUEUE_BYTES,
    ):
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.queue_bytes = queue_bytes
        self.belongs = {"isobit": FORMAT, "checkpoint": identity, "arithmetic": ARITHMETIC_VERSION, "device": device}
        self.nbytes = self.skipped = 0
        self._tree: RadixTree[SpilledState] = RadixTree()
        self._states: set[SpilledState] = set()
        self._rows: dict[str, RowsFile] = {}
        self._foreign: set[ForeignFile] = set()
        self._held: SpilledState | None = None
        self._last_use = 0
        self._writer = SpillWriter(queue_bytes)
        self._lock = self._take_lock()
        if self.active:
            self._scan()

    @property
    def active(self) -> bool:
        """Whether this process uses the folder."""
        return self._lock is not None

    def __len__(self) -> int:
        """How many states can be loaded."""
        return len(self._states)

    def __contains__(self, state: object) -> bool:
        return state in self._states

    def path(self, tokens: Tokens) -> list[SpilledState]:
        """The states whose whole sequence `tokens` begins with, fewest rows first."""
        self._settle()
        return [node.value for node in self._tree.path(tokens) if node.value is not None]

    @contextlib.contextmanager
    def holding(self, state: SpilledState) -> Iterator[None]:
        """Within, `put` makes no room at the cost of this state."""
        self._held = state
        try:
            yield
        finally:
            self._held = None

    def put(
        self,
        tokens: Tokens,
        export_recurrent: Callable[[], Arrays],
        export_rows: Callable[[int, int], Arrays],
        nbytes: int,
        logits: np.ndarray | None = None,
        wait: bool = False,
    ) -> bool:
        """Have the state after `tokens` written unless it is there; whether it can be loaded now.

        export_recurrent(): the recurrent arrays; export_rows(first, last): those of a RowPiece; called before this
        returns. nbytes: of the whole state, all rows included. A state that the limit has no room for is not taken, nor
        one that comes while others wait and the queue has no room left, unless `wait` says to wait for it; a state
        larger than the queue is always waited for. What the disk refuses is logged and vanishes.
        """
        self._settle()
        tokens = as_tokens(tokens)
        if not self.active or nbytes > self.limit_bytes:
            return False
        node = self._tree.find(tokens)
        known = node.value if node is not None else None
        if known is not None and (known.has_logits or logits is None):
            self._touch(known)
            return True
        keys = self._keys(tokens)
        chunks = keys[:-1]
        there = sum(self._rows[key].nbytes for key in chunks if key in self._rows)
        if not wait and not self._writer.has_room(nbytes - there):
            self.skipped += 1
            return False
        self._use_rows(chunks)
        if known is not None:
            self.drop(known)
        try:
            self._write_chunks(tokens, chunks, export_rows)
            state = self._write_state(tokens, keys, export_recurrent(), export_rows, logits)
        except Exception as error:
            if not isinstance(error, NoRoomError) and not ran_out(error):
                raise
            self._release_rows(chunks)
            return False
        self._index(tokens, state)
        return True

    def load(self, state: SpilledState, first_row: int = 0) -> LoadedState:
        """Read a state; `pieces` holds all rows from `first_row` on, and may begin before it.

        Raises SpillDamagedError, and drops the state, when its file is not what was written.
        """
        if state not in self._states:
            raise SpillDamagedError(f"{state.path} could not be written")
        assert state.node is not None
        self._touch(state)
        tokens = state.node.tokens()
        arrays = self._read(state.path, {"kind": "state", "rows": str(state.rows)}, partial(self.drop, state))
        if not np.array_equal(arrays.pop("tokens", np.empty(0)), tokens):
            self.drop(state)
            raise SpillDamagedError(f"{state.path} does not hold the state it is named for; it is removed")
        tail_first = len(state.chunks) * CHUNK_ROWS
        tail = RowPiece(tail_first, state.rows, _without_prefix(arrays, ROWS))
        pieces = self._pieces(state, first_row, tail)
        return LoadedState(_without_prefix(arrays, RECURRENT), arrays.get("logits"), pieces)

    def drop(self, state: SpilledState) -> None:
        """Remove a state, and the rows that no other state needs."""
        assert state.node is not None
        self._tree.remove(state.node)
        self._states.discard(state)
        self.nbytes -= state.nbytes
        self._writer.discard(state.path)
        self._release_rows(state.chunks)

    def flush(self) -> None:
        """Wait until all that was put is on disk."""
        self._writer.flush()
        self._settle()

    def close(self, drop: bool = False) -> None:
        """Write what waits, or `drop` it, and let another process use the folder."""
        self._writer.close(drop)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._tree, self._states, self._rows, self._foreign = RadixTree(), set(), {}, set()
        self.nbytes = 0

    def _take_lock(self) -> IO[str] | None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / "lock", "a")  # noqa: SIM115
        except OSError as error:
            raise IsobitError(
                f"the spill folder {self.folder} cannot be used ({error.strerror}); name one that can be written to"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            log.warning("the spill folder %s is in use by another process: running without it", self.folder)
            return None
        return lock

    def _scan(self) -> None:
        """Find what earlier processes left: index what is ours, count what is foreign, remove what is useless."""
        states: list[tuple[str, Path, os.stat_result]] = []
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".") and path.name.endswith(".partial"):
                unlink(path)
            elif path.name.endswith((STATE_SUFFIX, ROWS_SUFFIX)):
                self._scan_file(path, states)
        for key, path, stat in states:
            self._scan_state(key, path, stat)
        for key in [key for key, rows in self._rows.items() if not rows.users]:
            self._remove_rows(key)
        if self._foreign:
            log.warning(
                "%s of another checkpoint, device or version of isobit in the spill folder %s: ignored",
                counted(len(self._foreign), "file"),
                self.folder,
            )
        self._make_room(0)

    def _scan_file(self, path: Path, states: list[tuple[str, Path, os.stat_result]]) -> None:
        try:
            stat = path.stat()
            _, metadata = read_tensors(path, ())
        except (IsobitError, OSError) as error:
            _remove_damaged(path, error)
            return
        self.nbytes += stat.st_size
        self._last_use = max(self._last_use, stat.st_mtime_ns)
        key = _key(path)
        if any(metadata.get(name) != value for name, value in self.belongs.items()):
            self._foreign.add(ForeignFile(path, stat.st_size, stat.st_mtime_ns))
        elif path.name.endswith(ROWS_SUFFIX):
            self._rows[key] = RowsFile(path, stat.st_size)
        else:
            states.append((key, path, stat))

    def _scan_state(self, key: str, path: Path, stat: os.stat_result) -> None:
        try:
            arrays, metadata = read_tensors(path, ("tokens",))
            tokens = arrays["tokens"]
            if tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
                raise SpillDamagedError(f"{path} has no tokens")
            keys = self._keys(tokens)
            if keys[-1] != key or any(chunk not in self._rows for chunk in keys[:-1]):
                raise SpillDamagedError(f"{path} has rows that are missing, or another name than its tokens give")
            logits_nbytes = int(metadata["logits"])
        except (IsobitError, OSError, KeyError, ValueError) as error:
            self.nbytes -= stat.st_size
            _remove_damaged(path, error)
            return
        chunks = keys[:-1]
        self._use_rows(chunks)
        self._index(tokens, SpilledState(path, len(tokens), chunks, logits_nbytes, stat.st_size, stat.st_mtime_ns))

    def _keys(self, tokens: np.ndarray) -> tuple[str, ...]:
        """The keys of the tokens' whole chunks, then the state's own."""
        digest = hashlib.sha256(json.dumps(self.belongs, sort_keys=True).encode())
        keys = []
        for first in range(0, len(tokens), CHUNK_ROWS):
            digest.update(tokens[first : first + CHUNK_ROWS].astype("<i4").tobytes())
            if first + CHUNK_ROWS <= len(tokens):
                keys.append(digest.hexdigest())
        return (*keys, digest.hexdigest())

    def _write_chunks(
        self, tokens: np.ndarray, chunks: tuple[str, ...], export_rows: Callable[[int, int], Arrays]
    ) -> None:
        for i, key in enumerate(chunks):
            if self._rows[key].nbytes:
                continue
            first, last = i * CHUNK_ROWS, (i + 1) * CHUNK_ROWS
            path = self.folder / f"{key}{ROWS_SUFFIX}"
            described = {"kind": "rows", "first": str(first), "rows": str(last), "key": key}
            self._rows[key].nbytes = self._write(path, export_rows(first, last), described)

    def _write_state(
        self,
        tokens: np.ndarray,
        keys: tuple[str, ...],
        recurrent: Arrays,
        export_rows: Callable[[int, int], Arrays],
        logits: np.ndarray | None,
    ) -> SpilledState:
        chunks = keys[:-1]
        tail = export_rows(len(chunks) * CHUNK_ROWS, len(tokens))
        arrays = {f"{RECURRENT}{name}": array for name, array in recurrent.items()}
        arrays |= {f"{ROWS}{name}": array for name, array in tail.items()}
        arrays["tokens"] = tokens
        if logits is not None:
            arrays["logits"] = logits
        path = self.folder / f"{keys[-1]}{STATE_SUFFIX}"
        logits_nbytes = 0 if logits is None else logits.nbytes
        described = {"kind": "state", "rows": str(len(tokens)), "logits": str(logits_nbytes)}
        nbytes = self._write(path, arrays, described)
        return SpilledState(path, len(tokens), chunks, logits_nbytes, nbytes, self._next_use())

    def _write(self, path: Path, arrays: Arrays, described: Mapping[str, str]) -> int:
        """Have one file written within the limit; at most its size, until `_settle` knows better."""
        size = sum(array.nbytes for array in arrays.values()) + self._header_bytes(arrays)
        if not self._make_room(size):
            raise NoRoomError(f"{path} needs {size} bytes, which the spill folder's limit has no room for")
        self._writer.put(Write(path, arrays, {**self.belongs, **described}, self._next_use(), size))
        self.nbytes += size
        return size

    def _settle(self) -> None:
        """Take in what has become of the files handed to the writer."""
        for write in self._writer.finished():
            key, is_state = _key(write.path), write.path.name.endswith(STATE_SUFFIX)
            states = [state for state in self._states if state.path == write.path] if is_state else self._users(key)
            if write.size is None:
                for state in states:
                    self.drop(state)
                continue
            for file in states if is_state else [self._rows[key]]:
                self.nbytes += write.size - file.nbytes
                file.nbytes = write.size

    def _pieces(self, state: SpilledState, first_row: int, tail: RowPiece) -> Iterator[RowPiece]:
        for i, key in enumerate(state.chunks):
            first, last = i * CHUNK_ROWS, (i + 1) * CHUNK_ROWS
            if last <= first_row:
                continue
            described = {"kind": "rows", "first": str(first), "rows": str(last), "key": key}
            arrays = self._read(self._rows[key].path, described, partial(self._drop_users, key))
            yield RowPiece(first, last, arrays)
        yield tail

    def _read(self, path: Path, described: Mapping[str, str], drop: Callable[[], None]) -> Arrays:
        """A file's arrays, once all of it is found to be as it was written; calls `drop` when it is not."""
        unwritten = self._writer.unwritten(path)
        if unwritten is not None:
            return unwritten
        problem = "its checksum does not match"
        try:
            arrays, metadata = read_tensors(path)
            found = metadata.pop("sha256", "")
            expected = {**self.belongs, **described}
            whole = found == checksum(metadata, arrays)
            whole = whole and all(metadata.get(name) == value for name, value in expected.items())
        except (IsobitError, OSError) as error:
            whole, problem = False, _found(error)
        if not whole:
            drop()
            log.warning("%s in the spill folder is damaged and was removed: %s", path.name, problem)
            raise SpillDamagedError(f"{path} is damaged and was removed: {problem}")
        return arrays

    def _index(self, tokens: np.ndarray, state: SpilledState) -> None:
        state.node = self._tree.insert(tokens, state)
        self._states.add(state)

    def _use_rows(self, chunks: tuple[str, ...]) -> None:
        for key in chunks:
            rows = self._rows.setdefault(key, RowsFile(self.folder / f"{key}{ROWS_SUFFIX}", 0))
            rows.users += 1

    def _release_rows(self, chunks: tuple[str, ...]) -> None:
        for key in chunks:
            self._rows[key].users -= 1
            if not self._rows[key].users:
                self._remove_rows(key)

    def _remove_rows(self, key: str) -> None:
        rows = self._rows.pop(key)
        self.nbytes -= rows.nbytes
        self._writer.discard(rows.path)

    def _drop_users(self, key: str) -> None:
        """Drop every state that needs a damaged rows file, and the file with the last of them."""
        for state in self._users(key):
            self.drop(state)

    def _users(self, key: str) -> list[SpilledState]:
        return [state for state in self._states if key in state.chunks]

    def _touch(self, state: SpilledState) -> None:
        state.used = self._next_use()
        self._writer.stamp(state.path, state.used)

    def _next_use(self) -> int:
        """Now in nanoseconds, later than every use before."""
        self._last_use = max(self._last_use + 1, time.time_ns())
        return self._last_use

    def _make_room(self, nbytes: int) -> bool:
        """Give up the least recently used until `nbytes` more fit; False when they cannot."""
        while self.nbytes + nbytes > self.limit_bytes:
            candidates: list[ForeignFile | SpilledState] = [*self._foreign, *self._states - {self._held}]
            if not candidates:
                return False
            oldest = min(candidates, key=lambda file: (file.used, file.path.name))
            if isinstance(oldest, ForeignFile):
                self._foreign.discard(oldest)
                self.nbytes -= oldest.nbytes
                unlink(oldest.path)
            else:
                self.drop(oldest)
        return True

    def _header_bytes(self, arrays: Arrays) -> int:
        """A file's header of these arrays is no longer."""
        return sum(len(name) + ENTRY_BYTES for name in arrays) + len(json.dumps(self.belongs)) + METADATA_BYTES


def _without_prefix(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _remove_damaged(path: Path, error: Exception) -> None:
    log.warning("%s in the spill folder is damaged or truncated and was removed: %s", path.name, _found(error))
    unlink(path)


def _found(error: Exception) -> str:
    """What is wrong with a file, without what to do about a checkpoint's."""
    return str(error).removesuffix(INCOMPLETE)


def _key(path: Path) -> str:
    return path.name.split(".")[0]
