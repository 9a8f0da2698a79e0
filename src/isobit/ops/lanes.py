"""Thirty-two float32 lanes as one value, so that kernels are vectorised as written and not as a compiler guesses.

Arithmetic on lanes is the scalar arithmetic of each lane; the width is part of the definition (docs/arithmetic.md,
*lane sum*), the machine's own vector width is not.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError

from isobit.ops.lane_type import INDEX, LANES, VECTOR, call_on_lanes, in_every_lane, lanes_type
from isobit.ops.scalar import intrinsic, scalar_function


def _require_float32_rows(array):
    if not (isinstance(array, types.Array) and array.dtype == types.float32 and array.layout == "C"):
        raise TypingError(f"lanes are loaded from and stored to C-contiguous float32 arrays, not {array}")


def _element_pointer(context, builder, signature, args):
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


def _vector_pointer(context, builder, signature, args):
    return builder.bitcast(_element_pointer(context, builder, signature, args), VECTOR.as_pointer())


def _constant_lanes(value):
    return ir.Constant(VECTOR, [value] * LANES)


def _copy_first(builder, target, source, count):
    cgutils.raw_memcpy(builder, target, source, count, ir.Constant(count.type, 4), align=4)


def _all_lanes(builder, count):
    return builder.icmp_signed("==", count, ir.Constant(count.type, LANES))


@intrinsic
def lanes_zero(typingctx):
    """All lanes +0."""

    def codegen(context, builder, signature, args):
        return _constant_lanes(0.0)

    return lanes_type(), codegen


@intrinsic
def lanes_fill(typingctx, x):
    """The float32 x in every lane."""

    def codegen(context, builder, signature, args):
        return in_every_lane(builder, args[0])

    return lanes_type(types.float32), codegen


@intrinsic
def lanes_spread(typingctx, array, offset):
    """The float32 at flat element `offset` of a C-contiguous array, in every lane; the bounds are the caller's."""
    _require_float32_rows(array)

    def codegen(context, builder, signature, args):
        return in_every_lane(builder, builder.load(_element_pointer(context, builder, signature, args)))

    return lanes_type(array, types.intp), codegen


@intrinsic
def lanes_load(typingctx, array, offset):
    """32 consecutive float32 from flat element `offset` of a C-contiguous array; the bounds are the caller's."""
    _require_float32_rows(array)

    def codegen(context, builder, signature, args):
        return builder.load(_vector_pointer(context, builder, signature, args), align=4)

    return lanes_type(array, types.intp), codegen


@intrinsic
def lanes_store(typingctx, array, offset, value):
    """Write 32 lanes from flat element `offset` of a C-contiguous array; the bounds are the caller's."""
    _require_float32_rows(array)

    def codegen(context, builder, signature, args):
        builder.store(args[2], _vector_pointer(context, builder, signature, args), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), codegen


@intrinsic
def lanes_load_first(typingctx, array, offset, count):
    """The first `count` lanes from memory, +0 in the others, which are not read. Quick where it is all of them."""
    _require_float32_rows(array)

    def codegen(context, builder, signature, args):
        pointer = _element_pointer(context, builder, signature, args)
        with builder.if_else(_all_lanes(builder, args[2]), likely=True) as (whole, part):
            with whole:
                all_values = builder.load(_vector_pointer(context, builder, signature, args), align=4)
                after_whole = builder.block
            with part:
                vector = cgutils.alloca_once(builder, VECTOR)
                builder.store(_constant_lanes(0.0), vector)
                _copy_first(builder, builder.bitcast(vector, pointer.type), pointer, args[2])
                first_values = builder.load(vector)
                after_part = builder.block
        value = builder.phi(VECTOR)
        value.add_incoming(all_values, after_whole)
        value.add_incoming(first_values, after_part)
        return value

    return lanes_type(array, types.intp, types.intp), codegen


@intrinsic
def lanes_store_first(typingctx, array, offset, value, count):
    """Write the first `count` lanes only. Quick where it is all of them."""
    _require_float32_rows(array)

    def codegen(context, builder, signature, args):
        pointer = _element_pointer(context, builder, signature, args)
        with builder.if_else(_all_lanes(builder, args[3]), likely=True) as (whole, part):
            with whole:
                builder.store(args[2], _vector_pointer(context, builder, signature, args), align=4)
            with part:
                vector = cgutils.alloca_once(builder, VECTOR)
                builder.store(args[2], vector)
                _copy_first(builder, pointer, builder.bitcast(vector, pointer.type), args[3])
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type, types.intp), codegen


