"""The linear op: its formats bit by bit, its definition, and the equality of all ways to compute it."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.checkpoint.trellis import codebook_values, dequantize_inner, tile_to_matrix, unpack_states
from isobit.checkpoint.weights import CODEBOOKS, SCANNED_BYTES, PlainLinear, all_finite
from isobit.errors import CheckpointError
from isobit.ops import set_threads
from isobit.ops.linear import cpu, parallel
from isobit.ops.linear.contract import adversarial_rows, all_formats, random_plain, random_trellis
from isobit.ops.linear.cpu import IN_PANELS, ROW_BY_ROW, linear, prepare_linear
from isobit.ops.linear.stored import narrowest_format
from isobit.ops.linear.tiles import BFLOAT16, FLOAT16, FLOAT32, tile_format, trellis_format
from isobit.ops.work import forced_pieces

from . import naive_linear

COMPILED = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(2)


def decode(trellis, codebook, bits):
    """All tiles through the compiled decoder: float32 [K, N]."""
    stored = tile_format(trellis_format(codebook, bits))
    rows, columns, _ = trellis.shape
    panels = np.full((columns, 16 * rows, 16), np.nan, np.float32)
    row_bytes = columns * stored.tile_bytes
    COMPILED(stored.decode)(trellis.ctypes.data, row_bytes, rows, columns, panels.ctypes.data, 16 * rows * 64)
    return panels.transpose(1, 0, 2).reshape(16 * rows, 16 * columns)


@pytest.mark.parametrize(("codebook", "bits"), all_formats())
def test_every_format_decodes_as_described(codebook, bits):
    rng = np.random.default_rng(int(10 * bits))
    trellis = rng.integers(-(2**15), 2**15, (3, 5, int(16 * bits)), dtype=np.int16)
    expected = tile_to_matrix(codebook_values(codebook)[unpack_states(trellis, bits)])
    np.testing.assert_array_equal(decode(trellis, codebook, bits), expected.astype(np.float32))


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_state_has_its_codebook_value(codebook):
    bits, tiles = (3 if codebook == "mul1" else 4), 6000
    trellis = np.random.default_rng(1).integers(-(2**15), 2**15, (1, tiles, 16 * bits), dtype=np.int16)
    states = unpack_states(trellis, bits)
    assert np.unique(states).size == 65536
    expected = tile_to_matrix(codebook_values(codebook)[states]).astype(np.float32)
    assert decode(trellis, codebook, bits).tobytes() == expected.tobytes()


CASES = {
    "padded, with bias": lambda rng: random_trellis(rng, 200, 300, "mul1", 3, bias=True),
    "half width": lambda rng: random_trellis(rng, 256, 128, "mul1", 2.5),
    "mcg": lambda rng: random_trellis(rng, 128, 200, "mcg", 4),
    "3inst": lambda rng: random_trellis(rng, 128, 128, "3inst", 5),
    "4 shards": lambda rng: random_trellis(rng, 4200, 128, "mul1", 3),
    "float16": lambda rng: random_plain(rng, 200, 70, "float16"),
    "bfloat16": lambda rng: random_plain(rng, 33, 200, "bfloat16"),
    "float32": lambda rng: random_plain(rng, 150, 1, "float32"),
    "4 plain shards": lambda rng: random_plain(rng, 4100, 20, "float32"),
    "4 narrow shards": lambda rng: random_plain(rng, 4100, 3, "float16"),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_definition(name):
    rng = np.random.default_rng(2)
    weights = CASES[name](rng)
    x = adversarial_rows(rng, 25, weights.in_features)
    expected = naive_linear.linear(x, weights)
    handle = prepare_linear(weights)
    for how in (ROW_BY_ROW, IN_PANELS):
        assert linear(x, handle, how).tobytes() == expected.tobytes()


HANDLES = {}


def handle_of(name):
    if name not in HANDLES:
        HANDLES[name] = prepare_linear(CASES[name](np.random.default_rng(3)))
    return HANDLES[name]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(CASES)), st.integers(1, 120), st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
def test_a_row_does_not_depend_on_its_company(name, rows, seed, threads):
    handle = handle_of(name)
    rng = np.random.default_rng(seed)
    x = adversarial_rows(rng, rows, handle.in_features)
    set_threads(threads)
    together = linear(x, handle)
    chosen = rng.permutation(rows)[: rng.integers(1, rows + 1)]
    assert linear(x[chosen], handle).tobytes() == together[chosen].tobytes()
    assert linear(x[:1], handle).tobytes() == together[:1].tobytes()


def test_passes_of_few_rows_change_nothing(monkeypatch):
    handle = handle_of("4 shards")
    x = adversarial_rows(np.random.default_rng(4), 61, handle.in_features)
    expected = linear(x, handle)
    monkeypatch.setattr(cpu, "MOST_ROWS", 7)
    assert linear(x, handle).tobytes() == expected.tobytes()


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 16])
def test_any_number_of_parts_covers_every_output(parts, monkeypatch):
    monkeypatch.setattr(parallel, "threads", lambda: parts)
    for name in ("padded, with bias", "float16"):
        handle = handle_of(name)
        x = adversarial_rows(np.random.default_rng(5), 40, handle.in_features)
        for rows in (1, 3, 40):
            expected = np.concatenate([linear(x[i : i + 1], handle, ROW_BY_ROW) for i in range(rows)])
            with forced_pieces(parts):
                assert linear(x[:rows], handle).tobytes() == expected.tobytes()


def test_no_rows_give_no_rows():
    assert linear(np.empty((0, 200), np.float32), handle_of("padded, with bias")).shape == (0, 300)


def test_tiles_are_used_where_they_lie_also_when_read_only(tmp_path):
    rng = np.random.default_rng(6)
    weights = random_trellis(rng, 128, 256, "mul1", 3)
    # One odd byte in front, as in a safetensors file.
    path = tmp_path / "tiles"
    path.write_bytes(b"\0\0" + weights.trellis.tobytes())
    mapped = np.memmap(path, np.int16, "r", 2, weights.trellis.shape)
    handle = prepare_linear(replace(weights, trellis=mapped))
    assert any(np.shares_memory(array, mapped) for array in handle.arrays)
    x = adversarial_rows(rng, 9, 128)
    assert linear(x, handle).tobytes() == linear(x, prepare_linear(weights)).tobytes()


@pytest.mark.parametrize(("kind", "number"), [("float16", FLOAT16), ("bfloat16", BFLOAT16), ("float32", FLOAT32)])
def test_plain_weights_take_the_narrowest_exact_format(kind, number):
    weights = random_plain(np.random.default_rng(7), 64, 64, kind)
    if kind == "bfloat16":
        weights = replace(weights, weight=weights.weight * np.float32(2.0**-60))
    handle = prepare_linear(replace(weights, bias=None))
    assert handle.nbytes == 64 * 64 * (4 if number == FLOAT32 else 2)
    assert handle.record[cpu.product.DECODE] == tile_format(number).decode


def test_a_format_is_taken_only_where_it_holds_every_value():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    shorts = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    shorts = shorts[np.isfinite(shorts)]
    assert narrowest_format(halves[None]) == FLOAT16
    assert narrowest_format(shorts[None]) == BFLOAT16
    beside = [np.nextafter(halves, np.float32(side)) for side in (np.inf, -np.inf)]
    beside += [halves * np.float32(0.5), shorts, np.array([65520, 65536, 1e-45], np.float32)]
    for value in np.concatenate(beside)[::61]:
        with np.errstate(over="ignore"):
            exact = value.astype(np.float16) == value
        bfloat16 = not value.view(np.uint32) & 0xFFFF
        expected = FLOAT16 if exact else BFLOAT16 if bfloat16 else FLOAT32
        assert narrowest_format(value.reshape(1, 1)) == expected


def test_a_half_is_finite_by_its_bits_as_by_its_value():
    for value in np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1):
        assert all_finite(value) == np.isfinite(value[0])
    assert all_finite(np.empty((0, 3), np.float16))
    assert not all_finite(np.array([[1, 2], [np.nan, 3]], np.float16)[:, ::2])


def test_of_bfloat16_too():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    for stored, value in zip(bits, (bits.astype(np.uint32) << 16).view(np.float32), strict=True):
        assert all_finite(stored, bfloat16=True) == np.isfinite(value[0])


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_large_array_is_looked_at_to_its_end(kind):
    values = np.zeros((3, SCANNED_BYTES // 5), kind)
    for place in ((0, 0), (1, 7), (2, -1)):
        assert all_finite(values)
        values[place] = -np.inf
        assert not all_finite(values)
        assert not all_finite(values.reshape(-1))
        values[place] = 0
    assert all_finite(np.float32(1))
    assert not all_finite(np.float16(np.nan))


def test_halves_as_stored_give_the_bytes_of_floats():
    rng = np.random.default_rng(12)
    weights = random_plain(rng, 150, 41, "float16")
    stored = replace(weights, weight=weights.weight.astype(np.float16))
    x = adversarial_rows(rng, 9, 150)
    assert linear(x, prepare_linear(stored)).tobytes() == linear(x, prepare_linear(weights)).tobytes()
    with pytest.raises(CheckpointError, match="weight holds NaN or infinite values"):
        prepare_linear(replace(stored, weight=np.full((2, 3), np.inf, np.float16)))
    with pytest.raises(CheckpointError, match=r"float64 .* expected float32 or float16 \[N, K\]"):
        prepare_linear(replace(stored, weight=np.ones((2, 3))))


def test_a_weight_too_large_for_half_is_kept():
    weights = PlainLinear("large", np.array([[1e30, -0.0, 65520.0]], np.float32))
    x = np.array([[1.0, 2.0, 1e-3]], np.float32)
    assert linear(x, prepare_linear(weights)).tobytes() == naive_linear.linear(x, weights).tobytes()


def test_chains_do_not_reassociate():
    weights = PlainLinear("cancelling", np.array([[1e8, 1.0, -1e8, 1.0]], np.float32))
    assert linear(np.ones((1, 4), np.float32), prepare_linear(weights))[0, 0] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"suh": w.suh[:-1]}, "suh"),
        (lambda w: {"svh": w.svh.astype(np.float32)}, "svh"),
        (lambda w: {"bits": 4}, "trellis"),
        (lambda w: {"trellis": w.trellis.astype(np.int32)}, "trellis"),
        (lambda w: {"in_features": 300}, "300"),
        (lambda w: {"out_features": 0}, "0"),
        (lambda w: {"bias": np.zeros(3, np.float16)}, "bias"),
        (lambda w: {"suh": np.where(np.arange(128) == 5, np.float16(np.nan), w.suh)}, "suh holds NaN"),
        (lambda w: {"svh": np.where(np.arange(128) == 5, np.float16(np.inf), w.svh)}, "svh holds NaN or inf"),
        (lambda w: {"bias": np.full(128, np.nan, np.float16)}, "bias holds NaN"),
        (lambda w: {"trellis": w.trellis[:3], "suh": w.suh[:48], "in_features": 48}, "multiples of 128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    weights = random_trellis(np.random.default_rng(8), 128, 128, "mul1", 3)
    with pytest.raises(CheckpointError, match=message) as error:
        prepare_linear(replace(weights, **change(weights)))
    assert weights.name in str(error.value)
    assert "\n" not in str(error.value)


def test_plain_weights_that_are_not_finite_are_refused():
    weights = PlainLinear("mlp", np.array([[1.0, np.nan]], np.float32))
    with pytest.raises(CheckpointError, match="mlp: weight holds NaN"):
        prepare_linear(weights)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="expected 200"):
        linear(np.zeros((1, 201), np.float32), handle_of("padded, with bias"))


def test_dequantized_inner_matrix_is_what_decoding_gives():
    weights = random_trellis(np.random.default_rng(9), 128, 128, "mul1", 1.5)
    np.testing.assert_array_equal(decode(weights.trellis, "mul1", 1.5), dequantize_inner(weights).astype(np.float32))


@pytest.mark.parametrize("x", [np.zeros((2, 200)), np.zeros((200, 2), np.float32).T])
def test_rows_of_another_type_or_layout_are_refused(x):
    with pytest.raises(TypeError):
        linear(x, handle_of("padded, with bias"))


def test_tall_plain_weights_are_converted_in_pieces(monkeypatch):
    weights = random_plain(np.random.default_rng(10), 40, 100, "float32")
    x = adversarial_rows(np.random.default_rng(11), 3, 40)
    expected = linear(x, prepare_linear(weights))
    monkeypatch.setattr(cpu, "PREPARED_ROWS", 32)
    assert linear(x, prepare_linear(weights)).tobytes() == expected.tobytes()
