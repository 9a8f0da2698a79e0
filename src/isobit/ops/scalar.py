"""Arithmetic that every CPU kernel is built from: explicit fused multiply-add, half precision, own functions.

Each function is one sequence of IEEE basic operations, so all CPUs give the same bits. None calls a math library.
`fma32`, `select` and the functions of e^x in float32 also take lanes (`lane_type`): what they do to one value, in every
lane.
"""

from math import factorial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending as numba_extending
from numba import njit, types

from isobit.ops.lane_type import INDEX, LANES, call_on_lanes, in_every_lane, lanes_type, widest

f32 = np.float32
intrinsic: Any = numba_extending.intrinsic  # its stub describes the undecorated function, not what kernels call


@intrinsic
def fma32(typingctx, a, b, c):
    """a * b + c in float32, rounded once."""

    def codegen(context, builder, signature, args):
        if signature.return_type is types.float32:
            return builder.fma(*args)
        return call_on_lanes(builder, "llvm.fma", [in_every_lane(builder, value) for value in args])

    if widest(a, b, c) is lanes_type:
        return lanes_type(a, b, c), codegen
    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def select(typingctx, condition, a, b):
    """a where the condition holds, b elsewhere: a boolean and float32, or a mask and lanes or float32."""

    def codegen(context, builder, signature, args):
        values = args[1:]
        if signature.return_type is lanes_type:
            values = [in_every_lane(builder, value) for value in values]
        return builder.select(args[0], *values)

    if condition is types.boolean:
        return widest(a, b)(condition, a, b), codegen
    return lanes_type(condition, a, b), codegen


