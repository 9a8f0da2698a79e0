"""Token embeddings: exact when plain, the ring codec and its rotation when quantized."""

import numpy as np
import pytest

from isobit.checkpoint.trellis import GROUP, butterfly, dequantize_ngram_rows
from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding
from isobit.errors import CheckpointError
from isobit.ops.embedding.cpu import embed, prepare_embedding

VOCABULARY = 50


def ids(rows=300):
    return np.random.default_rng(0).integers(0, VOCABULARY, rows).astype(np.int32)


def quantized(bits, hidden):
    rng = np.random.default_rng(bits)
    groups = -(-hidden // GROUP)
    rings = rng.integers(-(2**15), 2**15, (VOCABULARY, groups, 1 + 16 * bits)).astype(np.int16)
    rings[..., 0] = rng.standard_normal((VOCABULARY, groups)).astype(np.float16).view(np.int16)
    signs = rng.choice(np.array([1, -1], np.float16), (groups, GROUP))
    return QuantizedEmbedding("embed_tokens", rings.reshape(VOCABULARY, -1), signs, bits, hidden)


def as_defined(weights, rows):
    """docs/arithmetic.md, *embedding*, in float32 NumPy, one rounding a step."""
    rings = weights.trellis[rows].reshape(len(rows), len(weights.signs), -1)
    values = butterfly(dequantize_ngram_rows(rings, weights.bits), GROUP)
    values = values * np.float32(1 / 16) * weights.signs.astype(np.float32)
    return values.reshape(len(rows), -1)[:, : weights.hidden]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("hidden", [256, 300])
def test_quantized_rows_are_those_of_the_definition(bits, hidden):
    weights = quantized(bits, hidden)
    rows = ids()
    together = embed(rows, prepare_embedding(weights))
    assert together.tobytes() == as_defined(weights, rows).tobytes()
    assert embed(rows[7:8], prepare_embedding(weights)).tobytes() == together[7:8].tobytes()


@pytest.mark.parametrize("kind", ["float16", "float32", "bfloat16"])
def test_plain_rows_widen_exactly(kind):
    values = np.random.default_rng(1).standard_normal((VOCABULARY, 40)).astype(np.float32)
    values[3] = [np.inf, -np.inf, -0.0, 6e-8, *values[3, 4:]]
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if kind == "bfloat16":
        stored = PlainEmbedding("embed", (values.view(np.uint32) >> 16).astype(np.uint16), 40, bfloat16=True)
    else:
        values = values.astype(kind).astype(np.float32)
        stored = PlainEmbedding("embed", values.astype(kind), 40)
    assert embed(ids(), prepare_embedding(stored)).tobytes() == values[ids()].tobytes()


def test_only_the_rows_asked_for_are_read(tmp_path):
    table = np.arange(VOCABULARY * 8, dtype=np.float16).reshape(VOCABULARY, 8)
    table.tofile(tmp_path / "table")
    mapped = np.memmap(tmp_path / "table", np.float16, "r", shape=table.shape)
    handle = prepare_embedding(PlainEmbedding("embed", mapped, 8))
    assert np.shares_memory(handle.table, mapped)
    np.testing.assert_array_equal(embed(np.array([4, 0], np.int32), handle), table[[4, 0]].astype(np.float32))


def test_an_id_outside_the_table_is_an_error():
    handle = prepare_embedding(quantized(3, 256))
    with pytest.raises(IndexError):
        embed(np.array([VOCABULARY], np.int32), handle)


def test_tensors_that_do_not_fit_are_refused():
    weights = quantized(4, 300)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        prepare_embedding(QuantizedEmbedding("embed_tokens", weights.trellis, weights.signs, 5, 300))
    with pytest.raises(CheckpointError, match="embed"):
        prepare_embedding(PlainEmbedding("embed", np.zeros((3, 4), np.float32), 5))
