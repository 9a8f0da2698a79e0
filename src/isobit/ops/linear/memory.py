"""Reading, writing and calling by address inside compiled functions."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from isobit.ops.linear.vectors import BYTE, FLOAT, INDEX, load, pointer, store
from isobit.ops.scalar import intrinsic


def place_of(function: Any) -> int:
    """The address of a cfunc, for kernels to call; the function must be kept alive."""
    return function.address


@intrinsic
def address_of(typingctx, array):
    """The address of a C-contiguous array's first element; the caller keeps the array alive."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, INDEX)

    return types.int64(array), codegen


@intrinsic
def field(typingctx, record, index):
    """The int64 number `index` of the record at an address."""

    def codegen(context, builder, signature, args):
        place = builder.add(args[0], builder.mul(args[1], INDEX(8)))
        return load(builder, place, INDEX, align=8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def put_field(typingctx, record, index, value):
    """Write an int64 to number `index` of the record at an address."""

    def codegen(context, builder, signature, args):
        place = builder.add(args[0], builder.mul(args[1], INDEX(8)))
        store(builder, args[2], place, align=8)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def float_at(typingctx, place):
    """The float32 at an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], FLOAT)

    return types.float32(types.int64), codegen


@intrinsic
def put_float(typingctx, place, value):
    """Write a float32 to an address."""

    def codegen(context, builder, signature, args):
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def copy_floats(typingctx, source, target, count):
    """Copy `count` float32 between places that do not overlap."""

    def codegen(context, builder, signature, args):
        source, target, count = args
        cgutils.raw_memcpy(
            builder, pointer(builder, target, BYTE), pointer(builder, source, BYTE), count, INDEX(4), align=4
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def zero_floats(typingctx, target, count):
    """Write +0 to `count` float32."""

    def codegen(context, builder, signature, args):
        target, count = args
        cgutils.memset(builder, pointer(builder, target, BYTE), builder.mul(count, INDEX(4)), 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def call(typingctx, function, arguments):
    """Call the function at an address with a tuple of int64 arguments; it returns nothing."""

    def codegen(context, builder, signature, args):
        function, arguments = args
        values = cgutils.unpack_tuple(builder, arguments)
        kind = ir.FunctionType(ir.VoidType(), [INDEX] * len(values))
        builder.call(builder.inttoptr(function, kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), codegen
