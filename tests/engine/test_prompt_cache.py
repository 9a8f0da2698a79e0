"""The prompt cache against what it holds: hits, budget, evictions, pages, and the bytes of restored states."""

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.engine import spill as spill_module
from isobit.engine import spill_writer
from isobit.engine.prompt_cache import PromptCache
from isobit.engine.spill import SpillStore
from isobit.model.plan import Plan, Segment
from tests.engine.tiny_state import VOCABULARY, digest_after, feed, logits_after, tiny_pool
from tests.model.runs import run, serially

AMPLE = 1 << 30
KINDS = ("message", "prompt", "reply", "segment")
BASE = np.random.default_rng(1).integers(0, 2, 200).tolist()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Rows files of one page, so that short states have several."""
    monkeypatch.setattr(spill_module, "CHUNK_ROWS", 64)


def entry_nbytes(pool, rows: int, with_logits: bool = False) -> int:
    return pool.slot_nbytes + -(-rows // 64) * pool.page_nbytes + 4 * VOCABULARY * with_logits


def keep(cache, tokens, kind="prompt", with_logits=False) -> None:
    """Compute `tokens` from the start and keep their state."""
    stream = cache.pool.open()
    feed(cache.pool, stream, tokens)
    cache.keep(tokens, stream, logits_after(tokens) if with_logits else None, kind)
    cache.pool.close(stream)


def assert_restores(cache, tokens) -> None:
    """An entry's state is that of its tokens, whatever was written since."""
    stream = cache.pool.restore(cache._tree.find(tokens).value.kept)
    assert cache.pool.digest(stream) == digest_after(tokens)
    cache.pool.close(stream)


def resident(cache) -> dict[tuple[int, ...], bool]:
    """The sequences in memory, and whether their last logits are there."""
    return {tuple(node.tokens().tolist()): node.value.logits is not None for node in cache._tree}


def spilled(cache) -> dict[tuple[int, ...], bool]:
    return {tuple(node.tokens().tolist()): node.value.has_logits for node in cache.spill._tree}


def true_rows(held: dict[tuple[int, ...], bool], tokens) -> int:
    """The largest kept row within the prefix that `tokens` share with what is held."""
    usable = [
        len(kept)
        for kept, with_logits in held.items()
        if tuple(tokens[: len(kept)]) == kept and (len(kept) < len(tokens) or with_logits)
    ]
    return max(usable, default=0)


@st.composite
def prompts(draw, most_rows: int = 200) -> list[int]:
    """Prompts that share prefixes: the base up to some row, then a few tokens of their own."""
    shared = draw(st.one_of(st.integers(0, most_rows), st.sampled_from([1, 63, 64, 65, 127, 128, 129])))
    own = draw(st.lists(st.integers(0, 1), max_size=3))
    return [*BASE[: min(shared, most_rows)], *own] or [0]


