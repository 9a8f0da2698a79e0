"""Defects of the n-gram embedding: ids, gather, injection."""

from dataclasses import replace
from typing import Any

import numpy as np

from isobit.contract.controls.journal import plant_journal_defects
from isobit.contract.controls.planted import Call, as_halves, plant, run_and_lend, unwritten
from isobit.ops.contract import Outputs


def with_table(call: Call, **changes: Any) -> Outputs:
    """What the op gives from another table."""
    return call.replay(table=replace(call.case.inputs["table"], **changes))


def hidden_reversed(call: Call) -> Outputs:
    """All sums over a stream's elements run from the last to the first."""
    inputs = call.case.inputs
    hidden = inputs["streams"][0].shape[2]

    def mirror(array: np.ndarray, before: int) -> np.ndarray:
        split = array.reshape(*array.shape[:before], -1, hidden, *array.shape[before + 1 :])
        return np.ascontiguousarray(np.flip(split, before + 1)).reshape(array.shape)

    outputs = call.replay(
        "reversed",
        streams=[np.ascontiguousarray(rows[:, :, ::-1]) for rows in inputs["streams"]],
        **{name: [mirror(rows, 1) for rows in inputs[name]] for name in ("key", "value", "before")},
        **{name: mirror(inputs[name], 0) for name in ("norm_key", "norm_query", "norm_conv", "conv_weight")},
    )
    return {"streams": np.ascontiguousarray(outputs["streams"][:, :, ::-1])}


@plant("ngram_ids", "reference", "every head takes the offset of the next")
def offset_of_the_next_head(call: Call) -> Outputs:
    return with_table(call, offsets=np.roll(call.case.inputs["table"].offsets, -1))


@plant("ngram_ids", "reference", "products are taken modulo 2^32")
def narrow_products(call: Call) -> Outputs:
    return with_table(call, multipliers=call.case.inputs["table"].multipliers & 0xFFFFFFFF)


@plant("ngram_ids", "rows", "the history stays as it was after several tokens")
def stale_history(call: Call) -> Outputs:
    (history,) = call.state_arrays().values()
    before = history.copy()
    outputs = call.run()
    for span in call.plan:
        if span.count > 1:
            slot = len(call.case.rows) - span.stream
            history[slot] = before[slot]
    return outputs


@plant("ngram_ids", "rows", "a segment sees only its own tokens")
def history_not_read(call: Call) -> Outputs:
    (history,) = call.state_arrays().values()
    for span in call.plan:
        if span.count > 1:
            history[len(call.case.rows) - span.stream] = 0
    return call.run()


@plant("ngram_ids", "replaces", "the remainder is taken of the unsigned product")
def unsigned_remainder(call: Call) -> Outputs:
    outputs, table = call.run(), call.case.inputs["table"]
    multiple = np.array([2**64 % int(size) for size in table.sizes])
    return {"ids": (outputs["ids"] - table.offsets + multiple) % table.sizes + table.offsets}


@plant("ngram_ids", "replaces", "the multipliers are applied oldest first")
def multipliers_reversed(call: Call) -> Outputs:
    return with_table(call, multipliers=np.ascontiguousarray(call.case.inputs["table"].multipliers[::-1]))


@plant("ngram_ids", "hygiene", "ids of the last head are not written")
def last_head_unwritten(call: Call) -> Outputs:
    return {"ids": unwritten(call.run()["ids"], ..., -1)}


@plant("ngram_ids", "hygiene", "tokens after an end token are replaced in place")
def tokens_replaced(call: Call) -> Outputs:
    outputs, (tokens,) = run_and_lend(call)
    tokens[...] = 3
    return outputs


@plant("ngram_gather", "reference", "the heads' biases are shifted by one head")
def bias_of_another_head(call: Call) -> Outputs:
    bias = call.case.inputs["table"].head_bias
    return call.run() if bias is None else with_table(call, head_bias=np.roll(bias, 1, axis=0))


