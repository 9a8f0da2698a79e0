"""The tiers of the prompt cache, device, host and disk: what comes back is what went, within each budget."""

import contextlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.engine import spill as spill_module
from isobit.engine.host_memory import ALIGNMENT
from isobit.engine.host_tier import HostTier
from isobit.engine.prompt_cache import PromptCache
from isobit.engine.spill import SpillStore
from isobit.model.kept import export_rows
from isobit.model.state import StateFullError, StatePool, cache_pools
from isobit.ops import load_ops
from isobit.ops.batch import AttentionCache
from isobit.ops.copies import Copies
from tests.engine.delayed_copies import delay_copies
from tests.engine.test_prompt_cache import (
    AMPLE,
    BASE,
    KINDS,
    Serving,
    assert_all_is_written,
    entry_nbytes,
    keep,
    prompts,
    resident,
    spilled,
    true_rows,
    unrelated,
)
from tests.engine.tiny_state import digest_after, feed, logits_after, tiny_pool

ROOMY = 1 << 20


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(spill_module, "CHUNK_ROWS", 64)


def hosted(cache) -> dict[tuple[int, ...], bool]:
    return {tuple(node.tokens().tolist()): node.value.has_logits for node in cache.host._tree}


def check_host(cache) -> None:
    """The tier's books agree with what it holds, and what it holds with the memory that is taken."""
    host = cache.host
    states = [node.value for node in host._tree]
    chunks = {id(chunk): chunk for state in states for chunk in state.chunks}
    assert set(states) == host._states
    assert {id(node.value) for node in host._chunks} == set(chunks)
    for chunk in chunks.values():
        assert chunk.users == sum(chunk in state.chunks for state in states)
    arrays = [array for chunk in chunks.values() for array in chunk.piece.arrays.values()]
    for state in states:
        arrays += [*state.recurrent.values(), *state.tail.arrays.values()]
        arrays += [state.logits] if state.has_logits else []
        assert [piece.first for piece in state.pieces()] == list(range(0, state.rows + 1, 64))
    assert host.nbytes == sum(array.nbytes for array in arrays)
    assert host.memory.nbytes <= host.limit_bytes
    taken = sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)
    if cache.spill is None:
        assert host.memory.nbytes - host.memory.free_nbytes == taken


def evict_host(cache) -> None:
    cache.host.evict_while(lambda: True)


def assert_resumes(cache, tokens, rows: int) -> None:
    """A prompt that goes on behind `tokens` begins at `rows` of them, in the state that they lead to."""
    hit = cache.lookup([*tokens, 7])
    assert hit.rows == rows
    stream = cache.restore(hit)
    assert cache.pool.digest(stream) == digest_after(tokens[:rows])
    cache.pool.close(stream)


requests = st.lists(
    st.tuples(prompts(), st.sets(st.integers(1, 200), max_size=3), st.permutations(KINDS), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=requests,
    entries=st.integers(1, 4),
    pages=st.integers(10, 16),
    host_states=st.floats(0.3, 6),
    spilled_entries=st.sampled_from([None, 2, 6]),
    delayed=st.booleans(),
    evictions=st.sets(st.integers(0, 6)),
    host_evictions=st.sets(st.integers(0, 6)),
    restarts=st.sets(st.integers(0, 6), max_size=2),
    times=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=7, max_size=7),
)
def test_budgets_hold_in_every_tier_and_any_lookup_finds_the_largest_row(
    tmp_path_factory,
    requests,
    entries,
    pages,
    host_states,
    spilled_entries,
    delayed,
    evictions,
    host_evictions,
    restarts,
    times,
):
    """With little of everything, and copies that run late: states wander between the tiers and come back the same."""
    folder = tmp_path_factory.mktemp("spill")
    pool = tiny_pool(pages=pages)
    copies = delay_copies(pool) if delayed else None
    limit, host_limit = entries * entry_nbytes(pool, 200), int(host_states * entry_nbytes(pool, 200, with_logits=True))

    def open_cache():
        disk = spilled_entries and spilled_entries * (entry_nbytes(pool, 200) + 10_000)
        return PromptCache(pool, limit, SpillStore(folder, disk, "checkpoint") if disk else None, host_limit)

    cache = open_cache()
    for number, (tokens, cuts, kinds, with_logits) in enumerate(requests):
        below = [hosted(cache), *([spilled(cache)] if cache.spill else [])]
        largest = max(true_rows(held, tokens) for held in (resident(cache), *below))
        assert cache.kept_rows(tokens) == largest
        Serving(cache).serve(tokens, cuts, kinds, with_logits, largest)
        Serving(cache).check()
        check_host(cache)
        if copies is not None:
            copies.pass_time(*times[number])
        if number in evictions:
            cache.evict_all()
        if number in host_evictions:
            evict_host(cache)
        check_host(cache)
        if number in restarts:
            cache.close()
            assert (pool.free_pages, pool.free_slots) == (pages, 3)
            cache = open_cache()
    if cache.spill is not None:
        assert_all_is_written(cache.spill)
    host = cache.host
    cache.close()
    assert (host.nbytes, len(host), pool.free_pages, pool.free_slots) == (0, 0, pages, 3)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 150, 192, 200])