class Serving:
    """A server's use of a cache: each prompt resumes where it can, keeps states, and gives its pages back."""

    def __init__(self, cache: PromptCache):
        self.cache = cache

    def serve(self, tokens, cuts, kinds, with_logits, largest: int) -> None:
        cache, pool = self.cache, self.cache.pool
        hit = cache.lookup(tokens)
        assert (0 if hit is None else hit.rows) == largest
        stream = pool.open() if hit is None else cache.restore(hit)
        if hit is not None:
            assert pool.digest(stream) == digest_after(tokens[: hit.rows])
            assert hit.rows < len(tokens) or hit.logits is not None
            if hit.logits is not None:
                assert hit.logits.tobytes() == logits_after(tokens[: hit.rows]).tobytes()
        for end, kind in zip([*sorted(c for c in cuts if c < len(tokens)), len(tokens)], kinds, strict=False):
            if end <= stream.rows:
                continue
            needed = -(-end // 64) - len(stream.pages) + 2
            assert cache.free_pages(needed)
            feed(pool, stream, tokens[:end])
            cache.keep(tokens, stream, logits_after(tokens[:end]) if with_logits else None, kind)
            assert cache.nbytes <= cache.limit_bytes
        assert pool.digest(stream) == digest_after(tokens)
        pool.close(stream)

    def check(self) -> None:
        """The cache's books agree with what it holds."""
        entries = [node.value for node in self.cache._tree]
        pages = {page for entry in entries for page in entry.kept.pages}
        copies = sum(entry.copied_nbytes for entry in entries)
        assert self.cache.nbytes == copies + len(pages) * self.cache.pool.page_nbytes
        assert self.cache.pool.free_pages == self.cache.pool.pages - len(pages)
        for entry in entries:
            others = {page for other in entries if other is not entry for page in other.kept.pages}
            assert self.cache._ledger.exclusive(entry.number) == len(set(entry.kept.pages) - others)


requests = st.lists(
    st.tuples(prompts(), st.sets(st.integers(1, 200), max_size=3), st.permutations(KINDS), st.booleans()),
    min_size=1,
    max_size=5,
)
EXAMPLES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


@settings(max_examples=25, **EXAMPLES)
@given(requests=requests)
def test_lookups_give_the_largest_row_ever_kept_when_there_is_room(requests):
    cache = PromptCache(tiny_pool(pages=150), AMPLE)
    serving = Serving(cache)
    kept: dict[tuple[int, ...], bool] = {}
    for tokens, cuts, kinds, with_logits in requests:
        start = true_rows(kept, tokens)
        serving.serve(tokens, cuts, kinds, with_logits, start)
        ends = [*sorted(c for c in cuts if c < len(tokens)), len(tokens)][: len(kinds)]
        for end in (end for end in ends if end > start):
            kept[tuple(tokens[:end])] = kept.get(tuple(tokens[:end]), False) or with_logits
    serving.check()
    assert resident(cache) == kept
    metrics = cache.metrics()
    assert (metrics.entries, metrics.evictions) == (len(kept), 0)
    assert metrics.hits + metrics.misses == len(requests)
    cache.close()
    assert (cache.nbytes, cache.pool.free_pages) == (0, cache.pool.pages)


@settings(max_examples=30, **EXAMPLES)
@given(
    requests=requests,
    entries=st.integers(1, 5),
    pages=st.integers(10, 16),
    spilled_entries=st.integers(0, 6),
    restarts=st.sets(st.integers(0, 5)),
    evictions=st.sets(st.integers(0, 5)),
    flushes=st.sets(st.integers(0, 5)),
)
def test_budgets_hold_and_evicted_states_come_back_the_same(
    tmp_path_factory, requests, entries, pages, spilled_entries, restarts, evictions, flushes
):
    """With few pages, little memory and a small disk, any lookup finds the largest row that is held anywhere."""
    folder = tmp_path_factory.mktemp("spill")
    pool = tiny_pool(pages=pages)
    limit, disk_limit = entries * entry_nbytes(pool, 200), spilled_entries * (entry_nbytes(pool, 200) + 10_000)
    cache = PromptCache(pool, limit, SpillStore(folder, disk_limit, "checkpoint"))
    for number, (tokens, cuts, kinds, with_logits) in enumerate(requests):
        largest = max(true_rows(held, tokens) for held in (resident(cache), spilled(cache)))
        assert cache.kept_rows(tokens) == largest
        Serving(cache).serve(tokens, cuts, kinds, with_logits, largest)
        Serving(cache).check()
        assert cache.spill.nbytes <= disk_limit
        if number in flushes:
            assert_all_is_written(cache.spill)
        for tokens in [*resident(cache)] if number % 2 else []:
            assert_restores(cache, tokens)
        if number in evictions:
            cache.evict_all()
        if number in restarts:
            before = {**resident(cache), **spilled(cache)}
            assert_all_is_written(cache.spill)
            cache.close()
            assert pool.free_pages == pool.pages
            cache = PromptCache(pool, limit, SpillStore(folder, disk_limit, "checkpoint"))
            assert set(spilled(cache)) <= set(before)
    assert_all_is_written(cache.spill)
    cache.close()
    assert (pool.free_pages, pool.free_slots) == (pages, 3)


def assert_all_is_written(spill: SpillStore) -> None:
    """What the store counts is what lies on disk, once it is there."""
    spill.flush()
    assert sum(path.stat().st_size for path in spill.folder.glob("*.safetensors")) == spill.nbytes <= spill.limit_bytes


def test_a_prompt_resumes_inside_a_message_at_the_last_kept_row():
    cache = PromptCache(tiny_pool(), AMPLE)
    keep(cache, BASE[:40], "message")
    keep(cache, BASE[:90], "message", with_logits=True)
    assert cache.lookup([*BASE[:89], 7, 7]).rows == 40
    assert cache.lookup([*BASE[:90], 7]).rows == 90
    assert cache.lookup(BASE[:90]).rows == 90
    assert cache.lookup(BASE[:40]) is None
    assert cache.lookup([7]) is None
    metrics = cache.metrics()
    assert (metrics.hits, metrics.misses, metrics.rows_saved) == (3, 2, 220)


def test_logits_that_come_later_are_added_and_cannot_be_changed():
    cache = PromptCache(tiny_pool(), AMPLE)
    keep(cache, BASE[:10])
    assert cache.lookup(BASE[:10]) is None
    before = cache.nbytes
    keep(cache, BASE[:10], with_logits=True)
    hit = cache.lookup(BASE[:10])
    assert hit.logits.tobytes() == logits_after(BASE[:10]).tobytes()
    assert (len(cache), cache.nbytes) == (1, before + hit.logits.nbytes)
    with pytest.raises(ValueError, match="read-only"):
        hit.logits[0] = 0


def test_logits_on_disk_are_found_for_a_row_that_is_in_memory_without_them(tmp_path):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:70], with_logits=True)
    cache.evict_all()
    keep(cache, BASE[:70])
    assert cache.lookup(BASE[:70]).logits.tobytes() == logits_after(BASE[:70]).tobytes()
    assert (len(cache), len(cache._tree.path(BASE))) == (1, 1)
    Serving(cache).check()
    assert_restores(cache, BASE[:70])


