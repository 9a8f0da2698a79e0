"""Eight float32 or int32 numbers as one value inside a Numba kernel, for loops that LLVM does not vectorise itself.

Every function works lane by lane in IEEE basic operations, so the width of the CPU's registers changes no bit.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

intrinsic: Any = _intrinsic  # it drops the first parameter, which a type checker cannot see

LANES = 8
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(ir.FloatType(), 2 * LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class FloatLanes(types.Type):
    """Numba's type of eight float32."""

    def __init__(self):
        super().__init__(name="FloatLanes")


class IntLanes(types.Type):
    """Numba's type of eight int32."""

    def __init__(self):
        super().__init__(name="IntLanes")


@register_model(FloatLanes)
class _FloatLanesModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _FLOATS)


@register_model(IntLanes)
class _IntLanesModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _INTS)


floats, ints = FloatLanes(), IntLanes()


def _pointer(context, builder, array_type, array, index, lanes):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), lanes.as_pointer())


def _indices(order) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(order)), list(order))


def _spread(builder, lanes, number):
    undefined = ir.Constant(lanes, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, _indices([0] * LANES))


def _storing(value_types: tuple, lanes: ir.VectorType, align: int, convert: Callable) -> Callable:
    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], lanes)
        builder.store(convert(builder, args[2:]), pointer, align=align)
        return context.get_dummy_value()

    def typer(typingctx, array, index, *values):
        return types.void(array, types.intp, *value_types), codegen

    return typer


@intrinsic
def load(typingctx, array, index):
    """array[index : index + 8] of a contiguous float32 array, unchecked."""

    def codegen(context, builder, signature, args):
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        return builder.load(pointer, align=4)

    return floats(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, values):
    """array[index : index + 8] = values, a contiguous float32 array, unchecked."""
    return _storing((floats,), _FLOATS, 4, lambda builder, args: args[0])(typingctx, array, index, values)


@intrinsic
def store_interleaved(typingctx, array, index, even, odd):
    """array[index : index + 16] = even[0], odd[0], even[1], ...; a contiguous float32 array, unchecked."""
    order = [lane + side for lane in range(LANES) for side in (0, LANES)]

    def interleave(builder, args):
        return builder.shuffle_vector(args[0], args[1], _indices(order))

    return _storing((floats, floats), _PAIRS, 4, interleave)(typingctx, array, index, even, odd)


@intrinsic
def store_bytes(typingctx, array, index, values):
    """array[index : index + 8] = the low bytes of values, a contiguous uint8 array, unchecked."""

    def truncate(builder, args):
        return builder.trunc(args[0], _BYTES)

    return _storing((ints,), _BYTES, 1, truncate)(typingctx, array, index, values)


@intrinsic
def spread(typingctx, number):
    """A float32 in all lanes."""
    return floats(types.float32), lambda context, builder, signature, args: _spread(builder, _FLOATS, args[0])


@intrinsic
def spread_int(typingctx, number):
    """An int32 in all lanes."""
    return ints(types.int32), lambda context, builder, signature, args: _spread(builder, _INTS, args[0])


@intrinsic
def add_squared_distance(typingctx, a, b, c):
    """fma(a - b, a - b, c): the difference is rounded, the product and sum together once."""

    def codegen(context, builder, signature, args):
        fma_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, fma_type, f"llvm.fma.v{LANES}f32")
        difference = builder.fsub(args[0], args[1])
        return builder.call(fma, [difference, difference, args[2]])

    return floats(floats, floats, floats), codegen


@intrinsic
def lower(typingctx, a, b):
    """a where a < b, else b."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])

    return floats(floats, floats), codegen


@intrinsic
def where_lower(typingctx, a, b, then, otherwise):
    """`then` where a < b, else `otherwise`."""

    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return ints(floats, floats, ints, ints), codegen
