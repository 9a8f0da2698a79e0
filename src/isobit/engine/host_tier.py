"""Kept states in the host's memory: what the device has no room for, sooner back than from disk.

A state's rows before the last multiple of CHUNK_ROWS lie in pieces that all states share whose tokens begin alike, as
in the spill store: so that a state goes there without being copied again.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isobit.engine import spill
from isobit.engine.host_memory import HostMemory
from isobit.engine.radix import Node, RadixTree, Tokens, as_tokens
from isobit.engine.spill import LoadedState
from isobit.model.kept import Arrays, RowPiece, Shapes, recurrent_shapes, row_shapes, take_recurrent, take_rows
from isobit.model.state import KeptState, StatePool
from isobit.ops.copies import ARRIVED, Arrival


@dataclass(eq=False)
class HostRows:
    """The rows of one chunk. `users`: the states that need it."""

    piece: RowPiece
    nbytes: int
    users: int = 0
    node: Node["HostRows"] | None = None


@dataclass(eq=False)
class HostState:
    """A state in the host's memory, its own rows in `tail`. nbytes: without the chunks; used: as the tier counts uses.

    arrival: when the arrays hold it, and those of its chunks.
    """

    rows: int
    recurrent: Arrays
    tail: RowPiece
    chunks: tuple[HostRows, ...]
    logits: np.ndarray | None
    arrival: Arrival
    nbytes: int
    used: int
    hits: int
    node: Node["HostState"] | None = None

    @property
    def has_logits(self) -> bool:
        return self.logits is not None

    @property
    def logits_nbytes(self) -> int:
        return 0 if self.logits is None else self.logits.nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes with all chunks."""
        return self.nbytes + sum(chunk.nbytes for chunk in self.chunks)

    def rows_of(self, first: int, last: int) -> Arrays:
        """The arrays of the piece of rows [first, last): a chunk's, or the tail's."""
        return next(piece.arrays for piece in self.pieces() if (piece.first, piece.last) == (first, last))

    def pieces(self) -> list[RowPiece]:
        """All rows, in order."""
        return [*(chunk.piece for chunk in self.chunks), self.tail]