def test_a_limit_of_zero_keeps_nothing():
    cache = PromptCache(tiny_pool(), 0)
    keep(cache, BASE[:10], with_logits=True)
    assert (len(cache), cache.lookup(BASE[:10]), cache.kept_rows(BASE)) == (0, None, 0)
    assert cache.pool.free_pages == cache.pool.pages


def test_pages_that_entries_share_count_once():
    cache = PromptCache(tiny_pool(), AMPLE)
    pool = cache.pool
    stream = pool.open()
    for end in (128, 150, 192):
        feed(pool, stream, BASE[:end])
        cache.keep(BASE, stream)
    # The rows 0 to 126 are shared by all; the states at 128 and 150 keep the pages that the stream has written since.
    assert cache.nbytes == 3 * pool.slot_nbytes + (3 + 2) * pool.page_nbytes
    pool.close(stream)
    Serving(cache).check()


def test_too_few_tokens_for_the_stream_are_refused():
    pool = tiny_pool()
    stream = pool.open()
    feed(pool, stream, BASE[:9])
    with pytest.raises(ValueError, match="at row 9, but only 8 tokens"):
        PromptCache(pool, AMPLE).keep(BASE[:8], stream)


def unrelated(first: int, rows: int) -> list[int]:
    return [first, *BASE[: rows - 1]]


def roomy_for(count: int, rows: int = 30) -> PromptCache:
    pool = tiny_pool()
    return PromptCache(pool, count * entry_nbytes(pool, rows))


def rows_held(cache) -> set[tuple[int, int]]:
    """(first token, rows) of the entries."""
    return {(tokens[0], len(tokens)) for tokens in resident(cache)}


def test_the_fewest_rows_saved_go_first():
    cache = roomy_for(2)
    for first, rows in ((10, 60), (11, 20), (12, 40)):
        keep(cache, unrelated(first, rows))
    assert rows_held(cache) == {(10, 60), (12, 40)}


