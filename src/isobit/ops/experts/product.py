"""The experts' kernels: gate and up projections, the activation, then the weighted sum of the down projections.

Two phases, with all threads done with the first before the second: hidden values of every pair, made ready for the down
projections, split over experts and blocks of hidden columns; the outputs, split over blocks of columns.
"""

from numba import carray, cfunc, types

from isobit.ops.experts import grouping
from isobit.ops.experts.grouping import expert_of, pair_of_row, row_of, shard_end, start_of, weight_of
from isobit.ops.lanes import LANES, lanes_load_first, lanes_store_first
from isobit.ops.linear.blocks import BLOCK, FEW_ROWS, ROW_BYTES, add_terms, add_totals, round_totals
from isobit.ops.linear.memory import call, copy_floats, field, float_at, put_float, zero_floats
from isobit.ops.linear.product import (
    FIELDS,
    INPUTS,
    OUTPUTS,
    PANELS_FLOATS,
    TILE,
    TILE_COLUMNS,
    chains_of_few,
    chains_of_rows,
    finish_row,
    inlined,
    input_blocks,
    prepare_blocks,
    prepare_row,
    real_columns,
)
from isobit.ops.scalar import sigmoid32, silu32

# Fields of the experts' record, before the layers': gate, up and down of each expert, then the shared expert's gate.
ROUTED = 0
HIDDEN_STRIDE = 1  # floats between two pairs' hidden values
READY_BLOCKS = 2  # blocks of 128 in a pair's prepared hidden values
SWISH = 3
RECORD_HEADER = 4
GATE, UP, DOWN, PROJECTIONS = 0, 1, 2, 3

BY_COUNT, ROW_BY_ROW, IN_PANELS, FEW_BY_FEW = 0, 1, 2, 3
DECODING = 7  # what decoding a tile costs, in rows multiplied with it


phase = cfunc(types.void(*[types.int64] * 8), cache=True)  # what `linear.parallel.run_parts` calls


@cfunc(types.void(types.CPointer(types.float32), types.CPointer(types.float32), types.int64), cache=True)
def swish(gate, up, count):
    """gate = silu(gate) * up."""
    gates, ups = carray(gate, count), carray(up, count)
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        lanes_store_first(gates, i, silu32(lanes_load_first(gates, i, some)) * lanes_load_first(ups, i, some), some)


@inlined
def places(plan, record, scratch, part):
    """Where hidden values, prepared hidden values, the shared expert's weights and a thread's own room lie."""
    pairs = field(plan, grouping.PAIRS)
    ready = scratch + 4 * pairs * field(record, HIDDEN_STRIDE)
    shared_weights = ready + pairs * field(record, READY_BLOCKS) * ROW_BYTES
    room = scratch + 4 * (field(plan, grouping.SHARED_FLOATS) + part * field(plan, grouping.PART_FLOATS))
    return scratch, ready, shared_weights, room


@inlined
def layer_of(record, expert, projection):
    """The record of one projection of one expert; projection 0 past the last expert is the shared expert's gate."""
    return record + 8 * (RECORD_HEADER + (expert * PROJECTIONS + projection) * FIELDS)


@inlined
def in_panels(plan, count):
    """Whether an expert with `count` rows computes them in panels, and not a few together."""
    how = field(plan, grouping.HOW)
    return how == IN_PANELS or (how == BY_COUNT and count > FEW_ROWS)


@inlined
def column_blocks(layer):
    """How many blocks of 128 outputs a layer has, the last perhaps short."""
    return (field(layer, TILE_COLUMNS) * TILE + BLOCK - 1) // BLOCK


@inlined
def pass_rows(plan, count):
    """How many of an expert's `count` rows are computed together."""
    if in_panels(plan, count):
        return field(plan, grouping.PASS_ROWS)
    return 1 if field(plan, grouping.HOW) == ROW_BY_ROW else max(min(FEW_ROWS, count), 1)


