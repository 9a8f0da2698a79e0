"""The inner loops of sparse attention as explicit vectors of 32 lanes, so that every CPU runs the defined sums.

Rows given to these loops are padded to whole groups of 32 elements: the left operand with -0 and the right with +0,
whose product -0 leaves every accumulator as it is.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from isobit.ops.lanes import LANES
from isobit.ops.scalar import intrinsic

GROUP = 8  # keys whose dot products one call of `dots` gives

_float = ir.FloatType()
_lanes = ir.VectorType(_float, LANES)
_index = ir.IntType(64)


def _data(context, builder, array_type, array):
    return context.make_array(array_type)(context, builder, array).data


def _load(builder, data, offset, vector):
    pointer = builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())
    return builder.load(pointer, align=_element_bytes(vector))


def _store(builder, data, offset, value):
    pointer = builder.bitcast(builder.gep(data, [offset]), value.type.as_pointer())
    builder.store(value, pointer, align=_element_bytes(value.type))


def _element_bytes(vector):
    return 4 if vector.element == _float else 2


def _fma(builder, a, b, c):
    vector = a.type
    name = f"llvm.fma.v{vector.count}f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
    return builder.call(function, [a, b, c])


def _shuffle(builder, a, b, picks):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picks)), list(picks))
    return builder.shuffle_vector(a, b, mask)


def _fold(builder, lanes):
    """Lane j < h becomes lane j + lane (j + h), for h = 16 and 8: 32 lanes to 8."""
    for half in (16, 8):
        low = _shuffle(builder, lanes, lanes, range(half))
        high = _shuffle(builder, lanes, lanes, range(half, 2 * half))
        lanes = builder.fadd(low, high)
    return lanes


def _fold_together(builder, sums):
    """The last three halvings (h = 4, 2, 1) of eight vectors of 8 lanes at once: their eight results in order."""
    low, high = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    fours = [_add_shuffled(builder, sums[i], sums[i + 1], low, high) for i in (0, 2, 4, 6)]
    low, high = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
    twos = [_add_shuffled(builder, fours[i], fours[i + 1], low, high) for i in (0, 2)]
    low, high = (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)
    ones = _add_shuffled(builder, twos[0], twos[1], low, high)
    return _shuffle(builder, ones, ones, (0, 4, 1, 5, 2, 6, 3, 7))


def _add_shuffled(builder, a, b, low, high):
    return builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))


def _zero_lanes(builder):
    accumulator = cgutils.alloca_once(builder, _lanes)
    builder.store(ir.Constant(_lanes, [0.0] * LANES), accumulator)
    return accumulator


@intrinsic
def dots(typingctx, query, query_at, keys, keys_at, width, out):
    """out[i] = lane sum of query[query_at:][:width] * keys[keys_at[i]:][:width], for i = 0..7.

    All arrays are one-dimensional float32, keys_at int64 [8]; width is a multiple of 32.
    """

    def codegen(context, builder, signature, args):
        query, query_at, keys, keys_at, width, out = args
        query_data = builder.gep(_data(context, builder, signature.args[0], query), [query_at])
        keys_data = _data(context, builder, signature.args[2], keys)
        offsets = _data(context, builder, signature.args[3], keys_at)
        starts = [
            builder.gep(keys_data, [builder.load(builder.gep(offsets, [ir.Constant(_index, i)]))]) for i in range(GROUP)
        ]
        groups = builder.udiv(width, ir.Constant(_index, LANES))
        sums = []
        for pair in range(0, GROUP, 2):
            accumulators = [_zero_lanes(builder) for _ in range(2)]
            with cgutils.for_range(builder, groups, intp=_index) as loop:
                offset = builder.mul(loop.index, ir.Constant(_index, LANES))
                left = _load(builder, query_data, offset, _lanes)
                for i, accumulator in enumerate(accumulators):
                    right = _load(builder, starts[pair + i], offset, _lanes)
                    builder.store(_fma(builder, left, right, builder.load(accumulator)), accumulator)
            sums += [_fold(builder, builder.load(accumulator)) for accumulator in accumulators]
        out_data = _data(context, builder, signature.args[5], out)
        _store(builder, out_data, ir.Constant(_index, 0), _fold_together(builder, sums))
        return context.get_dummy_value()

    flat, offsets = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")
    return types.void(flat, types.int64, flat, offsets, types.int64, flat), codegen


@intrinsic
def add_weighted(typingctx, out, out_at, width, weights, weights_at, count, rows, rows_at, stride):
    """out[out_at + d] continues as the chain of weights[weights_at + i] * rows[rows_at + i*stride + d], i < count.

    All arrays are one-dimensional float32; width is a multiple of 32.
    """

    def codegen(context, builder, signature, args):
        out, out_at, width, weights, weights_at, count, rows, rows_at, stride = args
        out_data = builder.gep(_data(context, builder, signature.args[0], out), [out_at])
        weights_data = builder.gep(_data(context, builder, signature.args[3], weights), [weights_at])
        rows_data = builder.gep(_data(context, builder, signature.args[6], rows), [rows_at])

        def columns(first, wide):
            vector = ir.VectorType(_float, wide)
            accumulator = cgutils.alloca_once(builder, vector)
            builder.store(_load(builder, out_data, first, vector), accumulator)
            with cgutils.for_range(builder, count, intp=_index) as loop:
                weight = builder.load(builder.gep(weights_data, [loop.index]))
                scalar = builder.insert_element(ir.Constant(vector, ir.Undefined), weight, ir.Constant(_index, 0))
                left = _shuffle(builder, scalar, scalar, [0] * wide)
                right = _load(builder, rows_data, builder.add(builder.mul(loop.index, stride), first), vector)
                builder.store(_fma(builder, left, right, builder.load(accumulator)), accumulator)
            _store(builder, out_data, first, builder.load(accumulator))

        pairs = builder.udiv(width, ir.Constant(_index, 2 * LANES))
        with cgutils.for_range(builder, pairs, intp=_index) as loop:
            columns(builder.mul(loop.index, ir.Constant(_index, 2 * LANES)), 2 * LANES)
        done = builder.mul(pairs, ir.Constant(_index, 2 * LANES))
        with builder.if_then(builder.icmp_unsigned("<", done, width)):
            columns(done, LANES)
        return context.get_dummy_value()

    flat = types.Array(types.float32, 1, "C")
    arguments = (flat, types.int64, types.int64, flat, types.int64, types.int64, flat, types.int64, types.int64)
    return types.void(*arguments), codegen


@intrinsic
def widen_rows(typingctx, halves, places, places_at, count, width, out, stride):
    """out[i*stride:][:width] = the float32 values of the binary16 bits halves[places[places_at + i]:], for i < count.

    Exact. halves: uint16, places: int64, out: float32, all one-dimensional; any width.
    """

    def codegen(context, builder, signature, args):
        halves, places, places_at, count, width, out, stride = args
        source = _data(context, builder, signature.args[0], halves)
        first_place = builder.gep(_data(context, builder, signature.args[1], places), [places_at])
        target = _data(context, builder, signature.args[5], out)

        def row(index, column):
            place = builder.load(builder.gep(first_place, [index]))
            return builder.add(place, column), builder.add(builder.mul(index, stride), column)

        groups = builder.udiv(width, ir.Constant(_index, LANES))
        with cgutils.for_range(builder, groups, intp=_index) as group:
            column = builder.mul(group.index, ir.Constant(_index, LANES))
            with cgutils.for_range(builder, count, intp=_index) as loop:
                source_at, target_at = row(loop.index, column)
                bits = _load(builder, source, source_at, ir.VectorType(ir.IntType(16), LANES))
                wide = builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _lanes)
                _store(builder, target, target_at, wide)
        done = builder.mul(groups, ir.Constant(_index, LANES))
        with cgutils.for_range(builder, builder.sub(width, done), intp=_index) as rest:
            column = builder.add(done, rest.index)
            with cgutils.for_range(builder, count, intp=_index) as loop:
                source_at, target_at = row(loop.index, column)
                value = builder.bitcast(builder.load(builder.gep(source, [source_at])), ir.HalfType())
                builder.store(builder.fpext(value, _float), builder.gep(target, [target_at]))
        return context.get_dummy_value()

    flat = types.Array(types.float32, 1, "C")
    arrays = types.Array(types.uint16, 1, "C"), types.Array(types.int64, 1, "C")
    return types.void(*arrays, types.int64, types.int64, types.int64, flat, types.int64), codegen