def test_rows_saved_count_from_the_kept_row_above():
    cache = roomy_for(3)
    keep(cache, unrelated(10, 60))
    keep(cache, unrelated(10, 62))
    keep(cache, unrelated(11, 20))
    keep(cache, unrelated(12, 20))
    assert rows_held(cache) == {(10, 60), (11, 20), (12, 20)}


def test_hits_count_against_rows():
    cache = roomy_for(2)
    keep(cache, unrelated(10, 30))
    for _ in range(3):
        cache.release(cache.lookup([*unrelated(10, 30), 7]))
    keep(cache, unrelated(11, 60))
    keep(cache, unrelated(12, 30))
    assert rows_held(cache) == {(10, 30), (12, 30)}


def test_age_counts_against_hits():
    cache = roomy_for(2)
    keep(cache, unrelated(10, 60))
    for _ in range(3):
        assert cache.lookup([*unrelated(10, 60), 7]).rows == 60
    for _ in range(20):
        assert cache.lookup([7]) is None
    keep(cache, unrelated(11, 30))
    keep(cache, unrelated(12, 30))
    assert rows_held(cache) == {(11, 30), (12, 30)}


def test_unused_segment_ends_go_before_anything_else_and_push_nothing_else_out():
    cache = roomy_for(3)
    keep(cache, unrelated(10, 60), "segment")
    keep(cache, unrelated(11, 60), "segment")
    assert cache.lookup([*unrelated(11, 60), 7]).rows == 60
    keep(cache, unrelated(12, 5), "message")
    keep(cache, unrelated(13, 5), "message")
    assert rows_held(cache) == {(11, 60), (12, 5), (13, 5)}
    keep(cache, unrelated(14, 60), "segment")
    assert rows_held(cache) == {(11, 60), (12, 5), (13, 5)}


def test_the_segment_ends_of_a_long_prompt_thin_out_evenly():
    pool = tiny_pool(pages=40)
    cache = PromptCache(pool, 5 * pool.slot_nbytes + 8 * pool.page_nbytes)
    stream = pool.open()
    for end in range(10, 201, 10):
        feed(pool, stream, BASE[:end])
        cache.keep(BASE, stream, kind="segment")
    pool.close(stream)
    rows = sorted(rows for _, rows in rows_held(cache))
    gaps = np.diff([0, *rows])
    assert rows[-1] == 200
    assert len(rows) == 5
    assert gaps.max() <= 80


def test_a_kept_segment_end_that_is_a_message_border_too_counts_as_one():
    cache = roomy_for(2)
    keep(cache, unrelated(10, 30), "segment")
    keep(cache, unrelated(10, 30), "message")
    keep(cache, unrelated(11, 20), "message")
    keep(cache, unrelated(12, 60), "segment")
    assert rows_held(cache) == {(10, 30), (11, 20)}


def test_what_a_lookup_handed_out_stays_until_it_is_restored():
    cache = roomy_for(1)
    keep(cache, unrelated(10, 30))
    hit = cache.lookup([*unrelated(10, 30), 7])
    keep(cache, unrelated(11, 60))
    assert not cache.free_pages(cache.pool.pages)
    cache.evict_all()
    assert rows_held(cache) == {(10, 30)}
    stream = cache.restore(hit)
    assert cache.pool.digest(stream) == digest_after(unrelated(10, 30))
    cache.pool.close(stream)
    assert cache.free_pages(cache.pool.pages)
    assert len(cache) == 0


def test_the_next_lookup_or_a_release_lets_go_as_well():
    cache = roomy_for(1)
    for let_go in (cache.release, lambda hit: cache.lookup([7])):
        keep(cache, unrelated(10, 30))
        let_go(cache.lookup([*unrelated(10, 30), 7]))
        assert cache.free_pages(cache.pool.pages)


def test_what_is_larger_than_the_limit_is_not_kept_and_pushes_nothing_out():
    cache = roomy_for(1)
    keep(cache, unrelated(10, 30))
    keep(cache, unrelated(11, 150))
    assert rows_held(cache) == {(10, 30)}


