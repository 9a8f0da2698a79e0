"""The n-gram embedding: ids with end tokens at every cut, rows from mapped tables, the injection, transformers."""

import itertools

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.checkpoint.trellis import dequantize_ngram_rows
from isobit.checkpoint.weights import NgramTable
from isobit.ops.batch import Batch
from isobit.ops.ngram_embedding import reference
from isobit.ops.ngram_embedding.contract import make_table
from isobit.ops.ngram_embedding.cpu import ngram_gather, ngram_ids, ple_inject, prepare_ple
from isobit.ops.work import forced_pieces
from tests.ops import plain

f32 = np.float32
END = 2


def segments(*pieces):
    """A batch of (slot, rows) segments."""
    slots, counts = zip(*pieces, strict=True)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    none = np.zeros(len(slots), np.int32)
    return Batch(np.array(slots, np.int32), starts, none, np.zeros((len(slots), 1), np.int32))


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    cuts=st.lists(st.integers(1, 13), max_size=4),
    order=st.integers(2, 4),
)
def test_ids_do_not_depend_on_cuts_and_see_nothing_past_an_end_token(tokens, cuts, order):
    table = make_table(np.random.default_rng(order), order, 2, 16, "2", 10**6)
    tokens = np.array(tokens, np.int32)
    history = np.full((2, order - 1), END, np.int32)
    expected = reference.ngram_ids(tokens, history[1], table, END)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    found = []
    for first, last in itertools.pairwise(edges):
        stranger = np.arange(3, dtype=np.int32)
        rows = np.concatenate([stranger, tokens[first:last]])
        found.append(ngram_ids(rows, history, table, END, segments((0, 3), (1, last - first)))[3:])
    assert np.array_equal(np.concatenate(found), expected)
    recent = [*tokens[::-1], *[END] * order][: order - 1]
    assert history[1].tolist() == recent


def test_an_end_token_sees_its_predecessors_and_hides_them_from_what_follows():
    table = make_table(np.random.default_rng(1), 3, 1, 16, "2", 10**6)

    def ids(*tokens):
        return ngram_ids(
            np.array(tokens, np.int32), np.full((1, 2), END, np.int32), table, END, segments((0, len(tokens)))
        )

    assert not np.array_equal(ids(7, 8, END)[2], ids(9, 8, END)[2])
    assert np.array_equal(ids(7, 8, END, 5)[3], ids(9, 4, END, 5)[3])
    assert np.array_equal(ids(7, END, 5)[2], ids(5)[0])
    assert np.array_equal(ids(7, END, 5, 6)[3], ids(5, 6)[1])


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantized_rows_are_those_of_the_checkpoint_format(bits):
    table = make_table(np.random.default_rng(bits), 3, 2, 160, str(bits), 50)
    ids = np.arange(4 * 30).reshape(30, 4) % 200
    stored = np.concatenate(table.shards)[ids.ravel()]
    bias = np.tile(table.head_bias, (30, 1))
    assert ngram_gather(ids, table).tobytes() == dequantize_ngram_rows(stored, bits, bias).tobytes()


