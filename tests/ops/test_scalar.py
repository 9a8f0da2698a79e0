"""The scalar functions against float64 and decimal values, and the lanes against the definition written out."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from numba import njit

from isobit.ops import lanes, scalar

UNITS_ALLOWED = {"exp32": 1.0, "sigmoid32": 2.0, "silu32": 2.0, "softplus32": 2.0, "rsqrt32": 2.0}


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


TRUE_VALUES = {
    "exp32": np.exp,
    "sigmoid32": sigmoid,
    "silu32": lambda x: x * sigmoid(x),
    "softplus32": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "rsqrt32": lambda x: 1 / np.sqrt(x),
}


@pytest.fixture(scope="module")
def apply():
    """apply(name, x) runs every float32 function on every element of x, compiled as kernels are."""
    exp32, sigmoid32, silu32 = scalar.exp32, scalar.sigmoid32, scalar.silu32
    softplus32, rsqrt32 = scalar.softplus32, scalar.rsqrt32

    @njit(error_model="numpy")
    def all_functions(x, out):
        for i in range(x.size):
            out[0, i] = exp32(x[i])
            out[1, i] = sigmoid32(x[i])
            out[2, i] = silu32(x[i])
            out[3, i] = softplus32(x[i])
            out[4, i] = rsqrt32(x[i])

    def run(name, x):
        x = np.asarray(x, np.float32)
        out = np.empty((len(TRUE_VALUES), x.size), np.float32)
        all_functions(x, out)
        return out[list(TRUE_VALUES).index(name)]

    return run


def finite_float32(rng, a_value_of_each_exponent):
    """Values of every exponent and both signs, the exponents around 1 more often."""
    exponents = np.concatenate([np.arange(255), np.repeat(np.arange(100, 135), 16)])
    bits = rng.integers(0, 1 << 23, (a_value_of_each_exponent, 2, exponents.size), dtype=np.uint32)
    bits |= exponents.astype(np.uint32) << 23
    bits[:, 1] |= np.uint32(1 << 31)
    return bits.ravel().view(np.float32)


@pytest.mark.parametrize("name", TRUE_VALUES)
def test_within_its_units_in_the_last_place_over_all_exponents(apply, name):
    x = finite_float32(np.random.default_rng(1), 300)
    if name == "rsqrt32":
        x = np.abs(x)
    with np.errstate(all="ignore"):
        true = TRUE_VALUES[name](x.astype(np.float64))
    within_range = np.abs(true) < np.finfo(np.float32).max
    x, true = x[within_range], true[within_range]
    units = np.abs(apply(name, x).astype(np.float64) - true) / np.ldexp(1.0, np.maximum(np.frexp(true)[1] - 24, -149))
    assert units.max() <= UNITS_ALLOWED[name], f"{units.max()} units at {x[units.argmax()]!r}"


@pytest.mark.parametrize(
    ("name", "at_minus_infinity", "at_infinity", "at_zero"),
    [("exp32", 0, np.inf, 1), ("sigmoid32", 0, 1, 0.5), ("silu32", -0.0, np.inf, 0), ("softplus32", 0, np.inf, None)],
)
def test_limits_and_nan(apply, name, at_minus_infinity, at_infinity, at_zero):
    low, high, zero, nan = apply(name, [-np.inf, np.inf, 0, np.nan])
    assert (low, high) == (at_minus_infinity, at_infinity)
    assert np.signbit(low) == np.signbit(at_minus_infinity)
    assert at_zero is None or zero == at_zero
    assert np.isnan(nan)


def test_functions_on_lanes_are_those_of_each_value(apply):
    exp32, sigmoid32, silu32, softplus32 = scalar.exp32, scalar.sigmoid32, scalar.silu32, scalar.softplus32
    lanes_load, lanes_store = lanes.lanes_load, lanes.lanes_store

    @njit(error_model="numpy")
    def on_lanes(x, out):
        for i in range(0, x.size, 32):
            value = lanes_load(x, i)
            lanes_store(out, i, exp32(value))
            lanes_store(out, x.size + i, sigmoid32(value))
            lanes_store(out, 2 * x.size + i, silu32(value))
            lanes_store(out, 3 * x.size + i, softplus32(value))

    x = finite_float32(np.random.default_rng(6), 64)
    x = np.concatenate([x, np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 120.0, -120.0]), x[:25]])
    out = np.empty((4, x.size), np.float32)
    on_lanes(x, out)
    for name, values in zip(("exp32", "sigmoid32", "silu32", "softplus32"), out, strict=True):
        np.testing.assert_array_equal(values.view(np.int32), apply(name, x).view(np.int32), name)


def test_operators_on_lanes_take_lanes_and_single_values():
    lanes_load, lanes_store, select = lanes.lanes_load, lanes.lanes_store, scalar.select
    half = np.float32(0.5)

    @njit(error_model="numpy")
    def compute(a, b, out):
        x, y = lanes_load(a, 0), lanes_load(b, 0)
        lanes_store(out, 0, abs(-x) * half - y / x)
        lanes_store(out, 32, half + select(x < y, x, half) * y)
        lanes_store(out, 64, select(x >= half, y - half, half / x))
        lanes_store(out, 96, select(x > y, half, y))

    a, b = np.random.default_rng(7).standard_normal((2, 32)).astype(np.float32)
    out = np.empty((4, 32), np.float32)
    compute(a, b, out)
    assert out[0].tobytes() == (np.abs(a) * half - b / a).tobytes()
    assert out[1].tobytes() == (half + np.where(a < b, a, half) * b).tobytes()
    assert out[2].tobytes() == np.where(a >= half, b - half, half / a).tobytes()
    assert out[3].tobytes() == np.where(a > b, half, b).tobytes()


@pytest.mark.parametrize("count", [0, 1, 31, 32])
def test_first_lanes_are_read_and_written_alone(count):
    lanes_load_first, lanes_store_first = lanes.lanes_load_first, lanes.lanes_store_first

    @njit(error_model="numpy")
    def copy(x, out, read, written):
        lanes_store_first(out, 0, lanes_load_first(x, 0, read), written)

    x, out = np.arange(1, 34, dtype=np.float32), np.full(33, -1, np.float32)
    copy(x, out, count, 32)
    assert out.tolist() == [*x[:count], *[0.0] * (32 - count), -1.0]
    out[:] = -1
    copy(x, out, 32, count)
    assert out.tolist() == [*x[:count], *[-1.0] * (33 - count)]


def test_exp_rounds_subnormal_results_once(apply):
    x = np.linspace(-104, -93, 5001).astype(np.float32)
    error = np.abs(apply("exp32", x).astype(np.float64) - np.exp(x.astype(np.float64)))
    assert error.max() <= 0.51 * 2.0**-149


def test_round_to_half_is_nearest_even_and_saturates():
    round_to_half = scalar.round_to_half

    @njit(error_model="numpy")
    def rounded(x):
        return round_to_half(x)

    with np.errstate(over="ignore"):
        for x in finite_float32(np.random.default_rng(2), 1):
            expected = np.clip(np.float32(np.float16(x)), np.float32(-65504), np.float32(65504))
            assert rounded(x) == expected
    assert np.isnan(rounded(np.float32(np.nan)))


def decimal_sin_cos(x):
    """Taylor series of the exact argument, reduced by nothing: enough digits for |x| up to 100."""
    sine = cosine = Decimal(0)
    term = Decimal(1)
    for i in range(400):
        sign = -1 if i % 4 >= 2 else 1
        if i % 2:
            sine += sign * term
        else:
            cosine += sign * term
        term = term * x / (i + 1)
    return sine, cosine


def units64(value, true):
    """The distance in units in the last place of float64."""
    unit = np.ldexp(1.0, max(int(np.frexp(float(true))[1]) - 53, -1074))
    return abs(Decimal(float(value)) - true) / Decimal(unit)


def test_float64_functions_are_within_one_unit():
    exp64, log64, sincos64 = scalar.exp64, scalar.log64, scalar.sincos64

    @njit(error_model="numpy")
    def functions(x):
        sine, cosine = sincos64(x)
        return exp64(x), log64(abs(x)), sine, cosine

    rng = np.random.default_rng(3)
    arguments = np.concatenate(
        [rng.uniform(-90, 90, 60), rng.uniform(0.5, 2, 60), np.exp(rng.uniform(-60, 4, 60)), [np.pi / 2, np.pi, 1.0]]
    )
    with localcontext() as context:
        context.prec = 150
        for x in arguments.tolist():
            exact = Decimal(x)
            true = (exact.exp(), abs(exact).ln(), *decimal_sin_cos(exact))
            for value, expected in zip(functions(x), true, strict=True):
                assert value == expected or units64(value, expected) <= 1, x


def test_sincos_reduces_large_arguments():
    sincos64 = scalar.sincos64

    @njit(error_model="numpy")
    def sincos(x):
        return sincos64(x)

    for x in (262143.0, 262143.9921875, 1048575.5):
        assert sincos(x) == pytest.approx((np.sin(x), np.cos(x)), abs=2e-16)


def test_float64_limits():
    exp64, log64 = scalar.exp64, scalar.log64

    @njit(error_model="numpy")
    def functions(x):
        return exp64(x), log64(x)

    assert functions(np.inf) == (np.inf, np.inf)
    assert functions(-np.inf)[0] == 0
    assert functions(0.0) == (1.0, -np.inf)
    assert functions(5e-324)[1] == pytest.approx(-744.4400719213812, rel=1e-15)
    assert functions(-745.2)[0] == 0
    assert 0 < functions(-745.0)[0] < 1e-322
    assert np.isnan(functions(-1.0)[1])
    assert np.isnan(functions(np.nan)).all()


@pytest.fixture(scope="module")
def lane_functions():
    lane_dot, lane_sum_squares, lane_sum, fma32 = lanes.lane_dot, lanes.lane_sum_squares, lanes.lane_sum, scalar.fma32

    @njit(error_model="numpy")
    def vectorised(a, b):
        return lane_dot(a, b), lane_sum_squares(a), lane_sum(b)

    @njit(error_model="numpy")
    def written_out(a, b, sums):
        for i in range(a.size):
            lane = i % 32
            sums[0, lane] = fma32(a[i], b[i], sums[0, lane])
            sums[1, lane] = fma32(a[i], a[i], sums[1, lane])
            sums[2, lane] = sums[2, lane] + b[i]
        for half in (16, 8, 4, 2, 1):
            for kind in range(3):
                for lane in range(half):
                    sums[kind, lane] = sums[kind, lane] + sums[kind, lane + half]

    def definition(a, b):
        sums = np.zeros((3, 32), np.float32)
        written_out(a, b, sums)
        return sums[:, 0]

    return vectorised, definition


@pytest.mark.parametrize("count", [0, 1, 5, 31, 32, 33, 63, 64, 100, 160, 320, 2561])
def test_lane_sums_are_the_definition(lane_functions, count):
    vectorised, definition = lane_functions
    rng = np.random.default_rng(count)
    a, b = rng.standard_normal((2, count)).astype(np.float32) * np.float32(10.0) ** rng.integers(-5, 5, (2, count))
    a, b = a.astype(np.float32), b.astype(np.float32)
    assert np.array(vectorised(a, b), np.float32).tobytes() == definition(a, b).tobytes()


def test_lane_sums_use_wide_fused_multiply_add(lane_functions):
    vectorised, _ = lane_functions
    vectorised(np.ones(64, np.float32), np.ones(64, np.float32))
    llvm = next(iter(vectorised.inspect_llvm().values()))
    assert "llvm.fma.v32f32" in llvm


def test_lanes_refuse_arrays_they_cannot_load():
    lane_sum = lanes.lane_sum

    @njit(error_model="numpy")
    def total(x):
        return lane_sum(x)

    with pytest.raises(Exception, match="C-contiguous float32"):
        total(np.ones((4, 4), np.float32)[:, 0])
    with pytest.raises(Exception, match="C-contiguous float32"):
        total(np.ones(4))