def test_free_pages_evicts_only_where_it_helps():
    cache = PromptCache(tiny_pool(pages=8), AMPLE)
    pool = cache.pool
    keep(cache, unrelated(10, 150))
    stream = pool.open()
    feed(pool, stream, unrelated(11, 60))
    cache.keep(unrelated(11, 60), stream)  # of little value, but its page is the stream's too
    assert pool.free_pages == 4
    assert not cache.free_pages(8)
    assert len(cache) == 2
    assert cache.free_pages(5)
    assert rows_held(cache) == {(11, 60)}
    assert pool.free_pages == 7
    pool.close(stream)
    cache.close()
    assert pool.free_pages == 8


def test_a_thousand_entries_stay_cheap():
    """Every keep evicts: a scan of the entries, no walk over their pages or tokens."""
    pool = tiny_pool(pages=1100)
    cache = PromptCache(pool, 1000 * entry_nbytes(pool, 64))
    stream = pool.open()
    feed(pool, stream, BASE[:64])
    for number in range(1100):
        cache.keep([number, *BASE[1:64]], stream)
    assert len(cache) >= 1000
    pool.close(stream)
    assert cache.free_pages(1100)
    cache.close()


def test_without_logits_a_whole_prompt_on_disk_gives_the_row_before(tmp_path):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:70])
    keep(cache, BASE[:90])
    cache.evict_all()
    assert cache.kept_rows(BASE[:90]) == cache.lookup(BASE[:90]).rows == 70
    assert cache.metrics().restored == 1


def test_states_read_back_share_pages_with_those_in_memory(tmp_path):
    pool = tiny_pool()
    cache = PromptCache(pool, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:150])
    cache.evict_all()
    keep(cache, [*BASE[:140], 7, 7])
    free = pool.free_pages
    hit = cache.lookup([*BASE[:150], 7])
    assert hit.rows == 150
    assert pool.free_pages == free - 1
    cache.release(hit)
    donor = cache._tree.find([*BASE[:140], 7, 7]).value
    cache._evict(donor)
    keep(cache, unrelated(9, 200))
    assert_restores(cache, BASE[:150])
    Serving(cache).check()


@pytest.mark.parametrize("other_in_memory", [True, False])
@pytest.mark.parametrize("shared", [63, 64, 65, 128])
def test_a_shared_page_ends_before_the_row_that_the_next_token_completes(tmp_path, shared, other_in_memory):
    """The MTP head's row i needs token i + 1: prompts that part there share nothing from row i on."""
    pool = tiny_pool()
    cache = PromptCache(pool, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    one, other = ([*BASE[:shared], token, *BASE[:70]] for token in (8, 9))
    keep(cache, one)
    cache.evict_all()
    keep(cache, other)
    if not other_in_memory:
        cache.evict_all()
    for tokens in (one, other):
        assert pool.digest(cache.restore(cache.lookup([*tokens, 7]))) == digest_after(tokens)


@pytest.mark.parametrize("room", ["beside the other", "for one"])
def test_room_for_a_state_on_disk_is_made_without_what_gives_it_pages(tmp_path, room):
    """The entry with the same beginning stays while there is room beside it; otherwise it makes room itself."""
    pool = tiny_pool()
    beside = 2 * pool.slot_nbytes + 4 * pool.page_nbytes
    limit = beside if room == "beside the other" else pool.slot_nbytes + 3 * pool.page_nbytes
    cache = PromptCache(pool, limit, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:150])
    cache.evict_all()
    keep(cache, [*BASE[:140], 7])
    if room == "beside the other":
        keep(cache, unrelated(9, 40))
        cache._tree.find(unrelated(9, 40)).value.hits = 1000  # so that the other one is the least valuable
        cache.limit_bytes += pool.page_nbytes - 1
    hit = cache.lookup([*BASE[:150], 7])
    assert hit.rows == 150
    held = {(0, 150), (0, 141)} if room == "beside the other" else {(0, 150)}
    assert rows_held(cache) == held
    cache.release(hit)
    for tokens in resident(cache):
        assert_restores(cache, tokens)
    Serving(cache).check()