def test_only_the_needed_pages_of_a_mapped_table_are_touched(tmp_path):
    rows, words = 1 << 24, 1 + 160 * 5 // 16
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(rows * words * 2)
    mapped = np.memmap(path, np.int16, "r", shape=(rows, words))
    table = NgramTable(
        name="table",
        shards=(mapped[: rows // 2], mapped[rows // 2 :]),
        shard_rows=rows // 2,
        width=160,
        bits=5,
        bfloat16=False,
        offsets=np.array([0, 0]),
        sizes=np.array([rows, rows]),
        multipliers=np.array([1, 1]),
        head_bias=None,
    )
    ngram_gather(np.zeros((1, 2), np.int64), table)
    before = psutil.Process().memory_info().rss
    gathered = ngram_gather(np.array([[0, rows - 1], [rows // 2, 12345678]]), table)
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert gathered.shape == (2, 320)
    assert not gathered.any()


def random_injection(rng, streams, hidden, taps, dilation):
    """(handle, weights) of an injection."""
    wide = streams * hidden
    norms = {name: (0.3 * rng.standard_normal(wide)).astype(f32) for name in ("norm_key", "norm_query", "norm_conv")}
    weights = {**norms, "conv_weight": rng.standard_normal((wide, taps)).astype(f32)}
    return prepare_ple(**weights, streams=streams, dilation=dilation, eps=1e-6), weights


def test_injection_is_the_definition_rounding_by_rounding():
    rng = np.random.default_rng(5)
    count, hidden, dilation, rows = 2, 10, 2, 4
    handle, weights = random_injection(rng, count, hidden, 3, dilation)
    before = rng.standard_normal((rows, count, hidden)).astype(f32)
    key = rng.standard_normal((rows, count * hidden)).astype(f32)
    key[1] = 0
    value = rng.standard_normal((rows, hidden)).astype(f32)
    pool = rng.standard_normal((1, 2 * dilation, count * hidden)).astype(f32)
    history = [*pool[0].copy()]
    streams = before.copy()
    ple_inject(streams, key, value, handle, pool, segments((0, rows)))

    parts = {name: weights[name].reshape(-1, hidden) for name in ("norm_key", "norm_query", "norm_conv")}
    for row in range(rows):
        gated = np.empty((count, hidden), f32)
        for s in range(count):
            keys = plain.norm(key[row].reshape(count, hidden)[s], parts["norm_key"][s], 1e-6)
            dot = plain.lane_dot(keys, plain.norm(before[row, s], parts["norm_query"][s], 1e-6)) / f32(np.sqrt(hidden))
            gate = f32(np.sign(dot)) * np.sqrt(max(abs(dot), f32(1e-6)))
            gated[s] = f32(plain.sigmoid(gate)) * value[row]
        history.append(np.concatenate([plain.norm(gated[s], parts["norm_conv"][s], 1e-6) for s in range(count)]))
        for s, i in np.ndindex(gated.shape):
            seen = [history[len(history) - 1 - back * dilation][s * hidden + i] for back in (2, 1, 0)]
            local = f32(plain.silu(plain.chain(weights["conv_weight"][s * hidden + i], seen)))
            assert streams[row, s, i] == before[row, s, i] + (gated[s, i] + local)
    assert pool[0].tobytes() == np.array(history[-2 * dilation :]).tobytes()


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 14), max_size=6), pieces=st.integers(1, 3))
def test_injection_gives_the_same_bytes_for_any_cut(cuts, pieces):
    rng = np.random.default_rng(6)
    rows, wide = 15, 4 * 24
    handle, _ = random_injection(rng, 4, 24, 4, 3)
    key, value = rng.standard_normal((rows, wide)).astype(f32), rng.standard_normal((rows, 24)).astype(f32)
    streams = rng.standard_normal((rows, 4, 24)).astype(f32)
    whole, whole_pool = streams.copy(), np.zeros((2, 9, wide), f32)
    ple_inject(whole, key, value, handle, whole_pool, segments((1, rows)))
    pool = np.zeros((2, 9, wide), f32)
    with forced_pieces(pieces):
        for first, last in itertools.pairwise(sorted({0, rows, *cuts})):
            part = slice(first, last)
            ple_inject(streams[part], key[part], value[part], handle, pool, segments((1, last - first)))
    assert streams.tobytes() == whole.tobytes()
    assert pool.tobytes() == whole_pool.tobytes()


def test_agrees_with_transformers():
    torch = pytest.importorskip("torch", reason="needs the optional package torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs transformers")
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        vocab_size=50,
        hidden_size=32,
        hc_count=4,
        ple_layer_ids=[2],
        ple_embed_dim=64,
        ngram_size=3,
        heads_per_ngram=2,
        ngram_vocab_size_base=60,
        eos_token_id=[END, 7],
    )
    torch.manual_seed(0)
    layer = modeling.Qwen4ExpTextPLELayer(config, 1, 0)
    with torch.no_grad():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    embedding = layer.ple_embedding
    table = NgramTable(
        name="table",
        shards=(embedding.ngram_embedding.weight.detach().numpy(),),
        shard_rows=embedding.ngram_embedding.weight.shape[0],
        width=16,
        bits=None,
        bfloat16=False,
        offsets=embedding.ngram_heads_offsets.numpy(),
        sizes=embedding.ngram_heads_vocab_sizes.numpy(),
        multipliers=embedding.layer_multipliers.numpy(),
        head_bias=None,
    )
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 10, 40).astype(np.int32)
    batch = segments((0, 40))
    rows = ngram_gather(ngram_ids(tokens, np.full((1, 2), END, np.int32), table, END, batch), table)
    token_ids = torch.from_numpy(tokens.astype(np.int64))[None]
    streams = rng.standard_normal((40, 4, 32)).astype(f32)
    with torch.no_grad():
        assert np.array_equal(rows, embedding(token_ids, None)[0].numpy())
        expected = layer(torch.from_numpy(streams.reshape(1, 40, -1)), token_ids, None)[0].numpy()
        key, value = (p(torch.from_numpy(rows)).numpy() for p in (layer.key_proj, layer.value_proj))
    weights = {name: getattr(layer, name).weight.detach().numpy() for name in ("norm_key", "norm_query", "norm_conv")}
    conv_weight = layer.conv1d.weight.detach().numpy()[:, 0]
    handle = prepare_ple(**weights, conv_weight=conv_weight, streams=4, dilation=3, eps=config.rms_norm_eps)
    after = streams.copy()
    ple_inject(after, key, value, handle, np.zeros((1, 9, 128), f32), batch)
    np.testing.assert_allclose(after - streams, expected.reshape(streams.shape), rtol=1e-3, atol=1e-4)