def test_a_state_goes_down_the_tiers_and_comes_back_from_each(tmp_path, rows, delayed):
    pool = tiny_pool()
    if delayed:
        delay_copies(pool)
    cache = PromptCache(pool, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"), ROOMY)
    tokens = BASE[:rows]
    keep(cache, tokens, with_logits=True)
    cache.evict_all()
    assert (len(cache), len(cache.host), len(cache.spill)) == (0, 1, 0)
    assert pool.free_pages == pool.pages
    keep(cache, unrelated(9, 190))  # where the state was, on the device
    assert_resumes(cache, tokens, rows)
    cache.evict_all()
    evict_host(cache)
    assert (len(cache), len(cache.host), len(cache.spill)) == (0, 0, 2)
    keep(cache, unrelated(8, 190))
    cache.evict_all()  # where the state was, in the host's memory
    assert_resumes(cache, tokens, rows)
    cache.evict_all()
    assert_resumes(cache, tokens, rows)
    assert cache.lookup(tokens).logits.tobytes() == logits_after(tokens).tobytes()
    metrics = cache.metrics()
    assert (metrics.host_stored, metrics.host_hits, metrics.spilled, metrics.restored) == (4, 2, 2, 1)
    assert (metrics.hits, metrics.rows_saved) == (4, 4 * rows)
    assert (metrics.host_entries, metrics.host_nbytes) == (2, cache.host.nbytes)
    check_host(cache)
    cache.close()
    restarted = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"), ROOMY)
    assert_resumes(restarted, tokens, rows)


def test_states_that_share_a_beginning_share_its_memory():
    cache = PromptCache(tiny_pool(pages=40), AMPLE, None, ROOMY)
    keep(cache, BASE[:150])
    cache.evict_all()
    alone = cache.host.nbytes
    keep(cache, [*BASE[:140], 7])
    cache.evict_all()
    chunks = [node.value for node in cache.host._chunks]
    assert sorted((chunk.piece.last, chunk.users) for chunk in chunks) == [(64, 2), (128, 2)]
    assert cache.host.nbytes - alone < alone / 2
    keep(cache, BASE[:150], with_logits=True)
    cache.evict_all()
    assert (len(cache.host), cache.metrics().host_stored) == (2, 2)
    assert cache.lookup(BASE[:150]).logits.tobytes() == logits_after(BASE[:150]).tobytes()
    cache.host.drop(cache.host.path(BASE[:150])[-1])
    check_host(cache)
    cache.evict_all()
    assert_resumes(cache, [*BASE[:140], 7], 141)
    check_host(cache)


def test_a_state_that_is_wanted_stays_while_others_are_touched():
    """Room for it is made on the device, by states whose logits then come to the host tier."""
    cache = PromptCache(tiny_pool(), AMPLE, None, 8192)
    for first in (10, 11):
        keep(cache, unrelated(first, 30))
        cache.evict_all()
    wanted, other = (cache.host.path(unrelated(first, 30))[0] for first in (10, 11))
    with cache.host.holding(wanted):
        with cache.host.holding(other):
            assert not cache.host._evict_one()
        cache.host.evict_while(lambda: True)
    del other
    assert {tokens[0] for tokens in hosted(cache)} == {10}
    check_host(cache)


def test_the_least_valuable_go_first():
    """Rows saved and hits count for a state, bytes and age against it."""
    cache = PromptCache(tiny_pool(), AMPLE, None, 4 * 4096)
    for first, rows in ((10, 60), (11, 20), (12, 40)):
        keep(cache, unrelated(first, rows))
        cache.evict_all()
    assert {(tokens[0], len(tokens)) for tokens in hosted(cache)} == {(10, 60), (11, 20), (12, 40)}
    for _ in range(3):
        assert_resumes(cache, unrelated(11, 20), 20)
        cache.evict_all()
    gone = []
    while hosted(cache):
        before = set(hosted(cache))
        cache.host._evict_one()
        gone += [tokens[0] for tokens in before - set(hosted(cache))]
    assert gone == [10, 12, 11]


def test_what_is_larger_than_the_tier_goes_to_disk_and_pushes_nothing_out(tmp_path):
    cache = PromptCache(tiny_pool(), AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint"), 4096)
    keep(cache, unrelated(10, 30))
    cache.evict_all()
    keep(cache, BASE[:200])
    cache.evict_all()
    assert [len(tokens) for tokens in hosted(cache)] == [30]
    assert [len(tokens) for tokens in spilled(cache)] == [200]
    assert (cache.metrics().host_skipped, cache.metrics().host_limit_bytes) == (1, 4096)
    assert_resumes(cache, BASE[:200], 200)


def test_without_memory_yet_states_go_where_they_went_before():
    """Memory that is still being sought evicts nothing and holds nobody up."""
    pool = tiny_pool()
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    cache.host.memory.take = lambda sizes: None
    keep(cache, BASE[:30])
    cache.evict_all()
    assert (len(cache), len(cache.host), cache.metrics().host_skipped) == (0, 0, 1)


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_device_without_memory_for_a_copy_keeps_its_books(failing):
    pool = tiny_pool()
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:100])
    download, calls = copies.download, []

    def short_of_memory(arrays, places):
        calls.append(arrays)
        if len(calls) == failing:
            raise MemoryError
        return download(arrays, places)

    copies.download = short_of_memory
    cache.evict_all()
    assert (len(cache), len(cache.host), pool.free_pages, cache.metrics().host_skipped) == (0, 0, pool.pages, 1)
    check_host(cache)
    keep(cache, BASE[:100])
    cache.evict_all()
    assert_resumes(cache, BASE[:100], 100)


