"""The prompt cache: kept states at rows of earlier prompts and replies, found by the tokens that lead to them."""

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from isobit.engine.host_tier import HostState, HostTier
from isobit.engine.page_ledger import PageLedger
from isobit.engine.radix import Node, RadixTree, Tokens, as_tokens
from isobit.engine.spill import SpillDamagedError, SpilledState, SpillStore
from isobit.model.kept import StateMismatchError, export_recurrent, export_rows, finished_pages, import_kept
from isobit.model.state import KeptState, StatePool, Stream, pages_for
from isobit.ops.batch import PAGE_ROWS

Kind = Literal["message", "prompt", "reply", "segment", "stored"]
Stored = HostState | SpilledState
NO_PAGES = np.empty(0, np.int64)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hit:
    """Where a prompt can go on: `kept` holds its first `rows` tokens.

    logits: float32 [vocabulary] of row `rows - 1`, read-only, when they were kept; always there when the hit is the
    whole prompt.
    """

    rows: int
    kept: KeptState
    logits: np.ndarray | None


@dataclass(frozen=True)
class CacheMetrics:
    """Counts since the start, but for entries, bytes and limits; rows_saved: those of all hits.

    nbytes: memory of the entries, a page that several share counted once. spilled, restored: states given to the disk
    and read back. spill_skipped: those that came faster than it took them. spill_entries, spill_nbytes: what lies there
    now. host_entries, host_nbytes: what lies in the host tier now. host_stored, host_hits: states given to it and taken
    from it; host_skipped: those that it had no memory for.
    """

    entries: int
    nbytes: int
    limit_bytes: int
    hits: int
    misses: int
    rows_saved: int
    evictions: int
    spilled: int
    restored: int
    spill_skipped: int
    spill_entries: int
    spill_nbytes: int
    host_entries: int
    host_nbytes: int
    host_limit_bytes: int
    host_stored: int
    host_hits: int
    host_skipped: int


@dataclass(eq=False)
class Entry:
    """A kept state in the cache. pages: int64, those of `kept`; used: the number of the lookup that last wanted it."""

    number: int
    kept: KeptState
    pages: np.ndarray
    logits: np.ndarray | None
    kind: Kind
    used: int
    hits: int = 0
    node: Node["Entry"] | None = None

    @property
    def unused_segment(self) -> bool:
        """Whether this is the end of a prompt's segment that no lookup has used."""
        return self.kind == "segment" and not self.hits

    @property
    def copied_nbytes(self) -> int:
        """Bytes beside the pages."""
        return self.kept.nbytes + _nbytes(self.logits)

    @property
    def rows_saved(self) -> int:
        """The rows that a prompt which goes on here would have to compute without this entry."""
        above = self.node.above() if self.node is not None else None
        return self.kept.rows - (0 if above is None else above.rows)