@pytest.mark.parametrize("kind", ["state", "rows"])
def test_a_damaged_state_is_a_miss_and_what_is_whole_is_found_instead(tmp_path, caplog, kind):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:50])
    cache.evict_all()
    cache.spill.flush()
    (whole,) = tmp_path.glob("*.state.*")
    keep(cache, BASE[:150])
    cache.evict_all()
    cache.spill.flush()
    damaged = next(path for path in tmp_path.glob(f"*.{kind}.*") if path != whole)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    hit = cache.lookup(BASE)
    assert hit.rows == 50
    assert cache.pool.free_pages == cache.pool.pages - 1
    assert cache.pool.digest(cache.restore(hit)) == digest_after(BASE[:50])
    assert "damaged" in caplog.text
    assert list(tmp_path.glob("*.safetensors")) == [whole]


def test_a_state_of_another_shape_is_not_taken(tmp_path, caplog):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:50])
    cache.close()
    other = tiny_pool()
    other.recurrent["a.conv"] = np.zeros((3, 2, 4), np.float32)
    cache = PromptCache(other, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    assert cache.lookup(BASE) is None
    assert "float32 [2, 3] for a.conv, this model float32 [2, 4]" in caplog.text
    assert (other.free_pages, len(cache.spill)) == (other.pages, 0)


def test_unused_segment_ends_are_not_written_to_disk(tmp_path):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:50], "segment")
    keep(cache, BASE[:60], "message")
    cache.evict_all()
    assert {len(tokens) for tokens in spilled(cache)} == {60}


def test_a_disk_that_stands_still_stops_no_eviction_and_no_lookup(tmp_path, monkeypatch):
    disk = threading.Event()
    write = spill_writer.write_tensors
    monkeypatch.setattr(spill_writer, "write_tensors", lambda *given, **named: disk.wait(60) and write(*given, **named))
    pool = tiny_pool()
    store = SpillStore(tmp_path, AMPLE, "checkpoint", queue_bytes=2 * entry_nbytes(pool, 200))
    cache = PromptCache(pool, AMPLE, store)
    for first in range(6):
        keep(cache, [first, *BASE[:120]], with_logits=True)
        cache.evict_all()
    assert pool.free_pages == pool.pages
    metrics = cache.metrics()
    assert metrics.spilled + metrics.spill_skipped == 6
    assert min(metrics.spilled, metrics.spill_skipped) >= 1
    assert list(tmp_path.glob("*.safetensors")) == []
    assert cache.lookup([0, *BASE[:120], 5]).rows == 121
    assert_restores(cache, [0, *BASE[:120]])
    disk.set()
    cache.close()
    assert len(SpillStore(tmp_path, AMPLE, "checkpoint")) == metrics.spilled


def test_a_close_in_a_hurry_writes_no_more(tmp_path):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    keep(cache, BASE[:50])
    cache.hurry()
    cache.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_the_model_goes_on_from_disk_as_if_nothing_had_happened(model, tmp_path, rows):
    tokens = np.random.default_rng(rows).integers(0, model.config.vocab_size, rows + 12).tolist()
    expected, digests = serially(model, tokens)
    state = model.new_state(slots=1, pages=8)
    stream = state.open()
    logits = model.forward(state, Plan((Segment(stream, tuple(tokens[:rows])),)))[0]
    cache = PromptCache(state, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    cache.keep(tokens, stream, logits)
    state.close(stream)
    cache.close()
    assert state.free_pages == 8

    restarted = model.new_state(slots=1, pages=8)
    cache = PromptCache(restarted, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"))
    hit = cache.lookup(tokens[:rows])
    assert hit.rows == rows
    assert hit.logits.tobytes() == logits.tobytes() == expected[rows - 1].tobytes()
    for _ in range(2):
        stream = restarted.restore(hit.kept)
        assert restarted.digest(stream) == digests[rows - 1]
        assert run(model, restarted, stream, tokens[rows:], (5,)).tobytes() == expected[rows:].tobytes()
        assert restarted.digest(stream) == digests[-1]
        restarted.close(stream)
