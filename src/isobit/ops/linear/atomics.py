"""Whole numbers in memory that several threads read and write, inside compiled functions."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from isobit.ops.linear.vectors import INDEX, has_feature, pointer
from isobit.ops.scalar import intrinsic


@intrinsic
def load_shared(typingctx, place):
    """The int64 at an address, with all that its writer wrote before it."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], INDEX), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_shared(typingctx, place, value):
    """Write an int64 to an address, for whoever reads it to see all that was written before."""

    def codegen(context, builder, signature, args):
        place, value = args
        builder.store_atomic(value, pointer(builder, place, INDEX), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def count_one(typingctx, place):
    """Add 1 to the int64 at an address."""

    def codegen(context, builder, signature, args):
        builder.atomic_rmw("add", pointer(builder, args[0], INDEX), INDEX(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def replace_shared(typingctx, place, expected, value):
    """Whether the address held `expected` and now holds `value`."""

    def codegen(context, builder, signature, args):
        place, expected, value = args
        replaced = builder.cmpxchg(pointer(builder, place, INDEX), expected, value, "acq_rel", "acquire")
        return builder.extract_value(replaced, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that its thread only waits."""

    def codegen(context, builder, signature, args):
        if has_feature("sse2"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen
