"""The pieces of a linear layer as vector code: rotations, float64 totals, and rows times a decoded panel."""

from itertools import pairwise

from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from isobit.ops.linear.vectors import (
    FLOAT,
    HALF,
    INDEX,
    INT,
    broadcast,
    fma,
    has_feature,
    load,
    prefetch,
    shuffle,
    splat,
    store,
    vector,
)
from isobit.ops.scalar import intrinsic

BLOCK = 128  # width of a rotation, and inputs in one panel
PANEL_COLUMNS = 32  # outputs in one pair of panels
ROW_BYTES = 4 * BLOCK
PANEL_BYTES = 64 * BLOCK
INVERSE_ROOT = float.fromhex("0x1.6a09e6p-4")  # float32(1 / sqrt(128))

_WIDE = has_feature("avx512f")
_PRODUCT_LANES = 16 if _WIDE else 8
GROUP_ROWS = 12 if _WIDE else 6  # the most rows whose chains fit the registers
NARROW_COLUMNS = _PRODUCT_LANES  # outputs of the narrow product
NARROW_GROUP_ROWS = 12  # of which the narrow product has one vector each
FEW_ROWS = 8  # the most rows that are multiplied with tiles as they are decoded
TILE_FLOAT_BYTES = 4 * 16 * 16  # of one decoded tile
_STEPS = 4
_LANES = 8
_DOUBLE = ir.DoubleType()
_void = types.void
_address = types.int64


def _butterfly(builder, values):
    """The Hadamard butterfly over 16 vectors of 8: strides 1, 2, 4 inside vectors, then 8 to 64 between them."""
    for stride in (1, 2, 4):
        swapped_lanes = [lane ^ stride for lane in range(_LANES)]
        signs = ir.Constant(vector(INT, _LANES), [0x80000000 if lane & stride else 0 for lane in range(_LANES)])
        for i, value in enumerate(values):
            partner = shuffle(builder, value, ir.Constant(value.type, ir.Undefined), swapped_lanes)
            signed = builder.bitcast(builder.xor(builder.bitcast(value, signs.type), signs), value.type)
            values[i] = builder.fadd(partner, signed)
    for stride in (1, 2, 4, 8):
        for i in range(len(values)):
            if not i & stride:
                a, b = values[i], values[i + stride]
                values[i], values[i + stride] = builder.fadd(a, b), builder.fsub(a, b)
    factor = splat(FLOAT, INVERSE_ROOT, _LANES)
    return [builder.fmul(value, factor) for value in values]


def _halves(builder, source, i):
    return builder.fpext(load(builder, source, vector(HALF, _LANES), 16 * i, align=2), vector(FLOAT, _LANES))


def _saturated_half(builder, x):
    for bound, beyond in ((65504.0, ">"), (-65504.0, "<")):
        limit = splat(FLOAT, bound, _LANES)
        x = builder.select(builder.fcmp_ordered(beyond, x, limit), limit, x)
    return builder.fpext(builder.fptrunc(x, vector(HALF, _LANES)), vector(FLOAT, _LANES))


