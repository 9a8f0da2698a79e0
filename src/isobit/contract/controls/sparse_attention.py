"""Defects of sparse attention: what it writes, what it selects, what it reads."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from isobit.contract.controls.planted import Call, as_halves, evens_first, plant, run_and_lend, unwritten
from isobit.ops.batch import PAGE_ROWS
from isobit.ops.contract import Outputs

MANY = 8


def other_norm(call: Call, which: int, change: float) -> Outputs:
    """What the op gives with another norm weight: 0 q, 1 k, 2 index q, 3 index k."""
    norms = list(call.case.inputs["norms"])
    norms[which] = norms[which] + np.float32(change)
    return call.replay(norms=norms)


def later(call: Call) -> Outputs:
    """What the op gives one block of positions later."""
    shape = call.case.inputs["shape"]
    return call.replay(shape=replace(shape, before=shape.before + shape.block))


def blocks_reversed(call: Call) -> list[np.ndarray]:
    """The index keys with the rows of every whole block in reverse."""
    block, reversed_keys = call.case.inputs["shape"].block, []
    for index_k in call.case.inputs["index_k"]:
        count, width = len(index_k) // block, index_k.shape[1]
        whole = index_k[: count * block]
        turned = whole.reshape(count, block, width)[:, ::-1].reshape(whole.shape)
        reversed_keys.append(np.concatenate([turned, index_k[count * block :]]))
    return reversed_keys


def reselected(call: Call, outputs: Outputs, preference: Callable[[np.ndarray], np.ndarray], fewer: int = 0) -> Outputs:
    """The selection made again from the scores: ties to the smaller preference of a block, `fewer` blocks a row."""
    kept = call.case.inputs["shape"].kept
    blocks, counts = np.full_like(outputs["blocks"], -1), outputs["counts"].copy()
    for row, scores in enumerate(outputs["scores"]):
        finished = np.arange(int((scores >= 0).sum()))
        best = np.lexsort((preference(finished), -scores[: len(finished)]))[: kept - fewer]
        blocks[row, : len(best)], counts[row] = np.sort(best), len(best)
    return {**outputs, "blocks": blocks, "counts": counts, "traced_blocks": blocks.copy()}


def ties_to_the_higher(call: Call, outputs: Outputs) -> Outputs:
    return reselected(call, outputs, np.negative)


def pages_of_the_segment_above(call: Call) -> np.ndarray:
    """The page tables, in which every segment of the call has those of the segment above it."""
    pages, streams = call.state.pages.copy(), [span.stream for span in call.plan]
    pages[streams] = pages[np.roll(streams, 1)]
    return pages


def through_other_pages(call: Call) -> Outputs:
    with call.attributes_of_state(pages=pages_of_the_segment_above(call)):
        return call.run()


def one_row_late(streams: list[np.ndarray]) -> list[np.ndarray]:
    """Each row where the next should be, the last where the first should."""
    return [np.roll(rows, 1, axis=0) for rows in streams]


def values_summed_apart(call: Call, name: str) -> Outputs:
    """Weighted values of the earlier and the later half of the positions are two sums, added at the end."""
    earlier, later = ([rows.copy() for rows in call.case.inputs[name]] for _ in range(2))
    for early, late in zip(earlier, later, strict=True):
        early[len(early) // 2 :] = 0
        late[: len(late) // 2] = 0
    parts = (call.replay(half, **{name: values}) for half, values in (("earlier", earlier), ("later", later)))
    return {"y": np.add(*(part["y"] for part in parts))}


def blocks_read_backwards(call: Call) -> Outputs:
    """The blocks that every row has finished lie, and are read and merged, from the last to the first."""
    inputs, shape = call.case.inputs, call.case.inputs["shape"]
    count = shape.before // shape.block

    def backwards(rows: np.ndarray) -> np.ndarray:
        blocks = rows[: count * shape.block].reshape(count, shape.block, *rows.shape[1:])[::-1]
        return np.concatenate([blocks.reshape(-1, *rows.shape[1:]), rows[count * shape.block :]])

    choices = inputs["choices"].copy()
    choices[..., :count] = choices[..., :count][..., ::-1]
    turned = {name: [backwards(rows) for rows in inputs[name]] for name in ("keys", "values")}
    return call.replay("backwards", choices=choices, **turned)


def permuted_dims(call: Call) -> Outputs:
    """Products of queries and keys are summed with the unrotated dimensions in another order."""
    inputs, shape = call.case.inputs, call.case.inputs["shape"]
    order, _ = evens_first(shape.head_dim - shape.rotary_dim)
    order = np.concatenate([np.arange(shape.rotary_dim), shape.rotary_dim + order])

    def queries(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(len(rows), shape.heads, 2, shape.head_dim).copy()
        heads[:, :, 0] = heads[:, :, 0][..., order]
        return heads.reshape(rows.shape)

    return call.replay(
        "permuted",
        q_gate=[queries(rows) for rows in inputs["q_gate"]],
        keys=[np.ascontiguousarray(keys[..., order]) for keys in inputs["keys"]],
        norms=[inputs["norms"][0][order], *inputs["norms"][1:]],
    )


@plant("attention_write", "reference", "positions are counted a block too far")
def keys_rotated_later(call: Call) -> Outputs:
    return later(call)


@plant("attention_write", "reference", "the key's norm multiplies by w, not by 1 + w")
def plain_key_weight(call: Call) -> Outputs:
    return other_norm(call, 1, -1.0)


@plant("attention_write", "reference", "a block is pooled without its last row")
def last_row_not_pooled(call: Call) -> Outputs:
    block = call.case.inputs["shape"].block
    index_k = [rows.copy() for rows in call.case.inputs["index_k"]]
    for rows in index_k:
        rows[block - 1 :: block] = 0
    outputs = call.run()
    return {**outputs, "pooled": call.replay("last row", index_k=index_k)["pooled"]}


@plant("attention_select", "reference", "the first index head is not counted")
def head_not_counted(call: Call) -> Outputs:
    index_q = [rows.copy() for rows in call.case.inputs["index_q"]]
    for rows in index_q:
        rows[:, : call.case.inputs["shape"].index_dim] = 0
    return call.replay(index_q=index_q)


@plant("attention_select", "reference", "ties go to the higher block")
def wrong_tie(call: Call) -> Outputs:
    return ties_to_the_higher(call, call.run())


@plant("attention_select", "reference", "queries are rotated a block too far")
def queries_rotated_later(call: Call) -> Outputs:
    index_q, shape = call.case.inputs["index_q"], call.case.inputs["shape"]
    turned = call.replay("later", shape=replace(shape, before=shape.before + shape.block), index_q=index_q)
    outputs = call.run()
    scores = outputs["scores"]
    return {**outputs, "scores": np.where(scores >= 0, turned["scores"][:, : scores.shape[1]], scores)}


@plant("attention_select", "reference", "one block fewer than the budget is chosen")
def one_block_fewer(call: Call) -> Outputs:
    return reselected(call, call.run(), np.positive, fewer=1)


@plant("attention_select", "reference", "a block can be chosen one row before it is finished")
def unfinished_block_chosen(call: Call) -> Outputs:
    shape = call.case.inputs["shape"]
    ahead = call.replay("ahead", shape=replace(shape, before=shape.before + 1))
    return {**call.run(), "blocks": ahead["blocks"], "counts": ahead["counts"]}


@plant("attention_read", "reference", "the gate is left out")
def no_gate(call: Call) -> Outputs:
    heads = call.case.inputs["shape"].heads
    q_gate = [rows.copy() for rows in call.case.inputs["q_gate"]]
    for rows in q_gate:
        rows.reshape(len(rows), heads, 2, -1)[:, :, 1] = 100
    return call.replay(q_gate=q_gate)


@plant("attention_read", "reference", "all heads read the first key-value head")
def first_head_for_all(call: Call) -> Outputs:
    values = [np.repeat(values[:, :1], values.shape[1], axis=1) for values in call.case.inputs["values"]]
    return call.replay(values=values)


@plant("attention_read", "reference", "the query's norm multiplies by w, not by 1 + w")
def plain_query_weight(call: Call) -> Outputs:
    return other_norm(call, 0, -1.0)


@plant("attention_read", "reference", "keys are read one row late")
def keys_one_row_late(call: Call) -> Outputs:
    return call.replay(keys=one_row_late(call.case.inputs["keys"]))


@plant("attention_write", "rows", "a block is pooled from the rows of one call alone")
def rows_of_earlier_calls_lost(call: Call) -> Outputs:
    raw, block = call.state_arrays()["raw"], call.case.inputs["shape"].block
    before = raw.copy()
    for span in call.plan:
        position = call.case.inputs["shape"].before + span.first
        pages, rows = call.state.places(span.stream, np.arange(position // block * block, position))
        raw[pages, rows] = 0
    outputs = call.run()
    for span in call.plan:
        position = call.case.inputs["shape"].before + span.first
        places = call.state.places(span.stream, np.arange(position // block * block, position))
        raw[places] = before[places]
    return outputs


@plant("attention_write", "rows", "segments of several rows leave the last pooled block as it was")
def stale_pooled_block(call: Call) -> Outputs:
    pooled, block = call.state_arrays()["pooled"], call.case.inputs["shape"].block
    before = pooled.copy()
    outputs = call.run()
    for span in call.plan:
        finished = (call.case.inputs["shape"].before + span.first + span.count) // block
        if span.count > 1 and finished:
            page = call.state.pages[span.stream, (finished - 1) * block // PAGE_ROWS]
            row = (finished - 1) * block % PAGE_ROWS // block
            pooled[page, row] = before[page, row]
    return outputs


@plant("attention_write", "rows", "the block that a segment of several rows leaves unfinished is pooled")
def unfinished_block_pooled(call: Call) -> Outputs:
    outputs, block = call.run(), call.case.inputs["shape"].block
    raw, pooled = (call.state_arrays()[name] for name in ("raw", "pooled"))
    for span in call.plan:
        end = call.case.inputs["shape"].before + span.first + span.count
        if span.count > 1 and end % block:
            page, row = call.state.places(span.stream, np.array(end - 1))
            pooled[page, row // block] = raw[page, row]
    return outputs


@plant("attention_write", "rows", "a segment is written to the pages of the segment above it")
def written_to_other_pages(call: Call) -> Outputs:
    return through_other_pages(call)


@plant("attention_select", "rows", "batches of at least 8 rows break ties to the higher block")
def ties_by_row_count(call: Call) -> Outputs:
    outputs = call.run()
    return ties_to_the_higher(call, outputs) if call.rows >= MANY else outputs


@plant("attention_select", "rows", "rows that share a scan see as many blocks as the last of them")
def blocks_of_the_last_row(call: Call) -> Outputs:
    outputs = call.run()
    outputs["counts"][:-1] = np.maximum(outputs["counts"][:-1], outputs["counts"][-1])
    return outputs


@plant("attention_read", "rows", "a row of a batch reads the blocks of the row before")
def selection_of_the_row_before(call: Call) -> Outputs:
    if call.rows == 1:
        return call.run()
    return call.replay(choices=np.roll(call.case.inputs["choices"], 1, axis=1))


@plant("attention_read", "rows", "a segment reads the pages of the segment above it")
def read_from_other_pages(call: Call) -> Outputs:
    return through_other_pages(call)


@plant("attention_read", "rows", "at least 8 rows sum products in another order")
def order_by_row_count(call: Call) -> Outputs:
    return permuted_dims(call) if call.rows >= MANY else call.run()


@plant("attention_write", "replaces", "a block's rows are summed from the last to the first")
def pooled_backwards(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "pooled": call.replay("backwards", index_k=blocks_reversed(call))["pooled"]}


@plant("attention_write", "replaces", "pooled keys are kept as halves")
def half_pooled(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "pooled": as_halves(outputs["pooled"])}


@plant("attention_select", "replaces", "the heads are summed from the last to the first")
def heads_backwards(call: Call) -> Outputs:
    shape = call.case.inputs["shape"]
    split = [rows.reshape(len(rows), shape.index_heads, -1) for rows in call.case.inputs["index_q"]]
    index_q = [np.ascontiguousarray(rows[:, ::-1]).reshape(len(rows), -1) for rows in split]
    return call.replay(index_q=index_q)


@plant("attention_select", "replaces", "ties go to the higher block")
def other_tie(call: Call) -> Outputs:
    return ties_to_the_higher(call, call.run())


@plant("attention_select", "replaces", "ties come as a sort that is not stable leaves them")
def unstable_tie(call: Call) -> Outputs:
    return reselected(call, call.run(), lambda blocks: blocks ^ 1)


@plant("attention_read", "replaces", "blocks are read from the last to the first, and so are their parts merged")
def other_merging_order(call: Call) -> Outputs:
    return blocks_read_backwards(call)


@plant("attention_read", "replaces", "the later half of the keys is a part of its own")
def other_parts(call: Call) -> Outputs:
    return values_summed_apart(call, "values")


@plant("attention_read", "replaces", "products are summed with the dimensions in another order")
def other_order(call: Call) -> Outputs:
    return permuted_dims(call)


@plant("attention_read", "replaces", "the output is rounded to half")
def half_output(call: Call) -> Outputs:
    return {"y": as_halves(call.run()["y"])}


@plant("attention_write", "hygiene", "the first row of every page of the pool is written")
def other_pages_written(call: Call) -> Outputs:
    outputs = call.run()
    call.state_arrays()["values"][:, 0] = call.plan[0].stream
    return outputs


@plant("attention_write", "hygiene", "a pooled key is written twice, to the pool's first place too")
def pooled_twice(call: Call) -> Outputs:
    outputs, block = call.run(), call.case.inputs["shape"].block
    pooled = call.state_arrays()["pooled"]
    for span in call.plan:
        finished = (call.case.inputs["shape"].before + span.first + span.count) // block
        if finished:
            page, row = call.state.places(span.stream, np.array((finished - 1) * block))
            pooled[0, 0] = pooled[page, row // block]
    return outputs


@plant("attention_write", "hygiene", "index keys are normed in place")
def index_keys_in_place(call: Call) -> Outputs:
    outputs, lent = run_and_lend(call)
    lent[2][...] = 1
    return outputs


@plant("attention_select", "hygiene", "places past the last chosen block are not written")
def ends_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    past = np.arange(outputs["blocks"].shape[1]) >= outputs["counts"][:, None]
    return {**outputs, "blocks": unwritten(outputs["blocks"], past)}


@plant("attention_select", "hygiene", "queries are rotated in place")
def queries_in_place(call: Call) -> Outputs:
    outputs, lent = run_and_lend(call)
    lent[0][...] = 1
    return outputs


@plant("attention_read", "hygiene", "the last head is not written")
def last_head_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, ..., slice(-call.case.inputs["shape"].head_dim, None))}


@plant("attention_read", "hygiene", "a part starts from what the output held")
def accumulating_part(call: Call) -> Outputs:
    y = call.run()["y"]
    buffer = unwritten(y, ...)
    with np.errstate(all="ignore"):
        buffer += y
    return {"y": buffer}


@plant("sparse_attention", "reference", "keys are kept one row late")
def keys_kept_one_row_late(call: Call) -> Outputs:
    return call.replay(k=one_row_late(call.case.inputs["k"]))


@plant("sparse_attention", "reference", "blocks are pooled one row late")
def blocks_pooled_one_row_late(call: Call) -> Outputs:
    return call.replay(index_k=one_row_late(call.case.inputs["index_k"]))


@plant("sparse_attention", "rows", "a segment goes through the pages of the segment above it")
def pages_of_a_neighbour(call: Call) -> Outputs:
    return through_other_pages(call)


@plant("sparse_attention", "rows", "the rows of a segment select by the query of its last row")
def selection_of_the_last_row(call: Call) -> Outputs:
    call.run()
    index_q = [rows.copy() for rows in call.case.inputs["index_q"]]
    for span in call.plan:
        index_q[span.stream][span.first :] = index_q[span.stream][span.first + span.count - 1]
    return call.instead(index_q=index_q)


@plant("sparse_attention", "replaces", "the key's norm weight is rounded to half")
def half_key_weight(call: Call) -> Outputs:
    norms = list(call.case.inputs["norms"])
    norms[1] = as_halves(norms[1])
    return call.replay(norms=norms)


@plant("sparse_attention", "replaces", "the later half of the keys is a part of its own")
def other_parts_of_a_layer(call: Call) -> Outputs:
    return values_summed_apart(call, "v")


@plant("sparse_attention", "hygiene", "a page that belongs to no stream is written")
def page_of_nobody(call: Call) -> Outputs:
    outputs = call.run()
    with call.changed_state() as pools:
        free = np.setdiff1d(np.arange(len(pools["values"])), call.state.pages)
        pools["values"][free] = call.plan[0].stream
    return outputs


@plant("sparse_attention", "hygiene", "queries are rotated in place")
def queries_of_a_layer_in_place(call: Call) -> Outputs:
    outputs, lent = run_and_lend(call)
    lent[-1][...] = 1
    return outputs
