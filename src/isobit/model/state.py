"""The state of streams: slots of recurrent state, pages of key-value rows, and kept states that restore at any row."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from isobit.errors import IsobitError
from isobit.ops.batch import PAGE_ROWS, Array, AttentionCache, Batch
from isobit.ops.copies import ARRIVED, Arrival

if TYPE_CHECKING:
    from isobit.model.plan import Plan


class StateFullError(IsobitError):
    """No slot or page is free for what was asked."""


@dataclass
class Stream:
    """A reply's place in the pools. `rows` tokens are in its state; `pages` holds its key-value pages in order.

    arrival: when its state, which may come from the host, is there.
    """

    slot: int
    pages: list[int] = field(default_factory=list)
    rows: int = 0
    arrival: Arrival = ARRIVED


@dataclass(frozen=True)
class Unsettled:
    """A journaled segment of `count` rows from position `first`: journal row place + i holds the state after row i."""

    first: int
    count: int
    place: int


@dataclass(frozen=True)
class KeptState:
    """A stream's state at row `rows`: copies of its recurrent state, and shares of its key-value pages.

    arrival: when all of it, which may come from the host, is there.
    """

    rows: int
    pages: tuple[int, ...]
    recurrent: dict[str, Array]
    arrival: Arrival = ARRIVED

    @property
    def nbytes(self) -> int:
        """Bytes of the copies; the shared pages are not counted."""
        return sum(array.nbytes for array in self.recurrent.values())


class StatePool:
    """Every stream's state on the device.

    `recurrent`: named pools with the slot as first index. `caches`: one AttentionCache a name, the page as first
    index; `index_block` rows share one pooled key. A page that several streams or kept states share is copied before
    it is written. `journals`: for each recurrent pool, the state after the journaled rows of the last forward, so that
    rows can be given up again. Beside each recurrent pool there is room for a copy of it, to take a forward back.
    """

    def __init__(
        self,
        ops,
        recurrent: dict[str, Array],
        initial: dict[str, int],
        caches: dict[str, AttentionCache],
        index_block: int,
        slots: int,
        pages: int,
    ):
        self.ops = ops
        self.recurrent = recurrent
        self._before = {name: ops.zeros(pool.shape, pool.dtype) for name, pool in recurrent.items()}
        self.initial = initial
        self.caches = caches
        self.index_block = index_block
        self.pages = pages
        self._free_slots = list(range(slots - 1, -1, -1))
        self._free_pages = list(range(pages - 1, -1, -1))
        self._page_users = [0] * pages
        self.journals: dict[str, Array] = {}
        self._journals_made = 0
        self._unsettled: dict[int, Unsettled] = {}

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools when every slot and page is in use."""
        caches = [pool for cache in self.caches.values() for pool in cache_pools(cache)]
        return sum(pool.nbytes for pool in [*self.recurrent.values(), *caches])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot's recurrent state: what a kept state copies."""
        return sum(pool.nbytes // pool.shape[0] for pool in self.recurrent.values())

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all caches."""
        return sum(pool.nbytes // self.pages for cache in self.caches.values() for pool in cache_pools(cache))

    def page_users(self) -> np.ndarray:
        """int64 [pages], how many streams and kept states share each page."""
        return np.array(self._page_users, dtype=np.int64)

    def take_pages(self, count: int) -> list[int]:
        """Free pages for a kept state that comes from elsewhere; raises StateFullError when there are fewer."""
        if count > len(self._free_pages):
            raise StateFullError(f"the key-value pages are full: {count} needed, {len(self._free_pages)} free")
        return [self._take_page() for _ in range(count)]

    def share_pages(self, pages: Sequence[int]) -> None:
        """Hold pages that others hold as well."""
        self._share(pages)

    def release_pages(self, pages: Sequence[int]) -> None:
        """Give up a share of each page."""
        self._release(pages)

    def open(self) -> Stream:
        """A stream at row 0; raises StateFullError when every slot is taken."""
        if not self._free_slots:
            raise StateFullError("every state slot is taken: wait for a running reply to end")
        slot = self._free_slots[-1]
        for name, pool in self.recurrent.items():
            self.ops.fill_rows(pool, [slot], self.initial.get(name, 0))
        return Stream(self._free_slots.pop())

    def close(self, stream: Stream) -> None:
        """Give the stream's slot and pages back."""
        stream.arrival.precede()
        self._release(stream.pages)
        stream.pages.clear()
        self._unsettled.pop(stream.slot, None)
        self._free_slots.append(stream.slot)

    def save(self, stream: Stream) -> KeptState:
        """The stream's state at its current row; costs copies of the recurrent state, and shares the pages."""
        stream.arrival.precede()
        pages = tuple(stream.pages[: pages_for(stream.rows)])
        copies = {name: self.ops.take_rows(pool, [stream.slot]) for name, pool in self.recurrent.items()}
        self._share(pages)
        return KeptState(stream.rows, pages, copies)

    def restore(self, kept: KeptState) -> Stream:
        """A new stream that goes on from the kept state, once that has arrived."""
        stream = self.open()
        try:
            if kept.arrival.arrived():
                self._fill(stream, kept)
            else:
                stream.arrival = self.ops.copies.upload(lambda: self._fill(stream, kept), kept.arrival, kept)
        except BaseException:
            self.close(stream)
            raise
        self._share(kept.pages)
        stream.pages = list(kept.pages)
        stream.rows = kept.rows
        return stream

    def arrived(self, stream: Stream) -> bool:
        """Whether all of the stream's state is there."""
        if stream.arrival.arrived():
            stream.arrival = ARRIVED
        return stream.arrival is ARRIVED

    def rewind(self, stream: Stream, kept: KeptState) -> None:
        """Take the stream back to a state that was kept of it."""
        stream.arrival.precede()
        kept.arrival.precede()
        self._fill(stream, kept)
        self._share(kept.pages)
        self._release(stream.pages)
        stream.pages = list(kept.pages)
        stream.rows = kept.rows

    def drop(self, kept: KeptState) -> None:
        """Give up a kept state's share of its pages."""
        kept.arrival.precede()
        self._release(kept.pages)

    def pages_needed(self, stream: Stream, count: int) -> int:
        """How many free pages it takes to write rows [stream.rows, stream.rows + count)."""
        return self._missing_pages(stream, count) + len(self._shared_pages(stream))

    def reserve(self, stream: Stream, count: int) -> None:
        """Make sure that rows [stream.rows, stream.rows + count) can be written to pages of the stream's own."""
        stream.arrival.precede()
        needed = self.pages_needed(stream, count)
        if needed > len(self._free_pages):
            raise StateFullError(f"the key-value pages are full: {needed} needed, {len(self._free_pages)} free")
        for i in self._shared_pages(stream):
            stream.pages[i] = self._copy_page(stream.pages[i])
        stream.pages.extend(self._take_page() for _ in range(self._missing_pages(stream, count)))

    def _fill(self, stream: Stream, kept: KeptState) -> None:
        """Copy the kept recurrent state into the stream's slot."""
        for name, copy in kept.recurrent.items():
            self.ops.put_rows(self.recurrent[name], [stream.slot], copy)

    def _missing_pages(self, stream: Stream, count: int) -> int:
        return max(pages_for(stream.rows + count) - len(stream.pages), 0)

    def _shared_pages(self, stream: Stream) -> list[int]:
        """The places of the stream's pages that its next rows are written to and that others hold too."""
        # A forward completes the MTP head's row of the position before its first.
        first_written = (max(stream.rows - 1, 0) if "mtp" in self.caches else stream.rows) // PAGE_ROWS
        return [i for i in range(first_written, len(stream.pages)) if self._page_users[stream.pages[i]] > 1]

    def batch(self, plan: "Plan") -> Batch:
        """The plan's rows and where their streams' state lies; reserves the pages that it will write."""
        streams = [segment.stream for segment in plan.segments]
        for segment in plan.segments:
            self.reserve(segment.stream, len(segment.tokens))
        journal, journal_rows = self._open_journal(plan)
        return Batch(
            slots=np.array([stream.slot for stream in streams], dtype=np.int32),
            starts=plan.starts,
            first=np.array([stream.rows for stream in streams], dtype=np.int32),
            pages=page_table(streams),
            journal=journal,
            journal_rows=journal_rows,
        )

    def settle(self, stream: Stream, rows: int) -> None:
        """Keep the first `rows` rows (at least one) of the stream's journaled segment in the last forward.

        The state becomes what a forward of those rows alone leaves. Raises ValueError for rows that are not there.
        """
        segment = self._unsettled.get(stream.slot)
        if segment is None or not 1 <= rows <= segment.count:
            held = "no journaled segment" if segment is None else f"{segment.count} journaled rows"
            raise ValueError(f"cannot keep {rows} rows: the last forward left the stream {held}")
        if rows < segment.count:
            place = segment.place + rows - 1
            for name, pool in self.recurrent.items():
                self.ops.put_rows(pool, [stream.slot], self.journals[name][place : place + 1])
            stream.rows = segment.first + rows
        del self._unsettled[stream.slot]

    def hold(self, name: str, slots: Sequence[int]) -> None:
        """Copy what these slots have in a recurrent pool, for `put_back`."""
        _copy_rows(self.ops, self.recurrent[name], self._before[name], slots)

    def put_back(self, name: str, slots: Sequence[int]) -> None:
        """Give these slots of a recurrent pool what they had when they were held."""
        _copy_rows(self.ops, self._before[name], self.recurrent[name], slots)

    def export(self, stream: Stream) -> dict[str, np.ndarray]:
        """The whole state at the stream's row as host arrays: what defines its future, and nothing beyond."""
        stream.arrival.precede()
        arrays = {name: self.ops.to_host(self.ops.take_rows(p, [stream.slot]))[0] for name, p in self.recurrent.items()}
        for name, cache in self.caches.items():
            rows = max(stream.rows - 1, 0) if name == "mtp" else stream.rows
            arrays.update({f"{name}.{part}": array for part, array in self._export_cache(cache, stream, rows)})
        return arrays

    def digest(self, stream: Stream) -> str:
        """SHA-256 over the exported state: equal digests, equal futures."""
        digest = hashlib.sha256(str(stream.rows).encode())
        for name, array in sorted(self.export(stream).items()):
            digest.update(f"{name}{array.shape}{array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _open_journal(self, plan: "Plan") -> tuple[np.ndarray | None, int]:
        """Where the plan's journaled rows go, int32 [R] or None, and how many they are; a segment's last needs none."""
        self._unsettled.clear()
        if not any(segment.journal for segment in plan.segments):
            return None, 0
        places, used = [], 0
        for segment in plan.segments:
            count = len(segment.tokens)
            journaled = count - 1 if segment.journal else 0
            places += [*range(used, used + journaled), *[-1] * (count - journaled)]
            if segment.journal:
                self._unsettled[segment.stream.slot] = Unsettled(segment.stream.rows, count, used)
            used += journaled
        if used:
            self._grow_journals(used)
        return (np.array(places, dtype=np.int32), used) if used else (None, 0)

    @property
    def journals_id(self) -> int:
        """Changes when the journals' arrays are others."""
        return self._journals_made

    def _grow_journals(self, rows: int) -> None:
        for name, pool in self.recurrent.items():
            if name not in self.journals or len(self.journals[name]) < rows:
                self.journals[name] = self.ops.zeros((rows, *pool.shape[1:]), pool.dtype)
                self._journals_made += 1

    def _export_cache(self, cache: AttentionCache, stream: Stream, rows: int) -> Iterator[tuple[str, np.ndarray]]:
        counts = {"keys": rows, "values": rows, "index_raw": rows, "index_pooled": rows // self.index_block}
        for part, count in counts.items():
            paged = self.ops.to_host(self.ops.take_rows(getattr(cache, part), stream.pages))
            yield part, paged.reshape(-1, *paged.shape[2:])[:count]

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._page_users[page] = 1
        return page

    def _copy_page(self, source: int) -> int:
        page = self._take_page()
        try:
            for cache in self.caches.values():
                for pool in cache_pools(cache):
                    self.ops.put_rows(pool, [page], self.ops.take_rows(pool, [source]))
        except BaseException:
            self._release([page])
            raise
        self._release([source])
        return page

    def _share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._page_users[page] += 1

    def _release(self, pages) -> None:
        for page in pages:
            self._page_users[page] -= 1
            if self._page_users[page] == 0:
                self._free_pages.append(page)


def _copy_rows(ops: Any, source: Array, target: Array, rows: Sequence[int]) -> None:
    """Copy rows of one array to the same rows of another; takes no memory."""
    for row in rows:
        ops.put_rows(target, [row], source[row : row + 1])


def cache_pools(cache: AttentionCache) -> tuple[Array, ...]:
    """The paged pools of an attention layer."""
    return cache.keys, cache.values, cache.index_raw, cache.index_pooled


def pages_for(rows: int) -> int:
    """How many pages hold `rows` rows."""
    return -(-rows // PAGE_ROWS)


def page_table(streams: list[Stream]) -> np.ndarray:
    """int32 [S, P], the streams' pages in order, padded with page 0."""
    table = np.zeros((len(streams), max(len(stream.pages) for stream in streams)), dtype=np.int32)
    for i, stream in enumerate(streams):
        table[i, : len(stream.pages)] = stream.pages
    return table