@inlined
def hidden_values(x, plan, record, active, first_column, last_column, hidden, ready, room):
    """The hidden values of all pairs of one expert, its stored columns [first_column, last_column), made ready."""
    expert, start, end = expert_of(plan, active), start_of(plan, active), start_of(plan, active + 1)
    stride, ready_blocks = 4 * field(record, HIDDEN_STRIDE), field(record, READY_BLOCKS)
    down = layer_of(record, expert, DOWN)
    most, panelled = pass_rows(plan, end - start), in_panels(plan, end - start)
    spare, other, panels = room, room + ROW_BYTES, room + 2 * ROW_BYTES
    sums = panels + 4 * PANELS_FLOATS
    totals, prepared = after_sums(plan, sums)
    for begin in range(start, end, most):
        rows = min(most, end - begin)
        for projection in range(GATE, DOWN):
            layer = layer_of(record, expert, projection)
            for row in range(rows):
                source = x + 4 * field(layer, INPUTS) * row_of(plan, begin + row)
                prepare_row(source, layer, prepared + row * ROW_BYTES, rows * ROW_BYTES, spare)
            if not panelled:
                columns = last_column - first_column
                chains_of_few(layer, first_column, columns, rows, prepared, sums, totals, panels)
            for column in range(first_column, last_column, BLOCK):
                place = sums + 4 * rows * (column - first_column)
                if panelled:
                    place = sums
                    columns = min(BLOCK, last_column - column)
                    chains_of_rows(layer, column, columns, rows, prepared, sums, totals, panels)
                count = real_columns(layer, column, last_column)
                block = column // BLOCK
                last_block = min(block + 1, input_blocks(down))
                if block + 1 == column_blocks(layer):
                    last_block = input_blocks(down)
                for row in range(rows):
                    source = hidden + (begin + row) * stride
                    out = source + 4 * column
                    if projection == GATE:
                        finish_row(place + row * ROW_BYTES, layer, column, count, out, spare)
                    else:
                        finish_row(place + row * ROW_BYTES, layer, column, count, other, spare)
                        call(field(record, SWISH), (out, other, count))
                        target = ready + (begin * ready_blocks + row) * ROW_BYTES
                        prepare_blocks(source, down, block, last_block, target, rows * ROW_BYTES, spare)


@inlined
def after_sums(plan, sums):
    """Where the float64 totals and the prepared rows lie that belong to room for `sums`."""
    floats = field(plan, grouping.SUMS_FLOATS)
    return sums + 4 * floats, sums + 12 * floats


@inlined
def hidden_cost(plan, record, active):
    """About what the hidden values of one expert cost."""
    blocks = column_blocks(layer_of(record, expert_of(plan, active), GATE))
    return (start_of(plan, active + 1) - start_of(plan, active) + DECODING) * blocks