@plant("ngram_gather", "reference", "rows come from the first shard only")
def first_shard_only(call: Call) -> Outputs:
    return call.replay(ids=call.case.inputs["ids"] % len(call.case.inputs["table"].shards[0]))


@plant("ngram_gather", "rows", "rows of a batch are gathered in the order of their ids")
def sorted_rows(call: Call) -> Outputs:
    rows = call.run()["rows"]
    return {"rows": np.ascontiguousarray(rows[np.argsort(call.case.inputs["ids"][call.streams, 0], kind="stable")])}


@plant("ngram_gather", "rows", "more than 16 rows are kept as halves")
def half_batches(call: Call) -> Outputs:
    rows = call.run()["rows"]
    return {"rows": as_halves(rows) if call.rows > 16 else rows}


@plant("ngram_gather", "replaces", "the scale is applied in half precision")
def half_scale(call: Call) -> Outputs:
    bias = call.case.inputs["table"].head_bias
    rows = as_halves(with_table(call, head_bias=None)["rows"])
    return {"rows": rows if bias is None else rows + bias.astype(np.float32).ravel()}


@plant("ngram_gather", "replaces", "rows are rounded to half")
def half_rows(call: Call) -> Outputs:
    return {"rows": as_halves(call.run()["rows"])}


@plant("ngram_gather", "hygiene", "the last head's values are not written")
def last_values_unwritten(call: Call) -> Outputs:
    return {"rows": unwritten(call.run()["rows"], ..., slice(-call.case.inputs["table"].width, None))}


@plant("ngram_gather", "hygiene", "ids are reduced to their shard in place")
def ids_reduced(call: Call) -> Outputs:
    outputs, (ids,) = run_and_lend(call)
    ids %= 7
    return outputs


@plant("ple_inject", "reference", "the convolution is not dilated")
def no_dilation(call: Call) -> Outputs:
    inputs = call.case.inputs
    taps = inputs["conv_weight"].shape[1]
    return call.replay(dilation=1, before=[rows[: taps - 1] for rows in inputs["before"]])


@plant("ple_inject", "reference", "the gate loses its sign")
def unsigned_gate(call: Call) -> Outputs:
    """Half of the keys are negated, so half of the gates have the other sign."""
    keys = [np.concatenate([rows[: len(rows) // 2], -rows[len(rows) // 2 :]]) for rows in call.case.inputs["key"]]
    return call.replay(key=keys)


@plant("ple_inject", "rows", "a segment shorter than the dilated taps leaves the pool as it was")
def stale_pool(call: Call) -> Outputs:
    (pool,) = call.state_arrays().values()
    before = pool.copy()
    outputs = call.run()
    for span in call.plan:
        slot = len(call.case.rows) - span.stream
        if 1 < span.count < pool.shape[1]:
            pool[slot] = before[slot]
    return outputs


@plant("ple_inject", "rows", "more than 16 rows are summed from the last element to the first")
def order_by_row_count(call: Call) -> Outputs:
    return hidden_reversed(call) if call.rows > 16 else call.run()


@plant("ple_inject", "replaces", "sums over a stream run from the last element to the first")
def reversed_elements(call: Call) -> Outputs:
    return hidden_reversed(call)


@plant("ple_inject", "replaces", "the pool keeps halves")
def half_pool(call: Call) -> Outputs:
    outputs = call.run()
    (pool,) = call.state_arrays().values()
    pool[...] = as_halves(pool)
    return outputs


@plant("ple_inject", "hygiene", "the last element of each stream is not written")
def last_elements_unwritten(call: Call) -> Outputs:
    return {"streams": unwritten(call.run()["streams"], ..., -1)}


@plant("ple_inject", "hygiene", "the keys are normed in place")
def keys_in_place(call: Call) -> Outputs:
    outputs, (key, _) = run_and_lend(call)
    key[...] = 1
    return outputs


plant_journal_defects("ngram_ids_journal")
plant_journal_defects("ple_inject_journal")