@intrinsic
def _rotate_input(typingctx, x, scale, out):
    def codegen(context, builder, signature, args):
        x, scale, out = args
        values = [
            builder.fmul(load(builder, x, vector(FLOAT, _LANES), 32 * i), _halves(builder, scale, i))
            for i in range(BLOCK // _LANES)
        ]
        for i, value in enumerate(_butterfly(builder, values)):
            store(builder, _saturated_half(builder, value), out, 32 * i)
        return context.get_dummy_value()

    return _void(*[_address] * 3), codegen


@intrinsic
def _rotate_output(typingctx, sums, scale, out):
    def codegen(context, builder, signature, args):
        sums, scale, out = args
        values = [load(builder, sums, vector(FLOAT, _LANES), 32 * i) for i in range(BLOCK // _LANES)]
        for i, value in enumerate(_butterfly(builder, values)):
            store(builder, builder.fmul(value, _halves(builder, scale, i)), out, 32 * i)
        return context.get_dummy_value()

    return _void(*[_address] * 3), codegen


def _product_columns(rows: int) -> int:
    """How many outputs to carry at once so that enough chains are in flight without spilling registers."""
    return PANEL_COLUMNS if _WIDE or rows <= 3 else PANEL_COLUMNS // 2


class _Loads(dict):
    """Operands by number, loaded where they are first used."""

    def __init__(self, load_one):
        super().__init__()
        self._load_one = load_one

    def __missing__(self, number):
        self[number] = self._load_one(number)
        return self[number]


def _ordered_places(rows: range, columns: range):
    """All (row, column), so that the operands of the shorter side are held and the others used up one by one."""
    if len(rows) < len(columns):
        return [(row, column) for column in columns for row in rows]
    return [(row, column) for row in rows for column in columns]


def _load_sums(builder, sums, places):
    kind = vector(FLOAT, _PRODUCT_LANES)
    return [load(builder, sums, kind, row * ROW_BYTES + 4 * column) for row, column in places]


def _emit_product(builder, rows: int, columns: int, first: int, x, panels, steps, sums, fresh):
    """Chains of `rows` x `columns` outputs from column `first`, over steps * _STEPS inputs."""
    lanes = _PRODUCT_LANES
    kind = vector(FLOAT, lanes)
    places = [(row, column) for row in range(rows) for column in range(first, first + columns, lanes)]
    zero = splat(FLOAT, 0.0, lanes)
    starts = [builder.select(fresh, zero, start) for start in _load_sums(builder, sums, places)]
    before = builder.block
    loop, done = builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(INDEX)
    chains = [builder.phi(kind) for _ in places]
    carried = list(chains)
    x_step = builder.add(x, builder.mul(step, INDEX(4 * _STEPS)))
    panel_step = builder.add(panels, builder.mul(step, INDEX(64 * _STEPS)))
    second_step = builder.add(panel_step, INDEX(PANEL_BYTES))
    next_rows = builder.add(builder.add(x, INDEX(rows * ROW_BYTES)), builder.mul(step, INDEX(4 * _STEPS * rows)))
    for offset in range(0, 4 * _STEPS * rows, 48):
        prefetch(builder, builder.add(next_rows, INDEX(offset)))
    used_columns = range(first, first + columns, lanes)
    for k in range(_STEPS):

        def weights_of(column, k=k):
            panel = panel_step if column < 16 else second_step
            return load(builder, panel, kind, 64 * k + 4 * (column % 16))

        def inputs_of(row, k=k):
            return broadcast(builder, load(builder, x_step, FLOAT, row * ROW_BYTES + 4 * k), lanes)

        weights, inputs = _Loads(weights_of), _Loads(inputs_of)
        for row, column in _ordered_places(range(rows), used_columns):
            i = places.index((row, column))
            carried[i] = fma(builder, inputs[row], weights[column], carried[i])
    following = builder.add(step, INDEX(1))
    step.add_incoming(INDEX(0), before)
    step.add_incoming(following, builder.block)
    for chain, start, end in zip(chains, starts, carried, strict=True):
        chain.add_incoming(start, before)
        chain.add_incoming(end, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
    builder.position_at_end(done)
    for (row, column), end in zip(places, carried, strict=True):
        store(builder, end, sums, row * ROW_BYTES + 4 * column)


def _emit_products(builder, most_rows: int, columns_of, arguments) -> None:
    """Code for each number of rows from 1 to most_rows; columns_of(rows): how many at once, of how many."""
    rows, x, panels, inputs, sums, fresh = arguments
    steps = builder.sdiv(inputs, INDEX(_STEPS))
    is_fresh = builder.icmp_signed("!=", fresh, INDEX(0))
    after = builder.append_basic_block("after")
    switch = builder.switch(rows, after)
    for count in range(1, most_rows + 1):
        block = builder.append_basic_block(f"rows{count}")
        switch.add_case(INDEX(count), block)
        builder.position_at_end(block)
        columns, all_columns = columns_of(count)
        for first in range(0, all_columns, columns):
            _emit_product(builder, count, columns, first, x, panels, steps, sums, is_fresh)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def _multiply_panels(typingctx, rows, x, panels, inputs, sums, fresh):
    def codegen(context, builder, signature, args):
        _emit_products(builder, GROUP_ROWS, lambda count: (_product_columns(count), PANEL_COLUMNS), args)
        return context.get_dummy_value()

    return _void(*[_address] * 6), codegen


def _emit_tiles(builder, rows: int, tiles: int, x, values, sums):
    """Carry the chains of `rows` rows over the 16 inputs of `tiles` decoded tiles that lie side by side."""
    lanes = _PRODUCT_LANES
    kind = vector(FLOAT, lanes)
    columns = range(0, 16 * tiles, lanes)
    places = [(row, column) for row in range(rows) for column in columns]
    chains = _load_sums(builder, sums, places)
    for k in range(16):

        def weights_of(column, k=k):
            return load(builder, values, kind, column // 16 * TILE_FLOAT_BYTES + 64 * k + 4 * (column % 16))

        def inputs_of(row, k=k):
            return broadcast(builder, load(builder, x, FLOAT, row * ROW_BYTES + 4 * k), lanes)

        weights, inputs = _Loads(weights_of), _Loads(inputs_of)
        for row, column in _ordered_places(range(rows), columns):
            i = places.index((row, column))
            chains[i] = fma(builder, inputs[row], weights[column], chains[i])
    for (row, column), chain in zip(places, chains, strict=True):
        store(builder, chain, sums, row * ROW_BYTES + 4 * column)


def _emit_row_of_tiles(builder, rows: int, x, values, tiles, sums):
    """`_emit_tiles` over `tiles` tiles, two at a time where their chains fit the registers."""
    at_once = 2 if _WIDE or rows <= 3 else 1
    for together in range(at_once, 0, -1):
        done = builder.and_(tiles, INDEX(-at_once)) if together < at_once else INDEX(0)
        left = builder.sub(tiles, done)
        with cgutils.for_range(builder, builder.sdiv(left, INDEX(together))) as loop:
            tile = builder.add(done, builder.mul(loop.index, INDEX(together)))
            tile_values = builder.add(values, builder.mul(tile, INDEX(TILE_FLOAT_BYTES)))
            _emit_tiles(builder, rows, together, x, tile_values, builder.add(sums, builder.mul(tile, INDEX(64))))


def _row_groups(rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of the groups that a few rows are taken in, so that each group's chains fit the registers."""
    groups = -(-rows // GROUP_ROWS)
    cuts = [group * rows // groups for group in range(groups + 1)]
    return [(first, last - first) for first, last in pairwise(cuts)]


@intrinsic
def _multiply_few(typingctx, rows, x, values, tiles, sums):
    def codegen(context, builder, signature, args):
        rows, x, values, tiles, sums = args
        after = builder.append_basic_block("after")
        switch = builder.switch(rows, after)
        for count in range(1, FEW_ROWS + 1):
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(INDEX(count), block)
            builder.position_at_end(block)
            for first, size in _row_groups(count):
                skipped = INDEX(first * ROW_BYTES)
                _emit_row_of_tiles(builder, size, builder.add(x, skipped), values, tiles, builder.add(sums, skipped))
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return _void(*[_address] * 5), codegen


@intrinsic
def _multiply_narrow(typingctx, rows, x, panel, inputs, sums, fresh):
    def codegen(context, builder, signature, args):
        _emit_products(builder, NARROW_GROUP_ROWS, lambda count: (NARROW_COLUMNS, NARROW_COLUMNS), args)
        return context.get_dummy_value()

    return _void(*[_address] * 6), codegen


@intrinsic
def _add_to_totals(typingctx, sums, totals, first):
    def codegen(context, builder, signature, args):
        sums, totals, first = args
        is_first = builder.icmp_signed("!=", first, INDEX(0))
        kind = vector(_DOUBLE, _LANES)
        for i in range(BLOCK // _LANES):
            term = builder.fpext(load(builder, sums, vector(FLOAT, _LANES), 32 * i), kind)
            added = builder.fadd(load(builder, totals, kind, 64 * i, align=8), term)
            store(builder, builder.select(is_first, term, added), totals, 64 * i, align=8)
        return context.get_dummy_value()

    return _void(*[_address] * 3), codegen


@intrinsic
def round_totals(typingctx, totals, out):
    """Round 128 float64 to float32."""

    def codegen(context, builder, signature, args):
        totals, out = args
        for i in range(BLOCK // _LANES):
            total = load(builder, totals, vector(_DOUBLE, _LANES), 64 * i, align=8)
            store(builder, builder.fptrunc(total, vector(FLOAT, _LANES)), out, 32 * i)
        return context.get_dummy_value()

    return _void(*[_address] * 2), codegen


@intrinsic
def add_terms(typingctx, weight, values, totals):
    """Add weight * values, rounded to float32, to 128 float64 totals."""

    def codegen(context, builder, signature, args):
        weight, values, totals = args
        kind = vector(_DOUBLE, _LANES)
        weights = broadcast(builder, weight, _LANES)
        for i in range(BLOCK // _LANES):
            term = builder.fmul(weights, load(builder, values, vector(FLOAT, _LANES), 32 * i))
            total = load(builder, totals, kind, 64 * i, align=8)
            store(builder, builder.fadd(total, builder.fpext(term, kind)), totals, 64 * i, align=8)
        return context.get_dummy_value()

    return _void(types.float32, _address, _address), codegen


@intrinsic
def add_totals(typingctx, more, totals):
    """Add 128 float64 to 128 float64 totals."""

    def codegen(context, builder, signature, args):
        more, totals = args
        kind = vector(_DOUBLE, _LANES)
        for place in range(0, 8 * BLOCK, 8 * _LANES):
            total, term = (load(builder, at, kind, place, align=8) for at in (totals, more))
            store(builder, builder.fadd(total, term), totals, place, align=8)
        return context.get_dummy_value()

    return _void(_address, _address), codegen


@cfunc(_void(*[_address] * 3), cache=True)
def rotate_input(x, scale, out):
    """128 float32 times 128 halves, rotated and rounded to half, to 128 float32."""
    _rotate_input(x, scale, out)


@cfunc(_void(*[_address] * 3), cache=True)
def rotate_output(sums, scale, out):
    """128 float32 rotated, then times 128 halves, to 128 float32."""
    _rotate_output(sums, scale, out)


@cfunc(_void(*[_address] * 6), cache=True)
def multiply_panels(rows, x, panels, inputs, sums, fresh):
    """Carry rows x 32 chains over `inputs` inputs (a multiple of 16, at most 128), a group of rows at a time.

    x and sums: rows of float32, 512 bytes apart. panels: two [inputs, 16] panels, PANEL_BYTES apart.
    fresh: 1 to begin the chains at +0, 0 to go on from `sums`.
    """
    groups = (rows + GROUP_ROWS - 1) // GROUP_ROWS
    for group in range(groups):
        first, last = group * rows // groups, (group + 1) * rows // groups
        place = first * ROW_BYTES
        _multiply_panels(last - first, x + place, panels, inputs, sums + place, fresh)


@cfunc(_void(*[_address] * 6), cache=True)
def multiply_narrow(rows, x, panel, inputs, sums, fresh):
    """The same for the first NARROW_COLUMNS outputs of one panel."""
    groups = (rows + NARROW_GROUP_ROWS - 1) // NARROW_GROUP_ROWS
    for group in range(groups):
        first, last = group * rows // groups, (group + 1) * rows // groups
        place = first * ROW_BYTES
        _multiply_narrow(last - first, x + place, panel, inputs, sums + place, fresh)


@cfunc(_void(*[_address] * 5), cache=True)
def multiply_few(rows, x, values, tiles, sums):
    """Carry the chains of at most FEW_ROWS rows over the 16 inputs of `tiles` decoded tiles that lie side by side.

    x and sums: rows of float32, 512 bytes apart. values: float32 [tiles, 16, 16].
    """
    _multiply_few(rows, x, values, tiles, sums)


@cfunc(_void(*[_address] * 4), cache=True)
def close_shard(blocks, sums, totals, step):
    """Add finished chains, blocks of 128, to float64 totals. step: 0 the first shard, 1 one between, 2 the last.

    After the last shard `sums` holds the rounded totals.
    """
    for block in range(blocks):
        at, total = sums + block * ROW_BYTES, totals + 2 * block * ROW_BYTES
        _add_to_totals(at, total, 1 if step == 0 else 0)
        if step == 2:
            round_totals(total, at)
