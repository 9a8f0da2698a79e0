"""The formats against decoders written bit by bit from their description."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.checkpoint import trellis
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS, Exl3Linear, QuantizedEmbedding

PAIRS = [(codebook, bits) for codebook in CODEBOOKS for bits in WIDTHS if bits % 1 == 0 or codebook == "mul1"]
RINGS = [(width, bits) for width in (160, 256) for bits in range(1, 9)]


def half(bits: int) -> np.float16:
    return np.array(bits, np.uint16).view(np.float16)[()]


def decode(state: int, codebook: str) -> np.float16:
    """One state through a codebook, in integers."""
    if codebook == "mul1":
        x = state * 0x83DCD12D % 2**32
        h = 1024 + sum(x >> shift & 255 for shift in (0, 8, 16, 24))
        exact = h * Fraction(float(half(0x1EEE))) + Fraction(float(half(0xC931)))
        return np.float16(float(exact))  # 53 bits hold the exact value
    x = (state * 89226354 + 64248484 if codebook == "3inst" else state * 0xCBAC1FED) % 2**32
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return half(x & 0xFFFF) + half(x >> 16)


def tile_bit(words: np.ndarray, position: int) -> int:
    """Bit `position` of a tile's stream: the most significant of each little-endian 32-bit word comes first."""
    word, place = divmod(position, 32)
    low, high = int(words[2 * word]) & 0xFFFF, int(words[2 * word + 1]) & 0xFFFF
    return (high << 16 | low) >> (31 - place) & 1


def tile_state(words: np.ndarray, p: int, bits: float) -> int:
    length, a = int(256 * bits), int(bits)
    end = (p + 1) * a if bits == a else ((p + 1) * (2 * a + 1) - (p + 1) % 2) // 2
    state = 0
    for position in range(end - 16, end):
        state = state << 1 | tile_bit(words, position % length)
    return state