@intrinsic
def fma64(typingctx, a, b, c):
    """a * b + c in float64, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float64(types.float64, types.float64, types.float64), codegen


@intrinsic
def half_bits(typingctx, x):
    """The binary16 bits of a float32, rounded to nearest even (overflow gives infinity)."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def from_half_bits(typingctx, bits):
    """The float32 value of binary16 bits (exact)."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_bits(typingctx, x):
    """The bits of a float32 as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def from_float_bits(typingctx, bits):
    """The float32 with the given int32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


HALF_MAX = f32(65504.0)


@njit(inline="always")
def round_to_half(x):
    """x rounded to the nearest binary16 value, saturating at +-65504, as float32; NaN stays NaN."""
    if x > HALF_MAX:
        x = HALF_MAX
    elif x < -HALF_MAX:
        x = -HALF_MAX
    return from_half_bits(half_bits(x))


@intrinsic
def power_of_two(typingctx, n):
    """2^n for a whole float32 n from -126 to 127 (exact); anything else gives some number."""

    def codegen(context, builder, signature, args):
        kind, whole = args[0].type, ir.IntType(32)
        shift, places = ir.FloatType()(float(ROUNDING_SHIFT) + 127.0), whole(23)
        if n is lanes_type:
            whole = ir.VectorType(INDEX, LANES)
            shift, places = in_every_lane(builder, shift), in_every_lane(builder, places)
        biased = builder.fadd(args[0], shift)
        return builder.bitcast(builder.shl(builder.bitcast(biased, whole), places), kind)

    return widest(n)(widest(n)), codegen


@intrinsic
def double_bits(typingctx, x):
    """The bits of a float64 as an int64."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def from_double_bits(typingctx, bits):
    """The float64 with the given int64 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


scalar_function = njit(forceinline=True, nogil=True, error_model="numpy")

ROUNDING_SHIFT = f32(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to a whole number
LOG2_E = f32(float.fromhex("0x1.715476p+0"))
LN2_HIGH = f32(float.fromhex("0x1.62e4p-1"))  # 15 bits, so that its product with a small whole number is exact
LN2_LOW = f32(float.fromhex("0x1.7f7d1cp-20"))
EXP_2 = f32(float.fromhex("0x1.000000p-1"))
EXP_3 = f32(float.fromhex("0x1.555556p-3"))
EXP_4 = f32(float.fromhex("0x1.5554e8p-5"))
EXP_5 = f32(float.fromhex("0x1.1110e0p-7"))
EXP_6 = f32(float.fromhex("0x1.6d4362p-10"))
EXP_7 = f32(float.fromhex("0x1.a12528p-13"))
LOG1P_1 = f32(float.fromhex("0x1.555556p-4"))
LOG1P_2 = f32(float.fromhex("0x1.9998d4p-7"))
LOG1P_3 = f32(float.fromhex("0x1.24c926p-9"))
LOG1P_4 = f32(float.fromhex("0x1.bc8cf8p-12"))
LOG1P_5 = f32(float.fromhex("0x1.dba260p-14"))

ZERO = f32(0.0)
HALF = f32(0.5)
ONE = f32(1.0)
EXP_HIGHEST = f32(90.0)
EXP_LOWEST = f32(-120.0)


@scalar_function
def exp_parts32(x):
    """(s, f) with e^x = s * f for x from -120 to 90: s is normal and f a power of two, so s * f rounds once."""
    n = fma32(x, LOG2_E, ROUNDING_SHIFT) - ROUNDING_SHIFT
    exact = fma32(n, -LN2_HIGH, x)
    r = fma32(n, -LN2_LOW, exact)
    r_rest = fma32(n, -LN2_LOW, exact - r)
    q = fma32(EXP_7, r, EXP_6)
    q = fma32(q, r, EXP_5)
    q = fma32(q, r, EXP_4)
    q = fma32(q, r, EXP_3)
    q = fma32(q, r, EXP_2)
    p = fma32(q, r * r, r_rest)
    scale = fma32(n, HALF, ROUNDING_SHIFT) - ROUNDING_SHIFT
    return (ONE + (r + p)) * power_of_two(scale), power_of_two(n - scale)


@scalar_function
def exp32(x):
    """e^x in float32, within 1 unit in the last place; subnormal results are rounded once."""
    bounded = select(x > EXP_HIGHEST, EXP_HIGHEST, x)
    bounded = select(bounded < EXP_LOWEST, EXP_LOWEST, bounded)
    scaled, factor = exp_parts32(bounded)
    return scaled * factor


@scalar_function
def divide_by_one_plus(numerator, numerator_rest, e):
    """(numerator + numerator_rest) / (1 + e) for 0 <= e <= 1, rounded nearly once."""
    d = ONE + e
    d_rest = e - (d - ONE)
    inverse = ONE / d
    quotient = numerator * inverse
    residual = fma32(-quotient, d, numerator)
    residual = fma32(-quotient, d_rest, residual + numerator_rest)
    return fma32(residual, inverse, quotient)


@scalar_function
def sigmoid32(x):
    """1 / (1 + e^-x) in float32, within 2 units in the last place."""
    below = -abs(x)
    bounded = select(below < EXP_LOWEST, EXP_LOWEST, below)
    scaled, factor = exp_parts32(bounded)
    positive = x >= ZERO
    numerator = select(positive, ONE, scaled)
    last = select(positive, ONE, factor)
    return divide_by_one_plus(numerator, ZERO, scaled * factor) * last


@scalar_function
def silu32(x):
    """x / (1 + e^-x) in float32, within 2 units in the last place; -0 far below zero."""
    below = -abs(x)
    bounded = select(below < EXP_LOWEST, EXP_LOWEST, below)
    scaled, factor = exp_parts32(bounded)
    positive = x >= ZERO
    multiplicand = select(positive, -bounded, bounded)
    multiplier = select(positive, ONE, scaled)
    numerator = multiplicand * multiplier
    rest = fma32(multiplicand, multiplier, -numerator)
    last = select(positive, ONE, factor)
    value = divide_by_one_plus(numerator, rest, scaled * factor) * last
    return select(x > -EXP_LOWEST, x, value)


@scalar_function
def softplus32(x):
    """log(1 + e^x) in float32, within 2 units in the last place: max(x, 0) + log1p(e^-|x|)."""
    e = exp32(-abs(x))
    d = fma32(HALF, e, ONE)
    d_rest = fma32(HALF, e, ONE - d)
    inverse = ONE / d
    s = e * inverse
    residual = fma32(-s, d_rest, fma32(-s, d, e))
    w = s * s
    p = fma32(LOG1P_5, w, LOG1P_4)
    p = fma32(p, w, LOG1P_3)
    p = fma32(p, w, LOG1P_2)
    p = fma32(p, w, LOG1P_1)
    log1p = s + fma32(residual, inverse, s * (w * p))
    return select(x > ZERO, x, ZERO) + log1p


@scalar_function
def rsqrt32(x):
    """1 / sqrt(x) in float32: a correctly rounded root, then a correctly rounded division."""
    return ONE / np.sqrt(x)


ROUNDING_SHIFT64 = 6755399441055744.0  # 1.5 * 2^52
LOG2_E64 = float.fromhex("0x1.71547652b82fep+0")
LN2_HIGH64 = float.fromhex("0x1.62e42fee00000p-1")  # 32 bits: its product with an exponent is exact
LN2_LOW64 = float.fromhex("0x1.a39ef35793c76p-33")
HALF_PI_HIGH = float.fromhex("0x1.921fb54400000p+0")  # 33 bits, and so is the middle part
HALF_PI_MIDDLE = float.fromhex("0x1.0b4611a600000p-34")
HALF_PI_LOW = float.fromhex("0x1.3198a2e037073p-69")
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
SQRT_2 = float.fromhex("0x1.6a09e667f3bcdp+0")
EXP_TERMS = tuple(1.0 / factorial(i) for i in range(14, 1, -1))
LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(12, 0, -1))
SIN_TERMS = tuple((-1.0) ** i / factorial(2 * i + 1) for i in range(9, 0, -1))
COS_TERMS = tuple((-1.0) ** i / factorial(2 * i) for i in range(9, 1, -1))


@scalar_function
def horner64(terms, x):
    """The polynomial with the given coefficients, highest power first, one fused multiply-add a power."""
    total = terms[0]
    for term in terms[1:]:
        total = fma64(total, x, term)
    return total


@scalar_function
def power_of_two64(n):
    """2^n for a whole number n from -1022 to 1023."""
    return from_double_bits((np.int64(n) + 1023) << 52)


@scalar_function
def exp64(x):
    """e^x in float64, within 1 unit in the last place; overflow gives infinity, subnormals are rounded once."""
    bounded = 710.0 if x > 710.0 else x
    bounded = -750.0 if bounded < -750.0 else bounded
    if bounded != bounded:
        return bounded
    n = fma64(bounded, LOG2_E64, ROUNDING_SHIFT64) - ROUNDING_SHIFT64
    exact = fma64(n, -LN2_HIGH64, bounded)
    r = fma64(n, -LN2_LOW64, exact)
    r_rest = fma64(n, -LN2_LOW64, exact - r)
    value = 1.0 + (r + fma64(horner64(EXP_TERMS, r), r * r, r_rest))
    first = np.int64(n) >> 1
    return value * power_of_two64(first) * power_of_two64(np.int64(n) - first)


@scalar_function
def log64(x):
    """Natural logarithm in float64, within 1 unit in the last place; 0 gives -infinity, below 0 NaN."""
    if not x > 0.0:
        return -np.inf if x == 0.0 else np.nan
    if x == np.inf:
        return x
    subnormal = x < 2.2250738585072014e-308
    bits = double_bits(x * 18014398509481984.0 if subnormal else x)
    exponent = (bits >> 52) - (1077 if subnormal else 1023)
    mantissa = from_double_bits((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000)
    if mantissa > SQRT_2:
        mantissa *= 0.5
        exponent += 1
    f = mantissa - 1.0
    s = f / (2.0 + f)
    w = s * s
    half_square = 0.5 * f * f
    series = s * (half_square + w * horner64(LOG_TERMS, w))
    n = np.float64(exponent)
    if exponent == 0:
        return f - (half_square - series)
    return fma64(n, LN2_HIGH64, -((half_square - fma64(n, LN2_LOW64, series)) - f))


@scalar_function
def sincos64(x):
    """(sin x, cos x) in float64, within 1 unit in the last place, for |x| up to 2^20."""
    n = fma64(x, TWO_OVER_PI, ROUNDING_SHIFT64) - ROUNDING_SHIFT64
    exact = fma64(n, -HALF_PI_HIGH, x)
    high = fma64(n, -HALF_PI_MIDDLE, exact)
    rest = fma64(n, -HALF_PI_MIDDLE, exact - high)
    rest = fma64(n, -HALF_PI_LOW, rest)
    r = high + rest
    r_rest = (high - r) + rest
    w = r * r
    sine = r + fma64(w * r, horner64(SIN_TERMS, w), r_rest)
    half_square = 0.5 * w
    one_less = 1.0 - half_square
    lost = (1.0 - one_less) - half_square
    cosine = one_less + fma64(w * w, horner64(COS_TERMS, w), fma64(-r, r_rest, lost))
    quadrant = np.int64(n) & 3
    odd = (quadrant & 1) == 1
    first = cosine if odd else sine
    second = sine if odd else cosine
    return (-first if quadrant >= 2 else first), (-second if quadrant == 1 or quadrant == 2 else second)