class HostTier:
    """Kept states in at most `limit_bytes` of host memory.

    Where there is no room, states go, the least valuable first, by value = rows saved * (1 + hits) / ((1 + age) *
    bytes), the longest unused first among equals. Rows saved: those beyond the nearest row above that is in this tier.
    Age: the uses since this state's last. Bytes: what its going frees. evicted(state): called before a state goes.

    One thread uses a tier; `nbytes`, `len` and the counts may be read from any.
    """

    def __init__(self, pool: StatePool, limit_bytes: int, evicted: Callable[[HostState], None]):
        self.pool = pool
        self.limit_bytes = limit_bytes
        copies = pool.ops.copies
        self.memory = HostMemory(copies.host_block, limit_bytes, in_background=copies.pinning)
        self.nbytes = self.stored = self.hits = self.skipped = 0
        self._evicted = evicted
        self._tree: RadixTree[HostState] = RadixTree()
        self._chunks: RadixTree[HostRows] = RadixTree()
        self._states: set[HostState] = set()
        self._held: list[HostState] = []
        self._uses = 0

    def __len__(self) -> int:
        return len(self._states)

    def path(self, tokens: Tokens) -> list[HostState]:
        """The states whose whole sequence `tokens` begins with, fewest rows first."""
        return [node.value for node in self._tree.path(tokens) if node.value is not None]

    @contextlib.contextmanager
    def holding(self, state: HostState) -> Iterator[None]:
        """Within, this state stays."""
        self._held.append(state)
        try:
            yield
        finally:
            self._held.remove(state)

    def put(self, tokens: Tokens, kept: KeptState, logits: np.ndarray | None = None, hits: int = 0) -> bool:
        """Take a state of the device, which may be dropped there at once, unless it is here; whether it is here now.

        logits: float32 [vocabulary] of its last row; hits: how often it has served. It is not taken when there is no
        memory for it, or not yet.
        """
        tokens = as_tokens(tokens)
        known = self._known(tokens)
        if known is not None:
            self._use(known, hits)
            return known.has_logits or logits is None or self._add_logits(known, logits)
        shared = {node.rows: node.value for node in self._chunks.path(tokens) if node.value is not None}
        held = tuple(shared.values())
        self._use_chunks(held)
        try:
            state = self._store(tokens, kept, logits, shared)
        finally:
            self._release_chunks(held)
        if state is None:
            self.skipped += 1
            return False
        self._use(state, hits)
        self.stored += 1
        return True

    def load(self, state: HostState, first_row: int = 0) -> LoadedState:
        """A state's arrays as `import_kept` takes them; `pieces` holds all rows from `first_row` on."""
        self.hits += 1
        self._use(state, state.hits + 1)
        pieces = (piece for piece in state.pieces() if piece.last > first_row or piece is state.tail)
        logits = None if state.logits is None else state.logits.copy()
        return LoadedState(state.recurrent, logits, pieces, state.arrival)

    def drop(self, state: HostState) -> None:
        """Remove a state, and the rows that no other state needs."""
        assert state.node is not None
        # Nothing may be copied to memory that is someone else's by then.
        state.arrival.wait()
        self._tree.remove(state.node)
        self._states.discard(state)
        self.nbytes -= state.nbytes
        self._release_chunks(state.chunks)

    def evict_while(self, wanted: Callable[[], bool]) -> None:
        """Evict the least valuable state, one by one, while `wanted()` says so."""
        while wanted() and self._evict_one():
            pass

    def close(self) -> None:
        """Drop all states."""
        for state in [*self._states]:
            self.drop(state)
        self.memory.close()

    def _known(self, tokens: np.ndarray) -> HostState | None:
        node = self._tree.find(tokens)
        return None if node is None else node.value

    def _store(
        self, tokens: np.ndarray, kept: KeptState, logits: np.ndarray | None, shared: dict[int, HostRows]
    ) -> HostState | None:
        """Make the state one of the tier's, with the chunks that are there under their last rows; None without room."""
        *chunks, tail = _piece_bounds(kept.rows)
        missing = [*(chunk for chunk in chunks if chunk[1] not in shared), tail]
        shapes = [recurrent_shapes(self.pool), *(row_shapes(self.pool, *piece) for piece in missing)]
        places = self._places([*shapes, {} if logits is None else {"logits": (logits.shape, logits.dtype)}])
        if places is None:
            return None
        recurrent, *row_places, last = places
        pieces = [RowPiece(*bounds, arrays) for bounds, arrays in zip(missing, row_places, strict=True)]
        arrival = self._download(kept, recurrent, pieces)
        if arrival is None:
            return None
        if logits is not None:
            np.copyto(last["logits"], logits)
        for piece in pieces[:-1]:
            shared[piece.last] = chunk = HostRows(piece, _nbytes(piece.arrays))
            chunk.node = self._chunks.insert(tokens[: piece.last], chunk)
            self.nbytes += chunk.nbytes
        nbytes = sum(map(_nbytes, (recurrent, pieces[-1].arrays, last)))
        used = tuple(shared[end] for _, end in chunks)
        state = HostState(kept.rows, recurrent, pieces[-1], used, last.get("logits"), arrival, nbytes, self._uses, 0)
        self._use_chunks(used)
        state.node = self._tree.insert(tokens, state)
        self._states.add(state)
        self.nbytes += nbytes
        return state

    def _download(self, kept: KeptState, recurrent: Arrays, pieces: Sequence[RowPiece]) -> Arrival | None:
        """Begin to copy the recurrent state and these rows to their places; None where the device has no memory."""
        copies, arrival = self.pool.ops.copies, ARRIVED
        try:
            arrival = copies.download(take_recurrent(kept), recurrent)
            for piece in pieces:
                arrival = copies.download(take_rows(self.pool, kept, piece.first, piece.last), piece.arrays)
        except copies.failures:
            arrival.wait()
            return None
        return arrival

    def _places(self, shapes: Sequence[Shapes]) -> list[Arrays] | None:
        """Arrays of these shapes, after states have made room for them; None when they cannot."""
        flat = [(shape, dtype) for group in shapes for shape, dtype in group.values()]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in flat]
        if not self.memory.could_hold(sizes):
            return None
        blocks = self.memory.take(sizes)
        while blocks is None:
            if self.memory.may_grow or not self._evict_one():
                return None
            blocks = self.memory.take(sizes)
        arrays = (block.view(dtype).reshape(shape) for block, (shape, dtype) in zip(blocks, flat, strict=True))
        return [{name: next(arrays) for name in group} for group in shapes]

    def _add_logits(self, state: HostState, logits: np.ndarray) -> bool:
        with self.holding(state):
            places = self._places([{"logits": (logits.shape, logits.dtype)}])
        if places is None:
            return False
        state.logits = places[0]["logits"]
        np.copyto(state.logits, logits)
        state.nbytes += logits.nbytes
        self.nbytes += logits.nbytes
        return True

    def _evict_one(self) -> bool:
        """Let the least valuable state go; False when there is none."""
        state = min(self._states.difference(self._held), key=self._rank, default=None)
        if state is None:
            return False
        state.arrival.wait()
        self._evicted(state)
        self.drop(state)
        return True

    def _rank(self, state: HostState) -> tuple[float, int]:
        """What goes first, by the class's order."""
        assert state.node is not None
        above = state.node.above()
        saved = state.rows - (0 if above is None else above.rows)
        nbytes = state.nbytes + sum(chunk.nbytes for chunk in state.chunks if chunk.users == 1)
        return saved * (1 + state.hits) / ((1 + self._uses - state.used) * nbytes), state.used

    def _use(self, state: HostState, hits: int) -> None:
        self._uses += 1
        state.used, state.hits = self._uses, max(state.hits, hits)

    def _use_chunks(self, chunks: Sequence[HostRows]) -> None:
        for chunk in chunks:
            chunk.users += 1

    def _release_chunks(self, chunks: Sequence[HostRows]) -> None:
        for chunk in chunks:
            chunk.users -= 1
            if not chunk.users:
                assert chunk.node is not None
                self._chunks.remove(chunk.node)
                self.nbytes -= chunk.nbytes


def _piece_bounds(rows: int) -> list[tuple[int, int]]:
    """The rows [first, last) of a state's chunks, then of its tail, which may be empty."""
    whole = rows // spill.CHUNK_ROWS * spill.CHUNK_ROWS
    return [*((first, first + spill.CHUNK_ROWS) for first in range(0, whole, spill.CHUNK_ROWS)), (whole, rows)]


def _nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())