def ring_state(words: np.ndarray, i: int, bits: int) -> int:
    """The low bits are position i's symbol; the higher ones are the symbols before it."""
    count = len(words) * 16 // bits
    state = filled = 0
    while filled < 16:
        symbol = 0
        for b in range(bits):
            bit = (i % count) * bits + b
            symbol |= ((int(words[bit // 16]) & 0xFFFF) >> bit % 16 & 1) << b
        state |= symbol << filled
        filled += bits
        i -= 1
    return state & 0xFFFF


def random_words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16)


def hadamard(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_codebook_values_are_those_of_the_description(codebook):
    values = trellis.codebook_values(codebook)
    assert values.dtype == np.float16
    for state in [*range(64), *range(64, 65536, 61), 65535]:
        assert values[state].tobytes() == decode(state, codebook).tobytes()


def test_an_unknown_codebook_is_refused():
    with pytest.raises(ValueError, match="mul2"):
        trellis.codebook_values("mul2")


@pytest.mark.parametrize(("bits", "codebook"), [(0, "mul1"), (9, "mul1"), (4.5, "mul1"), (2.5, "mcg"), (1.5, "3inst")])
def test_widths_that_do_not_exist_are_refused(bits, codebook):
    with pytest.raises(ValueError, match=str(bits)):
        trellis.check_width(bits, codebook)


@pytest.mark.parametrize(("codebook", "bits"), PAIRS)
def test_a_tile_decodes_bit_by_bit(codebook, bits):
    rng = np.random.default_rng(int(100 * bits))
    packed = random_words(rng, 2, 1, int(16 * bits))
    linear = layer(rng, packed, codebook, bits, 32, 16)
    inner = trellis.dequantize_inner(linear)
    assert inner.shape == (32, 16)
    for tile in range(2):
        for p in range(256):
            lane, j = divmod(p, 8)
            row, column = 2 * (lane % 4) + (j & 1) + 8 * (j >> 1 & 1), lane // 4 + 8 * (j >> 2)
            expected = decode(tile_state(packed[tile, 0], p, bits), codebook)
            assert inner[16 * tile + row, column].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("width", "bits"), RINGS)
def test_a_ring_decodes_bit_by_bit(width, bits):
    rng = np.random.default_rng(width + bits)
    rows = random_words(rng, 2, 1 + width * bits // 16)
    rows[:, 0] = np.array([0.25, -3.5], np.float16).view(np.int16)
    bias = rng.integers(-64, 64, (2, width)).astype(np.float16) / 32
    decoded = trellis.dequantize_ngram_rows(rows, bits, bias)
    for r, scale in enumerate((0.25, -3.5)):
        for i in range(width):
            value = np.float32(decode(ring_state(rows[r, 1:], i, bits), "mul1")) * np.float32(scale)
            assert decoded[r, i] == value + np.float32(bias[r, i])


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32 - 1), tiles=st.integers(1, 3))
def test_packing_a_tile_undoes_unpacking(bits, seed, tiles):
    packed = random_words(np.random.default_rng(seed), tiles, 2, int(16 * bits))
    states = trellis.unpack_states(packed, bits)
    assert states.shape == (tiles, 2, 256)
    assert states.dtype == np.uint16
    assert np.array_equal(trellis.pack_states(states, bits), packed)


@settings(max_examples=40, deadline=None)
@given(ring=st.sampled_from(RINGS), seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4))
def test_packing_a_ring_undoes_unpacking(ring, seed, rows):
    width, bits = ring
    packed = random_words(np.random.default_rng(seed), rows, width * bits // 16)
    assert np.array_equal(trellis.pack_ring(trellis.unpack_ring(packed, bits), bits), packed)


def test_places_in_a_tile_are_a_permutation():
    matrix = np.arange(48 * 32).reshape(48, 32)
    assert sorted(trellis.tile_places()) == list(range(256))
    assert np.array_equal(trellis.tile_to_matrix(trellis.matrix_to_tile(matrix)), matrix)


@pytest.mark.parametrize(("in_features", "out_features"), [(256, 128), (200, 100), (129, 1)])
def test_dequantize_is_the_layer_as_a_matrix(in_features, out_features):
    rng = np.random.default_rng(5)
    k, n = -(-in_features // 128) * 128, -(-out_features // 128) * 128
    linear = layer(rng, random_words(rng, k // 16, n // 16, 48), "mcg", 3, in_features, out_features)
    rotate_in = np.kron(np.eye(k // 128), hadamard(128))
    rotate_out = np.kron(np.eye(n // 128), hadamard(128))
    inner = trellis.dequantize_inner(linear).astype(np.float64)
    expected = linear.suh[:, None].astype(np.float64) * (rotate_in @ inner @ rotate_out) * linear.svh.astype(np.float64)
    got = trellis.dequantize(linear)
    assert got.shape == (in_features, out_features)
    np.testing.assert_allclose(got, expected[:in_features, :out_features], rtol=0, atol=1e-12)
    assert np.array_equal(trellis.dequantize(linear, np.float32), got.astype(np.float32))


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_embedding_rows_are_rotated_back(bits):
    rng = np.random.default_rng(6)
    rings = random_words(rng, 5, 3, 1 + 16 * bits)
    rings[:, :, 0] = rng.integers(-32, 32, (5, 3)).astype(np.float16).view(np.int16)
    signs = rng.choice(np.array([-1, 1], np.float16), (3, 256))
    embedding = QuantizedEmbedding("embed", rings.reshape(5, -1), signs, bits, 600)
    values = trellis.dequantize_ngram_rows(rings, bits).astype(np.float64)
    expected = (values @ hadamard(256) * signs).reshape(5, -1)[:, :600]
    got = trellis.dequantize_embedding(embedding)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)
    picked = np.array([4, 0, 4])
    assert np.array_equal(trellis.dequantize_embedding(embedding, picked), got[picked])


def layer(rng, packed, codebook, bits, in_features, out_features) -> Exl3Linear:
    def scales(size):
        return (rng.integers(-64, 64, size) / 32).astype(np.float16)

    k, n = packed.shape[0] * 16, packed.shape[1] * 16
    return Exl3Linear("layer", packed, scales(k), scales(n), None, bits, codebook, in_features, out_features)
