"""Scalar arithmetic that every CPU kernel is built from: explicit fused multiply-add, half precision, own functions.

Each function is one sequence of IEEE basic operations, so all CPUs give the same bits. None calls a math library.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

f32 = np.float32


@intrinsic
def fma32(typingctx, a, b, c):
    """a * b + c in float32, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


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