@intrinsic
def lanes_keep_first(typingctx, new, old, count):
    """The first `count` lanes of `new`, the others of `old`."""

    def codegen(context, builder, signature, args):
        indices = ir.Constant(ir.VectorType(INDEX, LANES), list(range(LANES)))
        counts = in_every_lane(builder, builder.trunc(args[2], INDEX))
        return builder.select(builder.icmp_signed("<", indices, counts), args[0], args[1])

    return lanes_type(lanes_type, lanes_type, types.intp), codegen


@intrinsic
def lanes_fma(typingctx, a, b, c):
    """a * b + c in every lane, rounded once."""

    def codegen(context, builder, signature, args):
        return call_on_lanes(builder, "llvm.fma", list(args))

    return lanes_type(lanes_type, lanes_type, lanes_type), codegen


@intrinsic
def lanes_add(typingctx, a, b):
    """a + b in every lane."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return lanes_type(lanes_type, lanes_type), codegen


@intrinsic
def lanes_subtract(typingctx, a, b):
    """a - b in every lane."""

    def codegen(context, builder, signature, args):
        return builder.fsub(*args)

    return lanes_type(lanes_type, lanes_type), codegen


@intrinsic
def lanes_multiply(typingctx, a, b):
    """a * b in every lane."""

    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return lanes_type(lanes_type, lanes_type), codegen


@intrinsic
def lanes_total(typingctx, lanes):
    """The lanes' sum as a tree: for h = 16, 8, 4, 2, 1, lane j < h becomes lane j + lane (j + h)."""

    def codegen(context, builder, signature, args):
        value = args[0]
        half = LANES // 2
        while half:
            undefined = ir.Constant(value.type, ir.Undefined)
            masks = [ir.Constant(ir.VectorType(INDEX, half), list(range(first, first + half))) for first in (0, half)]
            lower, upper = (builder.shuffle_vector(value, undefined, mask) for mask in masks)
            value = builder.fadd(lower, upper)
            half //= 2
        return builder.extract_element(value, ir.Constant(INDEX, 0))

    return types.float32(lanes_type), codegen


@scalar_function
def copy_at(source, source_at, target, target_at, count):
    """Copy `count` elements between flat offsets of two C-contiguous float32 arrays."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        lanes_store_first(target, target_at + i, lanes_load_first(source, source_at + i, some), some)


@scalar_function
def lane_dot_at(a, a_offset, b, b_offset, count):
    """The lane sum of products of `count` elements from flat offsets of two C-contiguous float32 arrays."""
    total = lanes_zero()
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        total = lanes_fma(lanes_load(a, a_offset + i), lanes_load(b, b_offset + i), total)
    if whole < count:
        left = count - whole
        rest = lanes_fma(
            lanes_load_first(a, a_offset + whole, left), lanes_load_first(b, b_offset + whole, left), total
        )
        total = lanes_keep_first(rest, total, left)
    return lanes_total(total)


@scalar_function
def lane_sum_at(x, offset, count):
    """The lane sum of `count` elements from flat `offset` of a C-contiguous float32 array."""
    total = lanes_zero()
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        total = lanes_add(total, lanes_load(x, offset + i))
    if whole < count:
        left = count - whole
        rest = lanes_add(total, lanes_load_first(x, offset + whole, left))
        total = lanes_keep_first(rest, total, left)
    return lanes_total(total)


@scalar_function
def lane_dot(a, b):
    """The lane sum of a_i * b_i over two contiguous float32 vectors of one length."""
    return lane_dot_at(a, 0, b, 0, a.size)


@scalar_function
def lane_sum_squares(x):
    """The lane sum of x_i * x_i over a contiguous float32 vector."""
    return lane_dot_at(x, 0, x, 0, x.size)


@scalar_function
def lane_sum(x):
    """The lane sum of a contiguous float32 vector."""
    return lane_sum_at(x, 0, x.size)
