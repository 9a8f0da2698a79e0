"""Sparse attention on CUDA, emulated: its contract, the CPU's selection, the read as defined, launches for graphs."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the optional package torch")

import torch

from isobit.contract.gates import GATES
from isobit.contract.plans import Sizes
from isobit.contract.run import cases_of, run_gate
from isobit.cuda import kernels, memory
from isobit.errors import CheckpointError
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch
from isobit.ops.sparse_attention import cpu, cuda, cuda_contract, reference
from isobit.ops.sparse_attention.kernels import Sizes as LayerSizes
from tests.ops import plain
from tests.ops.tensor_core import in_steps, need_known_steps
from tests.ops.test_sparse_attention import EPS, THETA, Layer, plain_half, plain_merge, plain_norm_and_rotate

pytestmark = pytest.mark.usefixtures("emulated_cuda")

f32 = np.float32
SIZES = Sizes((3, 17, 65), 3)
OPS = (
    cuda_contract.AttentionWrite(),
    cuda_contract.AttentionSelect(),
    cuda_contract.AttentionRead(),
    cuda_contract.SparseAttention(),
)
SELECTS, READS = ("select_few", "select_many"), ("read_few", "read_many")
BUDGET = 256


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_keeps_its_contract(op):
    case = cases_of(op, wide=False)[0]
    for implementation, gate in itertools.product(op.implementations, GATES):
        assert not run_gate(gate, op, implementation, case, SIZES), f"{implementation}, {gate}"


class Both:
    """One layer on the CPU and on the device, with the same random pools of streams of `pages` pages."""

    def __init__(self, streams=2, pages=6):
        self.layer = layer = Layer(heads=6, budget=BUDGET, positions=pages * PAGE_ROWS)
        sizes = layer.heads, layer.kv_heads, layer.head_dim, layer.index_heads, layer.index_dim
        self.handle = cuda.prepare_attention(
            *layer.norms, *sizes, BUDGET, layer.block, layer.rotary_dim, THETA, layer.positions, EPS
        )
        rng = np.random.default_rng(7)
        self.pages = rng.permutation(streams * pages).astype(np.int32).reshape(streams, pages)
        self.host = cpu.attention_cache(layer.handle, streams * pages)
        for pool in (self.host.keys, self.host.values):
            pool[...] = rng.standard_normal(pool.shape).astype(np.float16).view(np.uint16)
        for pool in (self.host.index_raw, self.host.index_pooled):
            pool[...] = rng.standard_normal(pool.shape)
        self.cache = AttentionCache(**{name: cuda_contract.guarded(pool) for name, pool in vars(self.host).items()})

    def batch(self, *spans, pages=None):
        """spans: (stream, first position, rows)."""
        return Batch(
            slots=np.array([stream for stream, _, _ in spans], np.int32),
            starts=np.cumsum([0] + [count for _, _, count in spans], dtype=np.int32),
            first=np.array([first for _, first, _ in spans], np.int32),
            pages=np.ascontiguousarray(self.pages[[stream for stream, _, _ in spans]][:, :pages]),
        )

    def write(self, rows, batch):
        arrays = [rows[name] for name in ("k", "v", "index_k")]
        cpu.attention_write(*arrays, self.layer.handle, self.host, batch)
        cuda.attention_write(*map(memory.to_device, arrays), self.handle, self.cache, batch)

    def select(self, rows, batch, how="attention_select"):
        return getattr(cuda, how)(memory.to_device(rows["index_q"]), self.handle, self.cache, batch)

    def read(self, rows, selection, batch, how="attention_read"):
        y = getattr(cuda, how)(memory.to_device(rows["q_gate"]), selection, self.handle, self.cache, batch)
        return memory.to_host(y)


@pytest.fixture
def both():
    return Both()


# --- writing and selecting: the CPU's bytes ---


@pytest.mark.parametrize("how", SELECTS)
def test_writes_and_selects_as_the_cpu_where_segments_share_a_tile(both, how):
    batch = both.batch((0, 254, 9), (1, 339, 3), (0, 300, 12))
    rows = both.layer.rows(24)
    both.write(rows, batch)
    for name, pool in cuda_contract.pools_of(both.cache).items():
        assert memory.to_host(pool).tobytes() == getattr(both.host, name).tobytes(), name
    expected = cpu.attention_select(rows["index_q"], both.layer.handle, both.host, batch, keep_scores=True)
    index_q = memory.to_device(rows["index_q"])
    found = getattr(cuda, how)(index_q, both.handle, both.cache, batch, keep_scores=True)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        assert memory.to_host(ours).tobytes() == theirs.tobytes()
    for selection in (found, both.select(rows, batch, how)):
        assert memory.to_host(selection.blocks).tobytes() == expected.blocks.tobytes()
        assert memory.to_host(selection.counts).tobytes() == expected.counts.tobytes()


def test_scores_in_chunks_of_rows_choose_the_same(both, monkeypatch):
    batch, rows = both.batch((0, 270, 40)), both.layer.rows(40)
    expected = both.select(rows, batch, "select_few")
    monkeypatch.setattr(cuda, "SCRATCH_FLOATS", 20 * 77)
    found = cuda.select_many(memory.to_device(rows["index_q"]), both.handle, both.cache, batch, keep_scores=True)
    assert torch.equal(found.blocks, expected.blocks)
    assert [len(scores) for scores in found.scores] == [(270 + row + 1) // 4 for row in range(40)]


@pytest.mark.parametrize("threads", [128, 1024])
def test_the_best_blocks_are_exact_with_ties_to_the_lower_block(threads):
    rng = np.random.default_rng(3)
    values = np.array([0.0, 0.0, 0.0, 0.5, 0.5000001, 1e-45, 2.0, 3e38, np.inf], f32)
    kept, finished = 300, (301, 1000, 8193)
    scores = np.full((len(finished), max(finished)), np.nan, f32)
    for row, count in enumerate(finished):
        scores[row, :count] = rng.choice(values[: 3 + 3 * row], count)
    check_choices(scores, finished, kept, threads)
    for row, count in enumerate(finished):
        scores[row, :count] = np.maximum(rng.standard_normal(count), 0)
    check_choices(scores, finished, kept, threads)


def test_the_longest_context_has_65536_blocks():
    scores = np.maximum(np.random.default_rng(4).standard_normal((1, 65_536)), 0).astype(f32)
    scores[0, 1::3] = np.sort(scores[0])[-500]
    check_choices(scores, (65_536,), 512, 1024)


def check_choices(scores, finished, kept, threads):
    rows, positions = len(scores), np.array([4 * count + 2 for count in finished], np.int32)
    blocks, counts = memory.empty((rows, kept), torch.int32), memory.empty((rows,), torch.int32)
    kernel = cuda._chooser(LayerSizes(1, 1, 1, 1, 1, 4, kept))
    kernel(
        rows, threads, memory.to_device(scores), scores.shape[1], memory.to_device(positions), blocks, counts
    )  # fmt: skip
    assert memory.to_host(counts).tolist() == [kept] * rows
    for row, count in enumerate(finished):
        assert memory.to_host(blocks)[row].tolist() == reference.best_blocks(scores[row, :count], kept).tolist()


# --- reading ---


def plain_part(queries, keys, values):
    """(highest score, total, sums) of each head, of up to 128 keys of one key-value head."""
    scores = in_steps(queries, keys.T) * f32(1 / np.sqrt(queries.shape[1]))
    highest = scores.max(axis=1)
    weights = np.array([[f32(plain.exp(s - m)) for s in row] for row, m in zip(scores, highest, strict=True)])
    totals = [plain.lane_dot(row, np.ones_like(row)) for row in weights]
    scaled = weights * f32(2**15)
    upper = plain_half(scaled)
    lower = plain_half(scaled - upper)
    sums = np.zeros((len(queries), values.shape[1]), f32)
    for first in range(0, len(keys), 16):
        for half in (upper, lower):
            sums = in_steps(half[:, first : first + 16], values[first : first + 16], sums)
    return list(zip(highest, totals, sums, strict=True))


@pytest.mark.parametrize("processors", [1, 1000])
@pytest.mark.parametrize("how", READS)
def test_reads_as_defined_rounding_by_rounding(both, how, processors, monkeypatch):
    need_known_steps()
    monkeypatch.setattr(memory, "multiprocessors", lambda: processors)
    layer, batch, rows = both.layer, both.batch((0, 301, 1)), both.layer.rows(1)
    selection = both.select(rows, batch)
    y = both.read(rows, selection, batch, how)[0]
    read = reference.read_positions(301, memory.to_host(selection.blocks)[0], layer.block)
    assert len(read) == BUDGET + 2
    places = both.pages[0, read // PAGE_ROWS], read % PAGE_ROWS
    keys, values = (pool[places].view(np.float16).astype(f32) for pool in (both.host.keys, both.host.values))
    q_gate = rows["q_gate"][0].reshape(layer.heads, 2, layer.head_dim)
    queries = plain_half(
        np.array([plain_norm_and_rotate(q, layer.norms[0], 301, layer.rotary_dim) for q in q_gate[:, 0]])
    )
    for head in range(layer.heads):
        kv_head = head // 3
        parts = [
            plain_part(
                queries[head : head + 1], keys[first : first + 128, kv_head], values[first : first + 128, kv_head]
            )[0]
            for first in range(0, len(read), 128)
        ]
        merged = parts[0]
        for part in parts[1:]:
            merged = plain_merge(merged, part)
        gates = np.array([plain.sigmoid(x) for x in q_gate[head, 1]], f32)
        expected = merged[2] * f32(2**-15) / merged[1] * gates
        assert y.reshape(layer.heads, -1)[head].tobytes() == expected.astype(f32).tobytes(), f"head {head}"


@pytest.mark.parametrize("found", [1, 20, 21, 43])
def test_any_number_of_parts_is_merged_in_order(both, found):
    parts, rng = 43, np.random.default_rng(found)
    heads, dim, block = both.layer.heads, both.layer.head_dim, both.layer.block
    sums = rng.standard_normal((heads, parts, dim)).astype(f32)
    edges = np.abs(rng.standard_normal((heads, parts, 2))).astype(f32)
    sums[:, found:], edges[:, found:] = np.nan, np.nan
    q_gate = rng.standard_normal((heads, 2, dim)).astype(f32)
    staging, out = cuda.FEW, memory.empty((heads, dim))
    macros = cuda._reading_macros(both.handle, staging)
    shared = cuda._part_bytes(both.handle.sizes, staging)
    count, position = np.array([found * 128 // block - 1], np.int32), np.array([2], np.int32)
    kernels.load("ops/sparse_attention/read_few.cu", "merge_parts", **macros, SCRATCH_BYTES=shared)(
        (heads, 1), 64, memory.to_device(sums), memory.to_device(edges), parts, memory.to_device(q_gate),
        q_gate[0].size * heads, memory.to_device(position), memory.to_device(count), out, shared=20 * parts,
    )  # fmt: skip
    for head in range(heads):
        merged = edges[head, 0, 0], edges[head, 0, 1], sums[head, 0]
        for part in range(1, found):
            merged = plain_merge(merged, (edges[head, part, 0], edges[head, part, 1], sums[head, part]))
        gates = np.array([plain.sigmoid(x) for x in q_gate[head, 1]], f32)
        expected = merged[2] * f32(2**-15) / merged[1] * gates
        assert memory.to_host(out)[head].tobytes() == expected.astype(f32).tobytes(), f"head {head}"


@pytest.mark.parametrize("sharing", [100, 200])
def test_a_threshold_among_keys_of_equal_first_bits_is_exact(sharing):
    rng = np.random.default_rng(sharing)
    scores = np.concatenate([np.full(150, 0.25), 1 + rng.integers(0, 40, sharing) * 2.0**-23, np.full(90, 4)]).astype(
        f32
    )
    for kept in (91, 120, 90 + sharing - 1):
        check_choices(rng.permutation(scores)[None], (len(scores),), kept, 512)


def test_any_cut_of_the_rows_gives_the_bytes_of_serial_rows(both):
    spans, rows = ((0, 250, 8), (1, 2, 3), (0, 300, 4)), both.layer.rows(15)
    whole = both.batch(*spans)
    together = [
        both.read(rows, both.select(rows, whole, select), whole, read)
        for select, read in zip(SELECTS, READS, strict=True)
    ]
    assert together[0].tobytes() == together[1].tobytes()
    at = 0
    for stream, first, count in spans:
        for position in range(first, first + count):
            one, batch = {name: x[at : at + 1] for name, x in rows.items()}, both.batch((stream, position, 1))
            assert both.read(one, both.select(one, batch), batch)[0].tobytes() == together[0][at].tobytes()
            at += 1


def test_what_a_row_does_not_read_may_hold_anything(both):
    batch, rows = both.batch((0, 301, 1)), both.layer.rows(1)
    selection = both.select(rows, batch)
    expected = both.read(rows, selection, batch, "read_few")
    read = reference.read_positions(301, memory.to_host(selection.blocks)[0], both.layer.block)
    unread = np.setdiff1d(np.arange(6 * PAGE_ROWS), read)
    for pool in (both.cache.keys, both.cache.values):
        pool[both.pages[0, unread // PAGE_ROWS], unread % PAGE_ROWS] = torch.nan
        pool[both.pages[1]] = torch.nan
    for how in READS:
        assert both.read(rows, selection, batch, how).tobytes() == expected.tobytes()


def test_rows_may_be_apart(both):
    batch, rows = both.batch((0, 290, 3)), both.layer.rows(3)
    expected = both.select(rows, batch)
    wide = memory.to_device(np.concatenate([rows["index_q"], np.full((3, 5), np.nan, f32)], axis=1))
    apart = cuda.attention_select(wide[:, :-5], both.handle, both.cache, batch)
    assert torch.equal(apart.blocks, expected.blocks)


def test_a_batch_without_rows_gives_no_rows(both):
    rows, batch = both.layer.rows(0), both.batch((0, 0, 0))
    both.write(rows, batch)
    for how in SELECTS:
        selection = both.select(rows, batch, how)
        assert selection.blocks.shape == (0, BUDGET // 4)
    for how in READS:
        assert both.read(rows, selection, batch, how).shape == (0, 240)


# --- for CUDA graphs ---


def test_launches_of_few_rows_do_not_depend_on_positions(both, monkeypatch):
    launches = []

    def record(kernel, grid, block, *arguments, shared=0, early=False):
        launches.append((repr(kernel), grid, block, shared, len(arguments)))

    monkeypatch.setattr(kernels.Kernel, "__call__", record)
    rows = both.layer.rows(2)
    found = []
    for spans in (((0, 0, 1), (1, 3, 1)), ((1, 383, 1), (0, 300, 1))):
        batch = both.batch(*spans)
        written = (memory.to_device(rows[name]) for name in ("k", "v", "index_k"))
        cuda.attention_write(*written, both.handle, both.cache, batch)
        both.read(rows, both.select(rows, batch), batch)
        found.append(launches[:])
        launches.clear()
    assert found[0] == found[1]
    assert len(found[0]) == 5
    both.select(rows, both.batch((0, 0, 1), (1, 3, 1), pages=1))
    assert [name.split("(")[0] for name, *_ in launches] == ["choose_blocks"]


# --- preparation ---


def test_sizes_that_do_not_fit_are_refused():
    norms = Layer().norms
    with pytest.raises(CheckpointError, match="3 query heads"):
        cuda.prepare_attention(*norms, 3, 2, 40, 3, 36, 16, 4, 16, THETA, 64, EPS)


def test_layers_share_the_tables_and_pools_begin_empty(both):
    other = Both()
    assert other.handle.cosines is both.handle.cosines
    assert both.handle.positions == 6 * PAGE_ROWS
    cache = cuda.attention_cache(both.handle, 3)
    assert cache.keys.shape == cache.values.shape == (3, PAGE_ROWS, 2, 40)
    assert cache.keys.dtype == torch.float16
    assert cache.index_raw.shape == (3, PAGE_ROWS, 36)
    assert cache.index_pooled.shape == (3, PAGE_ROWS // 4, 36)
    assert not any(pool.any() for pool in cuda_contract.pools_of(cache).values())