def test_a_device_without_memory_for_a_state_computes_it_again(caplog):
    pool = tiny_pool()
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    for rows in (40, 100):
        keep(cache, BASE[:rows])
    cache.evict_all()
    zeros, calls = pool.ops.zeros, []

    def short_of_memory(shape, dtype):
        calls.append(shape)
        if len(calls) == 2:
            raise MemoryError
        return zeros(shape, dtype)

    pool.ops.zeros = short_of_memory
    assert_resumes(cache, BASE[:100], 40)
    assert pool.free_pages == pool.pages - 1
    assert "no memory for it" in caplog.text
    check_host(cache)
    assert_resumes(cache, BASE[:100], 100)


def test_nothing_is_kept_where_the_cache_keeps_nothing():
    cache = PromptCache(tiny_pool(), 0, None, ROOMY)
    assert cache.host is None
    assert cache.metrics().host_limit_bytes == 0


def test_a_failed_restoration_writes_to_no_page_that_is_someone_elses(tmp_path):
    pool = tiny_pool(pages=4)
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:150])
    cache.evict_all()
    (state,) = cache.host.path(BASE)
    state.tail.arrays.pop("mtp.values")
    assert cache.lookup(BASE) is None
    assert len(cache.host) == 0
    stream = pool.open()
    feed(pool, stream, unrelated(9, 200))
    copies.pass_time(99, 99)
    assert pool.digest(stream) == digest_after(unrelated(9, 200))


