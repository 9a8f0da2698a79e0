"""Sparse attention: its definition, selection at every edge, any way to compute the rows, transformers."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.errors import CheckpointError
from isobit.ops import set_threads, threads
from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch
from isobit.ops.sparse_attention import cpu, reference
from isobit.ops.sparse_attention.cpu import (
    MANY_ROWS,
    TOGETHER,
    attention_cache,
    attention_read,
    attention_select,
    attention_write,
    prepare_attention,
    select_together,
)
from isobit.ops.sparse_attention.cpu_select import choose_blocks
from isobit.ops.sparse_attention.kernels import Sizes
from isobit.ops.sparse_attention.rotary import inverse_frequencies, rotary_tables
from isobit.ops.work import forced_pieces
from tests.ops import plain

f32 = np.float32
EPS, THETA = 1e-6, 1e4


@dataclass
class Layer:
    """A small attention layer with random norm weights."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 40
    index_heads: int = 3
    index_dim: int = 36
    budget: int = 16
    block: int = 4
    rotary_dim: int = 16
    positions: int = 1024
    norms: list = field(default_factory=list)

    def __post_init__(self):
        rng = np.random.default_rng(1)
        widths = (self.head_dim, self.head_dim, self.index_dim, self.index_dim)
        self.norms = [(rng.standard_normal(width) / 4).astype(np.float32) for width in widths]
        self.handle = prepare_attention(
            *self.norms, self.heads, self.kv_heads, self.head_dim, self.index_heads, self.index_dim,
            self.budget, self.block, self.rotary_dim, THETA, self.positions, EPS,
        )  # fmt: skip

    def rows(self, count, seed=0):
        """Random inputs of `count` rows by name."""
        rng = np.random.default_rng(seed)
        widths = {
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.head_dim,
            "index_k": self.index_dim,
            "index_q": self.index_heads * self.index_dim,
            "q_gate": self.heads * 2 * self.head_dim,
        }
        return {name: rng.standard_normal((count, width)).astype(np.float32) for name, width in widths.items()}