@inlined
def begins_before(bound, cost, blocks):
    """How many of `blocks` equal pieces of `cost` begin before `bound`."""
    return min(max(-(-bound * blocks // cost), 0), blocks)


@inlined
def shared_gates(x, first_row, last_row, plan, record, shared_weights, room):
    """The shared expert's weight for each row: the sigmoid of its gate."""
    layer = layer_of(record, field(record, ROUTED) + 1, 0)
    spare, panels = room, room + 2 * ROW_BYTES
    sums = panels + 4 * PANELS_FLOATS
    totals, prepared = after_sums(plan, sums)
    columns = min(field(layer, TILE_COLUMNS) * TILE, BLOCK)
    most = pass_rows(plan, last_row - first_row)
    for begin in range(first_row, last_row, most):
        rows = min(most, last_row - begin)
        for row in range(rows):
            source = x + 4 * (begin + row) * field(layer, INPUTS)
            prepare_row(source, layer, prepared + row * ROW_BYTES, rows * ROW_BYTES, spare)
        if in_panels(plan, last_row - first_row):
            chains_of_rows(layer, 0, columns, rows, prepared, sums, totals, panels)
        else:
            chains_of_few(layer, 0, columns, rows, prepared, sums, totals, panels)
        for row in range(rows):
            out = shared_weights + 4 * (begin + row)
            finish_row(sums + row * ROW_BYTES, layer, 0, 1, out, spare)
            put_float(out, sigmoid32(float_at(out)))


@phase
def hidden_phase(rows, x, y, record, plan, scratch, part, parts):
    """Hidden values, cut where the work is even; and the shared expert's weights, cut by rows."""
    hidden, ready, shared_weights, room = places(plan, record, scratch, part)
    total = 0
    for active in range(field(plan, grouping.ACTIVE)):
        total += hidden_cost(plan, record, active)
    low, high = part * total // parts, (part + 1) * total // parts
    begin = 0
    for active in range(field(plan, grouping.ACTIVE)):
        layer = layer_of(record, expert_of(plan, active), GATE)
        blocks = column_blocks(layer)
        cost = hidden_cost(plan, record, active)
        first, last = begins_before(low - begin, cost, blocks), begins_before(high - begin, cost, blocks)
        if first < last:
            last_column = min(last * BLOCK, field(layer, TILE_COLUMNS) * TILE)
            hidden_values(x, plan, record, active, first * BLOCK, last_column, hidden, ready, room)
        begin += cost
    shared_gates(x, part * rows // parts, (part + 1) * rows // parts, plan, record, shared_weights, room)


@inlined
def expert_outputs(plan, record, active, first_block, last_block, ready, outputs, room):
    """One expert's down projections, columns in blocks first_block to last_block - 1: [pairs, those columns]."""
    expert, start, end = expert_of(plan, active), start_of(plan, active), start_of(plan, active + 1)
    layer = layer_of(record, expert, DOWN)
    most, panelled = pass_rows(plan, end - start), in_panels(plan, end - start)
    spare, panels = room, room + ROW_BYTES
    sums = panels + 4 * PANELS_FLOATS
    totals, _ = after_sums(plan, sums)
    first_column, last_column = first_block * BLOCK, min(last_block * BLOCK, field(layer, TILE_COLUMNS) * TILE)
    pair_bytes = (last_block - first_block) * ROW_BYTES
    for begin in range(start, end, most):
        count = min(most, end - begin)
        prepared = ready + begin * field(record, READY_BLOCKS) * ROW_BYTES
        if not panelled:
            columns = last_column - first_column
            chains_of_few(layer, first_column, columns, count, prepared, sums, totals, panels)
        for column in range(first_column, last_column, BLOCK):
            place = sums + 4 * count * (column - first_column)
            if panelled:
                place = sums
                columns = min(BLOCK, last_column - column)
                chains_of_rows(layer, column, columns, count, prepared, sums, totals, panels)
            real = real_columns(layer, column, last_column)
            for i in range(count):
                out = outputs + (begin + i) * pair_bytes + 4 * (column - first_column)
                finish_row(place + i * ROW_BYTES, layer, column, real, out, spare)


@inlined
def sum_of_row(plan, row, shared_weight, outputs, pair_bytes, total, shard_sum):
    """128 float64 totals of a row: in each expert shard the experts in ascending order, then the shards in order."""
    chosen = field(plan, grouping.CHOSEN)
    zero_floats(total, 2 * BLOCK)
    zero_floats(shard_sum, 2 * BLOCK)
    shard = 0
    for choice in range(chosen + 1):
        pair = pair_of_row(plan, row, choice)
        if pair >= shard_end(plan, shard):
            add_totals(shard_sum, total)
            zero_floats(shard_sum, 2 * BLOCK)
        while pair >= shard_end(plan, shard):
            shard += 1
        weight = shared_weight if choice == chosen else weight_of(plan, pair)
        add_terms(weight, outputs + pair * pair_bytes, shard_sum)
    add_totals(shard_sum, total)


@phase
def output_phase(rows, x, y, record, plan, scratch, part, parts):
    """The outputs, cut by blocks of columns: every pair's, then each row's sum of them."""
    _, ready, shared_weights, room = places(plan, record, scratch, part)
    width = field(layer_of(record, field(record, ROUTED), DOWN), OUTPUTS)
    blocks = (width + BLOCK - 1) // BLOCK
    first, last, step = part * blocks // parts, (part + 1) * blocks // parts, field(plan, grouping.COLUMN_BLOCKS)
    total, shard_sum, outputs = room, room + 2 * ROW_BYTES, room + 4 * ROW_BYTES
    room = outputs + field(plan, grouping.PAIRS) * step * ROW_BYTES
    for first_block in range(first, last, step):
        last_block = min(first_block + step, last)
        for active in range(field(plan, grouping.ACTIVE)):
            expert_outputs(plan, record, active, first_block, last_block, ready, outputs, room)
        pair_bytes = (last_block - first_block) * ROW_BYTES
        for row in range(rows):
            shared_weight = float_at(shared_weights + 4 * row)
            for block in range(first_block, last_block):
                place = outputs + (block - first_block) * ROW_BYTES
                sum_of_row(plan, row, shared_weight, place, pair_bytes, total, shard_sum)
                real = min(BLOCK, width - block * BLOCK)
                round_totals(total, room)
                copy_floats(room, y + 4 * (row * width + block * BLOCK), real)