def test_a_lane_that_ends_before_its_state_is_there_leaves_slot_and_pages_clean():
    pool = tiny_pool(slots=2, pages=4)
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:150])
    cache.evict_all()
    stream = cache.restore(cache.lookup(BASE))
    assert not pool.arrived(stream)
    pool.close(stream)
    cache.evict_all()
    others = [pool.open(), pool.open()]
    with pytest.raises(StateFullError):
        pool.open()
    for number, other in enumerate(others):
        feed(pool, other, unrelated(number, 100))
    copies.pass_time(99, 99)
    for number, other in enumerate(others):
        assert pool.digest(other) == digest_after(unrelated(number, 100))


def test_one_restored_state_serves_several_streams_before_it_is_there():
    pool = tiny_pool(slots=3, pages=8)
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    for rows in (100, 150):
        keep(cache, BASE[:rows])
    cache.evict_all()
    first = cache.restore(cache.lookup(BASE[:101]))
    second = cache.restore(cache.lookup(BASE))  # its first page is the other's
    third = cache.restore(cache.lookup(BASE))
    assert (first.rows, second.rows, third.rows) == (100, 150, 150)
    assert second.pages[:1] == first.pages[:1]
    assert not any(pool.arrived(stream) for stream in (first, second, third))
    cache.evict_all()
    copies.pass_time(1, 0)
    for stream in (third, second, first):
        assert pool.digest(stream) == digest_after(BASE[: stream.rows])
        assert pool.arrived(stream)
    for one, other in pairwise((first, second, third)):
        feed(pool, one, [*BASE[: one.rows], 3, 3, 3])
        assert pool.digest(one) == digest_after([*BASE[: one.rows - 3], 3, 3, 3])
        assert pool.digest(other) == digest_after(BASE[: other.rows])


def restoring(rows: int = 150, slots: int = 3):
    """A cache that has just begun to take a state back from host memory, its hit, and its late copies."""
    pool = tiny_pool(slots=slots)
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:rows])
    cache.evict_all()
    hit = cache.lookup(BASE)
    assert not hit.kept.arrival.arrived()
    return cache, hit, copies


def test_an_entry_that_goes_before_it_is_there_leaves_its_pages_clean():
    cache, hit, copies = restoring()
    cache.release(hit)
    cache.evict_all()
    stream = cache.pool.open()
    feed(cache.pool, stream, unrelated(9, 200))
    copies.pass_time(99, 99)
    assert cache.pool.digest(stream) == digest_after(unrelated(9, 200))


def test_a_stream_can_be_kept_and_fed_before_it_is_there():
    cache, hit, copies = restoring()
    stream = cache.restore(hit)
    kept = cache.pool.save(stream)
    copies.pass_time(99, 99)
    assert cache.pool.digest(cache.pool.restore(kept)) == digest_after(BASE[:150])
    other, hit, copies = restoring()
    stream = other.restore(hit)
    feed(other.pool, stream, BASE[:180])
    copies.pass_time(99, 99)
    assert other.pool.digest(stream) == digest_after(BASE[:180])


def test_what_a_stream_is_filled_from_stays_until_it_is_there():
    cache, hit, copies = restoring()
    upload, kept_alive = copies.upload, []

    def noting(work, after, sources):
        kept_alive.append(sources)
        return upload(work, after, sources)

    copies.upload = noting
    cache.restore(hit)
    assert kept_alive == [hit.kept]


def test_an_entry_can_be_copied_to_the_host_again_before_it_is_there():
    cache, hit, copies = restoring()
    cache.release(hit)
    cache.host.drop(cache.host.path(BASE)[-1])
    cache.evict_all()
    assert (len(cache), len(cache.host)) == (0, 1)
    copies.pass_time(99, 99)
    assert_resumes(cache, BASE[:150], 150)


def test_host_memory_that_is_being_read_is_not_written():
    cache, hit, copies = restoring()
    cache.host.drop(cache.host.path(BASE)[-1])
    keep(cache, unrelated(9, 150), with_logits=True)
    cache._evict(cache._tree.find(unrelated(9, 150)).value)
    copies.pass_time(0, 99)
    assert cache.pool.digest(cache.restore(hit)) == digest_after(BASE[:150])


