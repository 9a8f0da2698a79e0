"""Which rows each expert computes, as one int64 array for the kernels: the plan of a call.

A *pair* is a row with one of its experts. Pairs are in ascending expert, then ascending row; the shared expert, which
has every row, comes last under the number of the routed experts.
"""

import numpy as np
from numba import njit

from isobit.ops.linear.memory import field
from isobit.ops.scalar import float_bits, from_float_bits, scalar_function

EXPERT_SHARDS = 4

HOW = 0
ACTIVE = 1  # experts with at least one pair
PAIRS = 2
PASS_ROWS = 3  # the most rows of one expert that are computed together
COLUMN_BLOCKS = 4  # the most blocks of 128 outputs whose sums are held at a time
SHARED_FLOATS = 5  # of scratch, before the parts' own
PART_FLOATS = 6
SUMS_FLOATS = 7  # of the sums that a part computes at a time
EXPERTS_AT = 8  # where each list begins
STARTS_AT = 9
ROWS_AT = 10
WEIGHTS_AT = 11  # float32 bits; the shared expert's are not known yet
CHOSEN = 12
PAIRS_OF_ROWS_AT = 13  # chosen + 1 pairs a row, in ascending expert
SHARD_ENDS_AT = 14  # the first pair after each expert shard's; the shared expert is a shard of its own
HEADER = 15 + EXPERT_SHARDS + 1


def empty_plan(rows: int, chosen: int, routed: int) -> np.ndarray:
    """A plan with room for the pairs of `rows` rows, its lists laid out but not filled in."""
    pairs, most_active = rows * (chosen + 1), min(routed, rows * chosen) + 1
    starts = HEADER + most_active
    of_rows = starts + most_active + 1
    plan = np.empty(of_rows + 3 * pairs, np.int64)
    plan[PAIRS], plan[CHOSEN], plan[EXPERTS_AT], plan[STARTS_AT] = pairs, chosen, HEADER, starts
    plan[ROWS_AT], plan[WEIGHTS_AT], plan[PAIRS_OF_ROWS_AT] = of_rows, of_rows + pairs, of_rows + 2 * pairs
    plan[SHARD_ENDS_AT] = HEADER - EXPERT_SHARDS - 1
    return plan


@njit(nogil=True, cache=True, error_model="numpy")
def fill_plan(ids, weights, routed, plan):
    """Sort the pairs of ids int32 [R, chosen] and weights float32 [R, chosen] into the plan's lists."""
    rows, chosen = ids.shape
    shard_experts = -(-routed // EXPERT_SHARDS)
    pairs_of_rows_at, shard_ends_at = plan[PAIRS_OF_ROWS_AT], plan[SHARD_ENDS_AT]
    experts_at, starts_at, rows_at, weights_at = plan[EXPERTS_AT], plan[STARTS_AT], plan[ROWS_AT], plan[WEIGHTS_AT]
    next_pair = np.zeros(routed + 1, np.int64)
    for row in range(rows):
        for choice in range(chosen):
            next_pair[ids[row, choice]] += 1
    next_pair[routed] = rows
    for shard in range(EXPERT_SHARDS):
        plan[shard_ends_at + shard] = rows * chosen  # stays where the shard has no experts
    active, pair = 0, 0
    for expert in range(routed + 1):
        count = next_pair[expert]
        next_pair[expert] = pair
        if count > 0:
            plan[experts_at + active] = expert
            plan[starts_at + active] = pair
            active += 1
            pair += count
        plan[shard_ends_at + (expert // shard_experts if expert < routed else EXPERT_SHARDS)] = pair
    plan[starts_at + active] = pair
    plan[ACTIVE] = active
    for row in range(rows):
        for choice in range(chosen):
            expert = ids[row, choice]
            plan[rows_at + next_pair[expert]] = row
            plan[weights_at + next_pair[expert]] = float_bits(weights[row, choice])
            plan[pairs_of_rows_at + row * (chosen + 1) + choice] = next_pair[expert]
            next_pair[expert] += 1
        plan[rows_at + next_pair[routed]] = row
        plan[pairs_of_rows_at + row * (chosen + 1) + chosen] = next_pair[routed]
        next_pair[routed] += 1


@scalar_function
def expert_of(plan, active):
    """The number of the plan's expert `active`."""
    return field(plan, field(plan, EXPERTS_AT) + active)


@scalar_function
def start_of(plan, active):
    """The first pair of the plan's expert `active`; of the one after the last, the number of pairs."""
    return field(plan, field(plan, STARTS_AT) + active)


@scalar_function
def row_of(plan, pair):
    """The row of a pair."""
    return field(plan, field(plan, ROWS_AT) + pair)


@scalar_function
def pair_of_row(plan, row, choice):
    """The pair of a row with its `choice`-th expert in ascending order; the shared one is the last."""
    return field(plan, field(plan, PAIRS_OF_ROWS_AT) + row * (field(plan, CHOSEN) + 1) + choice)


@scalar_function
def shard_end(plan, shard):
    """The first pair after an expert shard's."""
    return field(plan, field(plan, SHARD_ENDS_AT) + shard)


@scalar_function
def weight_of(plan, pair):
    """The router's weight of a pair with a routed expert."""
    return from_float_bits(np.int32(field(plan, field(plan, WEIGHTS_AT) + pair)))