class PromptCache:
    """Kept states on the device up to `limit_bytes` (0: keeps nothing), below in host memory, and below that on disk.

    An entry's bytes are its copies of recurrent state, its logits, and its pages, of which a page that several entries
    share counts once. When there is no room, entries are evicted, least valuable first, to the host tier of
    `host_bytes` (0: there is none), whose own go to the spill store where there is one:

    1. segment ends that no lookup has used; so those of a long prompt thin out evenly until some serve
    2. all others

    each by value = rows saved * (1 + hits) / ((1 + age) * bytes), the older entry first among equals. Rows saved: those
    beyond the nearest kept row above. Age: the lookups since this entry's last use. Bytes: what its eviction frees. A
    new state takes the place of any other, but a segment end only that of unused segment ends.

    One thread uses a cache; `metrics` may be called from any.
    """

    def __init__(self, pool: StatePool, limit_bytes: int, spill: SpillStore | None = None, host_bytes: int = 0):
        self.pool = pool
        self.limit_bytes = limit_bytes
        self.spill = spill
        self.host = HostTier(pool, host_bytes, self._spill_stored) if host_bytes and limit_bytes else None
        self._page_nbytes, self._slot_nbytes = pool.page_nbytes, pool.slot_nbytes
        self._tree: RadixTree[Entry] = RadixTree()
        self._entries: dict[int, Entry] = {}
        self._ledger = PageLedger(pool.pages)
        self._copied_nbytes = 0
        self._numbers = 0
        self._lookups = 0
        self._handed_out: Entry | None = None
        self._in_use: Entry | None = None
        self._hits = self._rows_saved = self._evictions = self._spilled = self._restored = 0
        self._closing = self._hurried = False

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self._copied_nbytes + self._ledger.held * self._page_nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, tokens: Tokens) -> Hit | None:
        """The largest kept row within the prefix that a prompt shares with earlier ones, from below if need be.

        At least one row is left to compute, unless the last row's logits were kept too. The hit's entry is not evicted
        until the next lookup, or until `restore` or `release` is called with it.
        """
        if not self.limit_bytes:
            return None
        self._lookups += 1
        self._handed_out = None
        tokens = as_tokens(tokens)
        entry = self._find(tokens)
        if entry is None:
            return None
        self._handed_out = entry
        entry.used, entry.hits = self._lookups, entry.hits + 1
        self._hits += 1
        self._rows_saved += entry.kept.rows
        return Hit(entry.kept.rows, entry.kept, entry.logits)

    def kept_rows(self, tokens: Tokens) -> int:
        """The rows that a lookup would find, below too; it counts as no use."""
        tokens = as_tokens(tokens)
        entry = self._deepest(tokens)
        resident = 0 if entry is None else entry.kept.rows
        return max([resident, *(state.rows for _, state in self._stored_path(tokens, resident))])

    def restore(self, hit: Hit) -> Stream:
        """A new stream that goes on from a hit; raises StateFullError when every slot is taken."""
        stream = self.pool.restore(hit.kept)
        self.release(hit)
        return stream

    def release(self, hit: Hit) -> None:
        """Let the hit's entry be evicted again; `hit` must not be used any more."""
        if self._handed_out is not None and self._handed_out.kept is hit.kept:
            self._handed_out = None

    def keep(self, tokens: Tokens, stream: Stream, logits: np.ndarray | None = None, kind: Kind = "prompt") -> None:
        """Keep the stream's state at its row, under the first `stream.rows` of `tokens` (an int32 array costs least).

        logits: float32 [vocabulary] of the stream's last row; they are copied. Does nothing when that row is kept
        already, but for adding its logits, or when there is no room for it.
        """
        if not self.limit_bytes or not stream.rows:
            return
        tokens = as_tokens(tokens)[: stream.rows]
        if len(tokens) < stream.rows:
            raise ValueError(f"the stream is at row {stream.rows}, but only {len(tokens)} tokens are given")
        if logits is not None:
            logits = _read_only(np.array(logits))
        node = self._tree.find(tokens)
        if node is not None and node.value is not None:
            self._keep_again(node.value, logits, kind)
            return
        pages = np.array(stream.pages[: pages_for(stream.rows)], dtype=np.int64)
        make_room = self._replace_segments if kind == "segment" else self._make_room
        if make_room(self._slot_nbytes + _nbytes(logits), pages):
            self._add(tokens, self.pool.save(stream), logits, kind)

    def free_pages(self, count: int) -> bool:
        """Evict until the pool has `count` free pages; False, with nothing evicted, when that cannot be reached."""
        if self.pool.free_pages >= count:
            return True
        releasable = self._releasable_pages()
        if self.pool.free_pages + np.count_nonzero(releasable) < count:
            return False
        holders = [entry for entry in self._evictable() if releasable[entry.pages].any()]
        self._evict_while(holders, lambda: self.pool.free_pages < count)
        return True

    def evict_all(self) -> None:
        """Evict every entry that is not handed out from the device, the most valuable last."""
        self._evict_while(self._evictable(), lambda: True)

    def metrics(self) -> CacheMetrics:
        """A snapshot; safe from any thread."""
        return CacheMetrics(
            entries=len(self._entries),
            nbytes=self.nbytes,
            limit_bytes=self.limit_bytes,
            hits=self._hits,
            misses=self._lookups - self._hits,
            rows_saved=self._rows_saved,
            evictions=self._evictions,
            spilled=self._spilled,
            restored=self._restored,
            spill_skipped=0 if self.spill is None else self.spill.skipped,
            spill_entries=0 if self.spill is None else len(self.spill),
            spill_nbytes=0 if self.spill is None else self.spill.nbytes,
            host_entries=0 if self.host is None else len(self.host),
            host_nbytes=0 if self.host is None else self.host.nbytes,
            host_limit_bytes=0 if self.host is None else self.host.limit_bytes,
            host_stored=0 if self.host is None else self.host.stored,
            host_hits=0 if self.host is None else self.host.hits,
            host_skipped=0 if self.host is None else self.host.skipped,
        )

    def close(self) -> None:
        """Evict all entries, so that the spill store has them after a restart, and close it."""
        self._handed_out = None
        self._closing = True
        held = len(self._entries) + (0 if self.host is None else len(self.host))
        if self.spill is not None and self.spill.active and held:
            log.info("writing %d kept states to the spill folder %s", held, self.spill.folder)
        if self.host is not None:
            self.host.evict_while(lambda: not self._hurried)
            self.host.close()
        self._evict_while(self._evictable(), lambda: not self._hurried)
        if self.spill is not None:
            self.spill.close(drop=self._hurried)

    def hurry(self) -> None:
        """Have `close` drop what it has not written yet; safe from any thread."""
        self._hurried = True

    def _find(self, tokens: np.ndarray) -> Entry | None:
        """The entry of the most usable rows, taken from below when those on the device have fewer."""
        failed: set[Stored] = set()
        while True:
            resident = self._deepest(tokens)
            below = self._stored_path(tokens, 0 if resident is None else resident.kept.rows)
            found = next(((store, state) for store, state in below if state not in failed), None)
            if found is None:
                return resident
            store, state = found
            entry = self._read_back(store, state, tokens[: state.rows])
            if entry is not None:
                return entry
            failed.add(state)

    def _deepest(self, tokens: np.ndarray) -> Entry | None:
        entries = [node.value for node in self._tree.path(tokens) if node.value is not None]
        usable = (e for e in reversed(entries) if _usable(e.kept.rows, e.logits is not None, tokens))
        return next(usable, None)

    def _stored_path(self, tokens: np.ndarray, beyond: int) -> list[tuple[Any, Stored]]:
        """The usable states below at more rows than `beyond`, with their stores: most rows first, then the nearest."""
        stores = (self.host, self.spill) if self.limit_bytes else ()
        found = [(store, state) for store in stores if store is not None for state in store.path(tokens)]
        usable = [
            (store, state)
            for store, state in found
            if state.rows > beyond and _usable(state.rows, state.has_logits, tokens)
        ]
        return sorted(usable, key=lambda pair: -pair[1].rows)

    def _read_back(self, store: Any, state: Stored, tokens: np.ndarray) -> Entry | None:
        """Make a state of a store below an entry; None if there is no room for it, or if it is damaged."""
        with store.holding(state):
            shared = self._room_for(state, tokens)
        if shared is None:
            return None
        try:
            loaded = store.load(state, len(shared) * PAGE_ROWS)
            kept = import_kept(self.pool, state.rows, loaded.recurrent, loaded.pieces, shared, loaded.arrival)
        except SpillDamagedError:
            return None
        except self.pool.ops.copies.failures as error:
            log.warning("a kept state is not used, for there is no memory for it: %s", str(error).partition("\n")[0])
            return None
        except StateMismatchError as error:
            log.warning("a state from the spill folder is not used: %s", error)
            store.drop(state)
            return None
        self._restored += store is self.spill
        logits = None if loaded.logits is None else _read_only(loaded.logits)
        return self._add(tokens, kept, logits, "stored")

    def _room_for(self, state: Stored, tokens: np.ndarray) -> tuple[int, ...] | None:
        """Make room for a state from below; the first pages that it shares with an entry, or None if there is no room.

        Where there is no room beside that entry, it has to go too, and nothing is shared.
        """
        node, common = self._tree.nearest(tokens)
        donor = None if node is None else node.value
        pages = () if donor is None else donor.kept.pages[: finished_pages(common)]
        copied = self._slot_nbytes + state.logits_nbytes
        try:
            for self._in_use, shared in ((donor, pages), (None, ())):
                fresh = pages_for(state.rows) - len(shared)
                if self.free_pages(fresh) and self._make_room(copied, np.array(shared, np.int64), fresh):
                    return shared
        finally:
            self._in_use = None
        return None

    def _make_room(self, copied: int, pages: np.ndarray, fresh_pages: int = 0) -> bool:
        """Evict until an entry of `copied` bytes, `pages` and others that are new fits; False if that cannot be."""
        if copied + (len(pages) + fresh_pages) * self._page_nbytes > self.limit_bytes:
            return False
        self._evict_while(self._evictable(), lambda: self._excess(copied, pages, fresh_pages) > 0)
        return self._excess(copied, pages, fresh_pages) <= 0

    def _replace_segments(self, copied: int, pages: np.ndarray) -> bool:
        """As `_make_room`, at the cost of unused segment ends alone; evicts none of them in vain."""
        if self._excess(copied, pages) <= 0:
            return True
        segments = [entry for entry in self._evictable() if entry.unused_segment]
        users = self._ledger.users()
        for entry in segments:
            users[entry.pages] -= 1
        users[pages] += 1
        left = self._copied_nbytes + copied - sum(entry.copied_nbytes for entry in segments)
        if left + np.count_nonzero(users) * self._page_nbytes > self.limit_bytes:
            return False
        self._evict_while(segments, lambda: self._excess(copied, pages) > 0)
        return True

    def _excess(self, copied: int, pages: np.ndarray, fresh_pages: int = 0) -> int:
        """The bytes above the limit with an entry of `copied` bytes, `pages` and others that are new."""
        added = copied + (self._ledger.count_new(pages) + fresh_pages) * self._page_nbytes
        return self.nbytes + added - self.limit_bytes

    def _evict_while(self, entries: list[Entry], wanted: Callable[[], bool]) -> None:
        """Evict the least valuable of `entries`, one by one, while `wanted()` says so."""
        if not wanted():
            return
        heap = [(self._rank(entry), entry) for entry in entries]
        heapq.heapify(heap)
        numbers = {entry.number for entry in entries}
        while heap and wanted():
            rank, entry = heapq.heappop(heap)
            if entry.number not in self._entries:
                continue
            if rank != self._rank(entry):
                heapq.heappush(heap, (self._rank(entry), entry))
                continue
            # Whose pages are no longer shared is worth less now; the others' ranks are corrected when they come up.
            for number in numbers.intersection(self._evict(entry)):
                heapq.heappush(heap, (self._rank(self._entries[number]), self._entries[number]))

    def _rank(self, entry: Entry) -> tuple[bool, float, int]:
        """What goes first, by the class's order."""
        nbytes = entry.copied_nbytes + self._ledger.exclusive(entry.number) * self._page_nbytes
        age = self._lookups - entry.used
        value = entry.rows_saved * (1 + entry.hits) / ((1 + age) * nbytes)
        return not entry.unused_segment, value, entry.number

    def _evictable(self) -> list[Entry]:
        fixed = (self._handed_out, self._in_use)
        return [entry for entry in self._entries.values() if entry not in fixed]

    def _releasable_pages(self) -> np.ndarray:
        """bool [pages], those that only entries hold which may go."""
        held = self._ledger.users()
        releasable = (held > 0) & (held == self.pool.page_users())
        for entry in (self._handed_out, self._in_use):
            if entry is not None:
                releasable[entry.pages] = False
        return releasable

    def _add(self, tokens: np.ndarray, kept: KeptState, logits: np.ndarray | None, kind: Kind) -> Entry:
        """A new entry, in the place of one of the same tokens."""
        node = self._tree.find(tokens)
        if node is not None and node.value is not None:
            self._drop(node.value)
        self._numbers += 1
        pages = np.array(kept.pages, dtype=np.int64)
        entry = Entry(self._numbers, kept, pages, logits, kind, self._lookups)
        entry.node = self._tree.insert(tokens, entry)
        self._entries[entry.number] = entry
        self._ledger.add(entry.number, pages)
        self._copied_nbytes += entry.copied_nbytes
        return entry

    def _keep_again(self, entry: Entry, logits: np.ndarray | None, kind: Kind) -> None:
        entry.used = self._lookups
        if kind != "segment":
            entry.kind = kind
        if entry.logits is not None or logits is None:
            return
        self._in_use = entry
        if self._make_room(logits.nbytes, NO_PAGES):
            entry.logits = logits
            self._copied_nbytes += logits.nbytes
        self._in_use = None

    def _evict(self, entry: Entry) -> list[int]:
        """Drop an entry, to a tier below if it is worth it; the numbers of those that hold pages alone since then."""
        if not (entry.unused_segment or self._put_below(entry)) and self.spill is not None and self.spill.active:
            self._spilled += self._spill_entry(entry, self.spill)
        self._evictions += 1
        return self._drop(entry)

    def _drop(self, entry: Entry) -> list[int]:
        assert entry.node is not None
        self._tree.remove(entry.node)
        del self._entries[entry.number]
        self._copied_nbytes -= entry.copied_nbytes
        self.pool.drop(entry.kept)
        return self._ledger.drop(entry.number, entry.pages)

    def _put_below(self, entry: Entry) -> bool:
        """Whether the host tier has the entry's state now."""
        if self.host is None or self._closing:
            return False
        assert entry.node is not None
        return self.host.put(entry.node.tokens(), entry.kept, entry.logits, entry.hits)

    def _spill_entry(self, entry: Entry, spill: SpillStore) -> bool:
        assert entry.node is not None
        kept = entry.kept
        return spill.put(
            entry.node.tokens(),
            lambda: export_recurrent(self.pool, kept),
            lambda first, last: export_rows(self.pool, kept, first, last),
            entry.copied_nbytes + len(kept.pages) * self._page_nbytes,
            entry.logits,
            wait=self._closing,
        )

    def _spill_stored(self, state: HostState) -> None:
        """Give the disk a state that leaves the host tier."""
        if self.spill is None or not self.spill.active:
            return
        assert state.node is not None
        self._spilled += self.spill.put(
            state.node.tokens(),
            lambda: state.recurrent,
            state.rows_of,
            state.whole_nbytes,
            state.logits,
            wait=self._closing,
        )


def _usable(rows: int, has_logits: bool, tokens: np.ndarray) -> bool:
    """Whether a prompt can go on from a kept row: a row is left to compute, or the last one's logits are there."""
    return rows < len(tokens) or has_logits


def _nbytes(array: np.ndarray | None) -> int:
    return 0 if array is None else array.nbytes


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