class Streams:
    """Streams of one layer with their cache; pages are handed out in no order."""

    def __init__(self, layer, streams, capacity, select=attention_select):
        self.layer, self.select = layer, select
        per_stream = -(-capacity // PAGE_ROWS)
        self.pages = np.random.default_rng(2).permutation(streams * per_stream).astype(np.int32)
        self.pages = self.pages.reshape(streams, per_stream)
        self.cache = attention_cache(layer.handle, streams * per_stream)

    def batch(self, spans):
        """spans: (stream, first position, rows)."""
        counts = [count for _, _, count in spans]
        return Batch(
            slots=np.array([stream for stream, _, _ in spans], np.int32),
            starts=np.cumsum([0, *counts], dtype=np.int32),
            first=np.array([first for _, first, _ in spans], np.int32),
            pages=np.ascontiguousarray(self.pages[[stream for stream, _, _ in spans]]),
        )

    def run(self, spans, rows):
        """One forward: rows[stream] are that stream's inputs."""

        def part(name):
            return np.concatenate([rows[stream][name][first : first + count] for stream, first, count in spans])

        batch, handle = self.batch(spans), self.layer.handle
        attention_write(part("k"), part("v"), part("index_k"), handle, self.cache, batch)
        selection = self.select(part("index_q"), handle, self.cache, batch)
        return attention_read(part("q_gate"), selection, handle, self.cache, batch), selection

    def rows_of(self, pool, count):
        """The first `count` rows of stream 0 in a pool."""
        return pool[self.pages[0]].reshape(-1, *pool.shape[2:])[:count]

    def state(self):
        cache = self.cache
        return b"".join(pool.tobytes() for pool in (cache.keys, cache.values, cache.index_raw, cache.index_pooled))


def serial_outputs(layer, rows):
    """Each stream's outputs, one row of one stream at a time, and the state left behind."""
    streams = Streams(layer, len(rows), max(len(inputs["k"]) for inputs in rows))
    outputs = [
        np.concatenate([streams.run([(stream, row, 1)], rows)[0] for row in range(len(inputs["k"]))])
        for stream, inputs in enumerate(rows)
    ]
    return outputs, streams.state()


# --- the definition, one rounding at a time ---


def plain_norm_and_rotate(x, weight, position, rotary_dim):
    y = plain.norm(x, weight, EPS)
    half = rotary_dim // 2
    inverse = inverse_frequencies(rotary_dim, THETA)
    for i in range(half):
        angle = np.float64(f32(position) * inverse[i])
        cosine, sine = f32(np.cos(angle)), f32(np.sin(angle))
        first, second = y[i], y[half + i]
        y[i] = f32(first * cosine) - f32(second * sine)
        y[half + i] = f32(second * cosine) + f32(first * sine)
    return y


def plain_half(x):
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def plain_pooled(index_k, layer, block):
    first = block * layer.block
    total = index_k[first]
    for row in range(first + 1, first + layer.block):
        total = total + index_k[row]
    return plain_norm_and_rotate(total / f32(layer.block), layer.norms[3], first, layer.rotary_dim)


def plain_scores(index_q, pooled, position, layer):
    queries = [
        plain_norm_and_rotate(q, layer.norms[2], position, layer.rotary_dim)
        for q in index_q.reshape(layer.index_heads, layer.index_dim)
    ]
    scores = []
    for key in pooled:
        total = f32(0)
        for query in queries:
            total = total + max(plain.lane_dot(query, key), f32(0))
        scores.append(total * f32(1 / np.sqrt(layer.index_dim)))
    return np.array(scores, np.float32)


def plain_part(query, keys, values, scale):
    """(max, sum, weighted values) of one part."""
    scores = [plain.lane_dot(query, key) * scale for key in keys]
    weights = [f32(plain.exp(score - max(scores))) for score in scores]
    total = f32(0)
    for weight in weights:
        total = total + weight
    return max(scores), total, np.array([plain.chain(weights, values[:, d]) for d in range(values.shape[1])])


def plain_merge(one, two):
    highest = max(one[0], two[0])
    left, right = (f32(plain.exp(part[0] - highest)) for part in (one, two))
    return highest, one[1] * left + two[1] * right, one[2] * left + two[2] * right


def plain_read(q_gate, position, keys, values, layer):
    """keys and values [n, kv_heads, d], those that the row reads, in order."""
    outputs = []
    for head, (q, gate) in enumerate(q_gate.reshape(layer.heads, 2, layer.head_dim)):
        query = plain_norm_and_rotate(q, layer.norms[0], position, layer.rotary_dim)
        kv_head = head // (layer.heads // layer.kv_heads)
        scale = f32(1 / np.sqrt(layer.head_dim))
        parts = [
            plain_part(query, keys[first : first + 256, kv_head], values[first : first + 256, kv_head], scale)
            for first in range(0, len(keys), 256)
        ]
        merged = parts[0]
        for part in parts[1:]:
            merged = plain_merge(merged, part)
        opened = np.array([plain.sigmoid(x) for x in gate], np.float32)
        outputs.append((merged[2] / merged[1]) * opened)
    return np.concatenate(outputs).astype(np.float32)


def plain_keys(k, layer):
    heads = k.reshape(len(k), layer.kv_heads, layer.head_dim)
    return plain_half(
        np.array(
            [
                [plain_norm_and_rotate(head, layer.norms[1], position, layer.rotary_dim) for head in row]
                for position, row in enumerate(heads)
            ]
        )
    )


def assert_is_the_definition(layer, rows, positions):
    count = len(rows["k"])
    streams = Streams(layer, 1, count)
    y, selection = streams.run([(0, 0, count)], [rows])
    traced = attention_select(rows["index_q"], layer.handle, streams.cache, streams.batch([(0, 0, count)]), True)
    keys = plain_keys(rows["k"], layer)
    values = plain_half(rows["v"]).reshape(keys.shape)
    pooled = np.array([plain_pooled(rows["index_k"], layer, block) for block in range(count // layer.block)])
    assert streams.rows_of(streams.cache.keys, count).tobytes() == keys.astype(np.float16).tobytes()
    assert streams.rows_of(streams.cache.values, count).tobytes() == values.astype(np.float16).tobytes()
    assert streams.rows_of(streams.cache.index_pooled, count // layer.block).tobytes() == pooled.tobytes()
    for position in positions:
        finished = (position + 1) // layer.block
        scores = plain_scores(rows["index_q"][position], pooled[:finished], position, layer)
        assert traced.scores[position].tobytes() == scores.tobytes()
        chosen = reference.best_blocks(scores, layer.budget // layer.block)
        assert selection.blocks[position, : selection.counts[position]].tolist() == chosen.tolist()
        read = reference.read_positions(position, chosen, layer.block)
        expected = plain_read(rows["q_gate"][position], position, keys[read], values[read], layer)
        assert y[position].tobytes() == expected.tobytes(), f"position {position}"


def test_is_the_definition_rounding_by_rounding():
    layer = Layer()
    assert_is_the_definition(layer, layer.rows(38), range(38))


def test_parts_of_the_key_list_are_merged_as_defined():
    layer = Layer(heads=1, kv_heads=1, head_dim=8, index_heads=1, index_dim=8, budget=520, rotary_dim=4)
    assert_is_the_definition(layer, layer.rows(531, seed=3), (255, 256, 511, 512, 522, 530))


def test_halves_saturate():
    layer = Layer()
    rows = layer.rows(4)
    rows["v"] *= f32(1e6)
    streams = Streams(layer, 1, 4)
    streams.run([(0, 0, 4)], [rows])
    stored = streams.cache.values[streams.pages[0, 0], :4].view(np.float16).astype(np.float32)
    assert stored.tobytes() == plain_half(rows["v"]).reshape(stored.shape).tobytes()
    assert np.abs(stored).max() == 65504


# --- rotary tables ---


@pytest.mark.parametrize(("rotary_dim", "theta"), [(64, 10_000_000), (32, 10_000), (6, 1_000_003)])
def test_inverse_frequencies_are_rounded_exactly(rotary_dim, theta):
    """theta^(-2i/d) lies between the midpoints to the neighbours: m^d against theta^(-2i), in whole numbers."""
    for i, value in enumerate(inverse_frequencies(rotary_dim, float(theta))):
        power = Fraction(1, theta ** (2 * i))
        below, above = (Fraction(float(np.nextafter(value, f32(to)))) for to in (0, np.inf))
        assert ((below + Fraction(float(value))) / 2) ** rotary_dim <= power
        assert ((above + Fraction(float(value))) / 2) ** rotary_dim >= power


def test_tables_hold_the_rounded_cosines_and_sines_up_to_the_longest_context():
    cosines, sines = rotary_tables(8, 1e7, 262_144)
    angles = (np.arange(262_144, dtype=np.float32)[:, None] * inverse_frequencies(8, 1e7)).astype(np.float64)
    for table, exact in ((cosines, np.cos(angles)), (sines, np.sin(angles))):
        assert (np.abs(table - exact) <= np.spacing(np.abs(exact).astype(np.float32)) * 0.5001).all()
    assert rotary_tables(8, 1e7, 262_144)[0] is cosines


# --- selection ---


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.5, 0.5000001, 1e-45, 2.0, 3e38, np.inf]), min_size=1, max_size=70),
    st.integers(1, 20),
)
def test_the_best_blocks_are_exact_with_ties_to_the_lower_block(scores, kept):
    totals = np.array([scores], np.float32)
    blocks, counts = np.empty((1, kept), np.int32), np.empty(1, np.int32)
    position = np.array([4 * len(scores) - 1], np.int32)
    sizes = Sizes(1, 1, 1, 1, 1, 4, kept)
    choose_blocks(sizes, position, 0, 1, totals, blocks, counts, 1, 0, 1)
    best = reference.best_blocks(totals[0], kept)
    assert counts[0] == len(best)
    assert blocks[0].tolist() == best.tolist() + [-1] * (kept - len(best))


def test_rows_read_everything_up_to_the_budget_and_the_best_blocks_beyond():
    layer = Layer(budget=16)
    _, selection = Streams(layer, 1, 64).run([(0, 0, 64)], [layer.rows(64)])
    for position in range(64):
        finished = (position + 1) // 4
        assert selection.counts[position] == min(finished, 4)
        if finished <= 4:
            assert selection.blocks[position].tolist() == [*range(finished), *[-1] * (4 - finished)]


def test_the_row_that_finishes_a_block_may_leave_it_out():
    layer = Layer(budget=8)
    _, selection = Streams(layer, 1, 400).run([(0, 0, 400)], [layer.rows(400)])
    own = [(position + 1) // 4 - 1 in selection.blocks[position] for position in range(11, 400, 4)]
    assert any(own)
    assert not all(own)


def test_kept_scores_are_each_rows_scores_of_its_finished_blocks():
    layer = Layer()
    rows = layer.rows(50)
    streams = Streams(layer, 1, 50)
    _, selection = streams.run([(0, 0, 50)], [rows])
    batch = streams.batch([(0, 0, 50)])
    for together in (1, TOGETHER):
        traced = select_together(together, rows["index_q"], layer.handle, streams.cache, batch, keep_scores=True)
        assert traced.blocks.tobytes() == selection.blocks.tobytes()
        assert [len(scores) for scores in traced.scores] == [(position + 1) // 4 for position in range(50)]
        for scores, chosen in zip(traced.scores, traced.blocks, strict=True):
            assert reference.best_blocks(scores, 4).tolist() == chosen[chosen >= 0].tolist()
    assert selection.scores is None


def test_the_last_row_of_the_longest_context():
    layer = Layer(heads=1, kv_heads=1, head_dim=8, index_heads=2, index_dim=8, budget=2048, rotary_dim=8,
                  positions=262_144)  # fmt: skip
    rng = np.random.default_rng(4)
    streams = Streams(layer, 1, 262_144)
    inside = streams.pages[0, :, None], np.arange(PAGE_ROWS)
    pooled = rng.standard_normal((65_536, 8)).astype(np.float32)
    keys, values = rng.standard_normal((2, 262_144, 1, 8)).astype(np.float16)
    streams.cache.keys[inside] = keys.view(np.uint16).reshape(-1, PAGE_ROWS, 1, 8)
    streams.cache.values[inside] = values.view(np.uint16).reshape(-1, PAGE_ROWS, 1, 8)
    streams.cache.index_pooled[streams.pages[0]] = pooled.reshape(-1, PAGE_ROWS // 4, 8)
    batch, rows = streams.batch([(0, 262_143, 1)]), layer.rows(1)
    selection = attention_select(rows["index_q"], layer.handle, streams.cache, batch, keep_scores=True)
    assert len(selection.scores[0]) == 65_536
    assert selection.blocks[0].tolist() == reference.best_blocks(selection.scores[0], 512).tolist()
    position = np.array([262_143])
    index_q = rows["index_q"].reshape(1, 2, 8)
    queries = reference.norm_and_rotate(index_q, layer.norms[2], EPS, position, 8, THETA)[0]
    np.testing.assert_allclose(selection.scores[0], reference.block_scores(queries, pooled), atol=1e-5)
    read = reference.read_positions(262_143, selection.blocks[0], 4)
    q, gate = np.split(rows["q_gate"], 2, axis=1)
    queries = reference.norm_and_rotate(q[:, None], layer.norms[0], EPS, position, 8, THETA)[0]
    expected = reference.attend(queries, keys[read].astype(float), values[read].astype(float))[1]
    y = attention_read(rows["q_gate"], selection, layer.handle, streams.cache, batch)
    np.testing.assert_allclose(y, expected * reference.sigmoid(gate), atol=1e-5)


# --- the promise ---

LAYERS = {"padded": Layer(), "whole lanes": Layer(heads=2, kv_heads=1, head_dim=32, index_dim=64, budget=24, block=2)}
LENGTHS = (150, 70, 3)


@pytest.fixture(scope="module", params=LAYERS)
def served(request):
    """(layer, each stream's rows, their serial outputs, the state left behind)."""
    layer = LAYERS[request.param]
    rows = [layer.rows(length, seed) for seed, length in enumerate(LENGTHS)]
    return layer, rows, *serial_outputs(layer, rows)


def random_schedule(data):
    """Calls that advance the streams by random pieces, several streams a call."""
    done, schedule = [0] * len(LENGTHS), []
    while pending := [stream for stream, length in enumerate(LENGTHS) if done[stream] < length]:
        spans = []
        for stream in data.draw(st.permutations(pending)):
            count = data.draw(st.integers(0, LENGTHS[stream] - done[stream]))
            if count:
                spans.append((stream, done[stream], count))
                done[stream] += count
        if not spans:
            spans = [(pending[0], done[pending[0]], LENGTHS[pending[0]] - done[pending[0]])]
            done[pending[0]] = LENGTHS[pending[0]]
        schedule.append(spans)
    return schedule


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_split_into_calls_gives_the_bytes_of_serial_rows(served, data):
    layer, rows, expected, state = served
    together = data.draw(st.sampled_from([None, 1, 3, TOGETHER]))

    def select(*arguments):
        return attention_select(*arguments) if together is None else select_together(together, *arguments)

    streams = Streams(layer, len(LENGTHS), max(LENGTHS), select)
    with forced_pieces(data.draw(st.integers(1, 2))):
        for spans in random_schedule(data):
            y, _ = streams.run(spans, rows)
            at = 0
            for stream, first, count in spans:
                assert y[at : at + count].tobytes() == expected[stream][first : first + count].tobytes()
                at += count
    assert streams.state() == state


def test_scratch_in_chunks_and_any_number_of_threads_change_no_byte(served, monkeypatch):
    layer, rows, expected, state = served
    before = threads()
    monkeypatch.setattr(cpu, "SCRATCH_FLOATS", 1000)
    try:
        for count in (1, 2):
            set_threads(count)
            streams = Streams(layer, len(LENGTHS), max(LENGTHS))
            with forced_pieces(count):
                y, _ = streams.run([(0, 0, LENGTHS[0]), (1, 0, LENGTHS[1])], rows)
            assert y.tobytes() == expected[0].tobytes() + expected[1].tobytes()
            streams.run([(2, 0, LENGTHS[2])], rows)
            assert streams.state() == state
    finally:
        set_threads(before)


def test_around_the_number_of_rows_where_scans_are_shared(served):
    layer, rows, expected, _ = served
    for count in (MANY_ROWS - 1, MANY_ROWS, MANY_ROWS + 1):
        streams = Streams(layer, len(LENGTHS), max(LENGTHS))
        streams.run([(0, 0, 100)], rows)
        y, _ = streams.run([(0, 100, count)], rows)
        assert y.tobytes() == expected[0][100 : 100 + count].tobytes()


def test_a_batch_without_rows_gives_no_rows():
    layer = Layer()
    streams = Streams(layer, 1, 64)
    y, selection = streams.run([(0, 0, 0)], [layer.rows(1)])
    assert y.shape == (0, 160)
    assert selection.blocks.shape == (0, 4)


def test_a_nan_in_one_stream_stays_in_it(served):
    layer, rows, expected, _ = served
    spoiled = [{name: values.copy() for name, values in inputs.items()} for inputs in rows]
    for values in spoiled[1].values():
        values[20] = np.nan
    y, _ = Streams(layer, len(LENGTHS), max(LENGTHS)).run([(1, 0, 70), (0, 0, 150)], spoiled)
    assert y[70:].tobytes() == expected[0].tobytes()
    assert y[:20].tobytes() == expected[1][:20].tobytes()
    assert np.isnan(y[20]).all()


# --- preparation ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "3 query heads"),
        ({"block": 3}, "blocks of 3 keys"),
        ({"budget": 6}, "divisor of 64 and of 6"),
        ({"rotary_dim": 5}, "5 rotary dims"),
        ({"rotary_dim": 38}, "38 rotary dims"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        Layer(**change)


def test_norm_weights_of_another_width_are_refused_by_name():
    layer = Layer()
    q_norm, k_norm, index_q_norm, index_k_norm = layer.norms
    with pytest.raises(CheckpointError, match=r"the indexer's k_norm has shape \[40\], expected \[36\]"):
        prepare_attention(q_norm, k_norm, index_q_norm, k_norm, 4, 2, 40, 2, 36, 16, 4, 16, THETA, 64, EPS)
    assert index_k_norm.shape == (36,)


def test_pools_begin_empty_and_in_the_shapes_of_the_cache():
    cache = attention_cache(Layer().handle, 3)
    assert isinstance(cache, AttentionCache)
    assert cache.keys.shape == cache.values.shape == (3, PAGE_ROWS, 2, 40)
    assert cache.index_raw.shape == (3, PAGE_ROWS, 36)
    assert cache.index_pooled.shape == (3, PAGE_ROWS // 4, 36)
    assert not any(pool.any() for pool in (cache.keys, cache.values, cache.index_raw, cache.index_pooled))


# --- transformers ---


def test_agrees_with_transformers(monkeypatch):
    """Its own attention module on the same projections, its topk patched to the lower-id rule."""
    torch = pytest.importorskip("torch", reason="needs the optional package torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs transformers")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    layer, count = Layer(head_dim=32, index_dim=24, rotary_dim=8, budget=16), 90
    hidden = layer.heads * layer.head_dim
    config = Qwen4ExpTextConfig(
        hidden_size=hidden, num_attention_heads=layer.heads, num_key_value_heads=layer.kv_heads,
        head_dim=layer.head_dim, num_hidden_layers=1, layer_types=["indexed_attention"], rms_norm_eps=EPS,
        indexer_n_heads=layer.index_heads, indexer_kv_heads=1, indexer_head_dim=layer.index_dim,
        indexer_budget=layer.budget, indexer_compress_ratio=layer.block,
        rope_parameters={"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25,
                         "mrope_section": [2, 1, 1]},
    )  # fmt: skip
    config._attn_implementation = "eager"

    def lower_id_topk(scores, k, dim=-1, **_):
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    monkeypatch.setattr(torch.Tensor, "topk", lower_id_topk)
    torch.manual_seed(0)
    module = modeling.Qwen4ExpTextAttention(config, 0)
    x = torch.randn(1, count, hidden)
    with torch.no_grad():
        for linear in (module.q_proj, module.k_proj, module.v_proj, module.indexer.index_qk_proj):
            linear.weight.normal_(std=0.2)
        module.o_proj.weight.copy_(torch.eye(hidden))
        norms = (module.q_norm, module.k_norm, module.indexer.q_layernorm, module.indexer.k_layernorm)
        for norm, weight in zip(norms, layer.norms, strict=True):
            norm.weight.copy_(torch.from_numpy(weight))
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        rotary = modeling.Qwen4ExpTextRotaryEmbedding(config)(x, torch.arange(count)[None, None])
        expected = module(x, rotary, mask)[0][0].numpy()
        split = layer.index_heads * layer.index_dim
        index_q, index_k = module.indexer.index_qk_proj(x)[0].split([split, layer.index_dim], dim=-1)
        projected = {"q_gate": module.q_proj(x)[0], "k": module.k_proj(x)[0], "v": module.v_proj(x)[0]}
    projected |= {"index_q": index_q, "index_k": index_k}
    rows = {name: np.ascontiguousarray(values.numpy()) for name, values in projected.items()}
    y, _ = Streams(layer, 1, count).run([(0, 0, count)], [rows])
    error, size = np.abs(y - expected), np.abs(expected).mean()
    assert error.max() < 1e-2 * size
    assert error.mean() < 5e-4 * size
