"""The trellis search and what is built on it."""

import hashlib

import numpy as np
import pytest

from isobit.checkpoint import quantize, trellis
from isobit.checkpoint.search import search
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS

# The largest error a unit of Gaussian power, by bits.
LIMITS = {2: 0.072, 3: 0.0187, 4: 0.0049}
HALF_LIMITS = {1.5: 0.146, 2.5: 0.0365, 3.5: 0.0092}


def bell(seed: int, *shape: int) -> np.ndarray:
    """float32, nearly Gaussian of deviation 1, from integers alone: the same on any machine."""
    raw = np.random.Philox(key=seed).random_raw(12 * int(np.prod(shape))).reshape(*shape, 12) >> np.uint64(44)
    return ((raw.sum(axis=-1).astype(np.int64) - 6 * (1 << 20)) / (1 << 20)).astype(np.float32)


def error_share(weight: np.ndarray, approximation: np.ndarray) -> float:
    return float(np.square(weight - approximation).sum() / np.square(weight.astype(np.float64)).sum())


def fresh_bits(p: int, bits: float) -> int:
    return int(bits) if p % 2 == 0 else int(bits + 0.5)


def best_states(target: np.ndarray, bits: float, codebook: str, seam: int) -> np.ndarray:
    """Viterbi over all states, position by position, with `seam` the bits handed on across the ring's end."""
    values = trellis.codebook_values(codebook).astype(np.float64)
    states, origins = np.arange(65536), []
    cost = np.where(states % (65536 >> fresh_bits(0, bits)) == seam, 0.0, np.inf)
    for p, x in enumerate(target.astype(np.float64)):
        fresh = fresh_bits(p, bits)
        by_handed_on = cost.reshape(1 << fresh, -1)
        origins.append(by_handed_on.argmin(axis=0))
        cost = by_handed_on.min(axis=0)[states >> fresh] + np.square(values - x)
    closing = np.where(states % (65536 >> fresh_bits(0, bits)) == seam, cost, np.inf)
    path = [int(closing.argmin())]
    for p in range(len(target) - 1, 0, -1):
        handed_on = path[-1] >> fresh_bits(p, bits)
        path.append((int(origins[p][handed_on]) << (16 - fresh_bits(p, bits))) | handed_on)
    return np.array(path[::-1])


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_path_is_the_closest_through_its_seam(bits):
    target = bell(int(10 * bits), 1, 32)
    states = search(target, bits, "mul1")[0].astype(np.int64)
    seam = int(states[-1]) % (65536 >> fresh_bits(0, bits))
    assert states[0] >> fresh_bits(0, bits) == seam
    values = trellis.codebook_values("mul1").astype(np.float64)

    def cost(path):
        return np.square(values[path] - target[0]).sum()

    assert cost(states) == pytest.approx(cost(best_states(target[0], bits, "mul1", seam)), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("length", [160, 256])
def test_the_path_bites_its_tail(bits, length):
    states = search(bell(7, 3, length), bits, "mul1").astype(np.int64)
    for p in range(length):
        before, fresh = states[:, p - 1], fresh_bits(p, bits)
        assert np.array_equal(states[:, p] >> fresh, before % (65536 >> fresh))


@pytest.mark.parametrize(
    ("codebook", "bits", "limit"),
    [(codebook, bits, limit) for codebook in CODEBOOKS for bits, limit in LIMITS.items()]
    + [("mul1", bits, limit) for bits, limit in HALF_LIMITS.items()],
)
def test_gaussian_weights_keep_the_promised_error(codebook, bits, limit):
    tiles = bell(11, 20, 256)
    deviation = np.float32(quantize.BEST_DEVIATION[codebook][bits])
    states = search(tiles * deviation, bits, codebook, threads=2)
    values = trellis.codebook_values(codebook)[states].astype(np.float64)
    assert error_share(tiles, values * (tiles * values).sum() / np.square(values).sum()) <= limit


@pytest.mark.parametrize("bits", [1, 2.5, 3, 6])
def test_the_number_of_threads_changes_nothing(bits):
    tiles = bell(12, 5, 256)
    one = search(tiles, bits, "mul1", threads=1)
    assert np.array_equal(search(tiles, bits, "mul1", threads=2), one)
    assert np.array_equal(search(tiles, bits, "mul1", threads=9), one)
    assert np.array_equal(search(tiles[3:4], bits, "mul1")[0], one[3])


def test_a_quantized_layer_has_the_same_bytes_on_any_machine():
    digest = hashlib.sha256()
    for bits in (2, 4):
        linear = quantize.quantize_linear(bell(13, 100, 200), bits, "mcg", name="model.layer", bias=bell(14, 100))
        for _, tensor in sorted(quantize.stored_tensors(linear).items()):
            digest.update(tensor.tobytes())
    assert digest.hexdigest() == "19bc64b8123529729784d93db9fb6ec1d6b0e92c3106946e9ec016f9275d1f74"


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_layer_reads_back(codebook):
    weight = bell(15, 100, 200) * np.float32(0.02)
    linear = quantize.quantize_linear(weight, 5, codebook, name="a")
    assert (linear.k, linear.n, linear.in_features, linear.out_features) == (256, 128, 200, 100)
    assert error_share(weight.T, trellis.dequantize(linear)) < 0.0013
    stored = quantize.stored_tensors(linear)
    assert {name: (array.dtype, array.shape) for name, array in stored.items()} == {
        "trellis": (np.dtype(np.int16), (16, 8, 80)),
        "suh": (np.dtype(np.float16), (256,)),
        "svh": (np.dtype(np.float16), (128,)),
        **({} if codebook == "3inst" else {codebook: (np.dtype(np.int32), ())}),
    }


def test_signs_follow_the_name():
    weight = bell(16, 128, 128)
    first, again, other = (quantize.quantize_linear(weight, 8, name=name) for name in ("a", "a", "b"))
    assert np.array_equal(first.trellis, again.trellis)
    assert not np.array_equal(np.signbit(first.suh), np.signbit(other.suh))
    assert 32 < np.signbit(first.suh).sum() < 96
    assert 32 < np.signbit(first.svh).sum() < 96


@pytest.mark.parametrize(
    ("weight", "limit"),
    [
        (np.full((128, 128), 0.3, np.float32), 0.02),
        (np.eye(128, dtype=np.float32), 0.01),
        (bell(17, 128, 128) * np.float32(1e7), 0.006),
        (bell(17, 128, 128) * np.float32(1e-7), 0.006),
        (bell(17, 128, 128) * np.exp2(np.arange(-64, 64) / 16).astype(np.float32)[:, None], 0.006),
        (bell(17, 128, 128) * np.exp2(np.arange(-64, 64) / 16).astype(np.float32), 0.006),
    ],
    ids=["constant", "identity", "huge", "tiny", "uneven outputs", "uneven inputs"],
)
def test_unusual_weights(weight, limit):
    linear = quantize.quantize_linear(weight, 4, name="odd")
    assert np.isfinite(linear.suh).all()
    assert np.isfinite(linear.svh).all()
    assert error_share(weight.T, trellis.dequantize(linear)) < limit


def test_zero_weights_stay_zero():
    weight = bell(18, 128, 256)
    weight[5:9] = 0
    weight[:, 130:] = 0
    matrix = trellis.dequantize(quantize.quantize_linear(weight, 8, name="part"))
    assert not matrix[:, 5:9].any()
    assert not matrix[130:].any()
    assert error_share(weight.T, matrix) < 0.0001
    assert not trellis.dequantize(quantize.quantize_linear(np.zeros((128, 128), np.float32), 8)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    weight = np.zeros((128, 128), np.float32)
    weight[3, 4] = bad
    with pytest.raises(quantize.QuantizeError, match=r"layers\.3\.q_proj"):
        quantize.quantize_linear(weight, 3, name="layers.3.q_proj")


def test_weights_too_large_for_the_scales_are_refused():
    with pytest.raises(quantize.QuantizeError, match="too large"):
        quantize.quantize_linear(np.full((128, 128), 1e30, np.float32), 3, name="q_proj")


def test_half_widths_need_mul1():
    with pytest.raises(ValueError, match=r"2\.5"):
        quantize.quantize_linear(np.zeros((128, 128), np.float32), 2.5, "mcg")


@pytest.mark.parametrize(("bits", "limit"), [(2, 0.09), (5, 0.0025), (8, 0.0002)])
def test_ngram_rows_read_back(bits, limit):
    rows, bias = bell(19, 40, 160) * np.float32(0.05), bell(20, 40, 160).astype(np.float16)
    rows[7] = 0
    packed = quantize.quantize_ngram_rows(rows + bias.astype(np.float32), bits, bias)
    assert packed.shape == (40, 1 + 10 * bits)
    assert packed.dtype == np.int16
    decoded = trellis.dequantize_ngram_rows(packed, bits)
    assert error_share(rows, decoded) < limit
    assert not quantize.quantize_ngram_rows(np.zeros((2, 160), np.float32), bits)[:, 0].any()


def test_rows_are_quantized_each_alone():
    rows = bell(21, 6, 160)
    together = quantize.quantize_ngram_rows(rows, 4)
    assert np.array_equal(quantize.quantize_ngram_rows(rows[2:3], 4)[0], together[2])


@pytest.mark.parametrize(("bits", "limit"), [(3, 0.02), (6, 0.0004)])
def test_embeddings_read_back(bits, limit):
    weight = bell(22, 12, 300)
    weight[:, 17] *= 40
    embedding = quantize.quantize_embedding(weight, bits, name="embed")
    assert embedding.trellis.shape == (12, 2 * (1 + 16 * bits))
    assert set(np.unique(embedding.signs)) == {-1.0, 1.0}
    assert error_share(weight, trellis.dequantize_embedding(embedding)) < limit


def test_sums_have_one_order():
    a, b, c, d, e, f, g = values = bell(23, 7, 3).astype(np.float64)
    assert np.array_equal(quantize.ordered_sum(values), ((a + d) + (c + f)) + ((b + e) + g))