def test_host_memory_that_is_being_written_is_not_given_away():
    pool = tiny_pool()
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:200])
    cache.evict_all()
    cache.host.drop(cache.host.path(BASE)[-1])
    keep(cache, unrelated(9, 10), with_logits=True)
    cache.evict_all()
    copies.pass_time(99, 99)
    logits = cache.lookup(unrelated(9, 10)).logits
    assert logits.tobytes() == logits_after(unrelated(9, 10)).tobytes()


def test_a_state_that_goes_to_disk_at_once_is_whole():
    pool = tiny_pool()
    delay_copies(pool)
    seen = []

    def note(state):
        seen.append([{name: array.copy() for name, array in piece.arrays.items()} for piece in state.pieces()])

    tier = HostTier(pool, ROOMY, note)
    stream = pool.open()
    feed(pool, stream, BASE[:100])
    kept = pool.save(stream)
    expected = [export_rows(pool, kept, first, last) for first, last in ((0, 64), (64, 100))]
    assert tier.put(BASE[:100], kept)
    tier.evict_while(lambda: True)
    assert [[array.tobytes() for array in piece.values()] for piece in seen[0]] == [
        [array.tobytes() for array in piece.values()] for piece in expected
    ]


@contextlib.contextmanager
def broken(owner, name, replacement):
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


def test_a_copy_that_nobody_waits_for_would_be_found():
    """The tests above see it when a state is read before it has arrived."""
    pool = tiny_pool()
    copies = delay_copies(pool)
    cache = PromptCache(pool, AMPLE, None, ROOMY)
    keep(cache, BASE[:100])
    cache.evict_all()
    with broken(copies, "upload", lambda work, after=None, sources=None: Copies.upload(copies, work)):
        stream = cache.restore(cache.lookup(BASE))
        assert pool.digest(stream) != digest_after(BASE[:100])


def cuda_pool(rng, slots: int = 2, pages: int = 12):
    """A pool on the device, its arrays full of random bytes."""
    from isobit.cuda import memory

    def random(*shape, dtype=np.float32):
        return memory.to_device(rng.integers(0, 100, shape).astype(dtype))

    recurrent = {"a.conv": random(slots, 2, 3), "a.history": rng.integers(0, 100, (slots, 2)).astype(np.int32)}
    halves = [random(pages, 64, 1, 2, dtype=np.float16) for _ in range(4)]
    raw, pooled = ([random(pages, rows, 2) for _ in range(2)] for rows in (64, 16))
    caches = {name: AttentionCache(halves[i], halves[i + 2], raw[i], pooled[i]) for i, name in enumerate(("b", "mtp"))}
    return StatePool(load_ops("cuda"), recurrent, {}, caches, 4, slots, pages)


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("rows", [1, 64, 129, 400])
def test_states_of_the_cuda_device_come_back_from_each_tier(tmp_path, rows):
    pool = cuda_pool(np.random.default_rng(rows))
    cache = PromptCache(pool, AMPLE, SpillStore(tmp_path, AMPLE, "checkpoint", "cuda"), ROOMY)
    cache.host.memory.settle()
    tokens = np.random.default_rng(0).integers(0, 50, rows)
    stream = pool.open()
    pool.reserve(stream, rows)
    stream.rows = rows
    digest = pool.digest(stream)
    cache.keep(tokens, stream)
    pool.close(stream)
    for tier in ("host", "disk", "host"):
        cache.evict_all()
        if tier == "disk":
            evict_host(cache)
            assert (len(cache), len(cache.host), len(cache.spill)) == (0, 0, 1)
        assert pool.free_pages == pool.pages
        for cached in pool.caches.values():
            for array in cache_pools(cached):
                pool.ops.fill_rows(array, range(pool.pages), 101)
        stream = cache.restore(cache.lookup([*tokens, 7]))
        assert (stream.rows, pool.digest(stream)) == (rows, digest)
        pool.close(stream)
    metrics = cache.metrics()
    assert (metrics.host_hits, metrics.restored, metrics.spilled) == (2, 1, 1)
    cache.close()
