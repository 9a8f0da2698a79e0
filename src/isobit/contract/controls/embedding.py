"""Defects of the token embedding."""

from dataclasses import replace

import numpy as np

from isobit.checkpoint.weights import QuantizedEmbedding
from isobit.contract.controls.planted import Call, as_halves, overrun, plant, rebuffered, run_and_lend, unwritten
from isobit.ops.contract import Outputs
from isobit.ops.embedding.reference import scaled_codebook_values

GROUP = 256


def rotated(call: Call, strides: list[int]) -> Outputs:
    """Quantized rows through a butterfly with its strides in another order; plain rows as they are."""
    outputs, weights = call.run(), call.case.inputs["weights"]
    if not isinstance(weights, QuantizedEmbedding):
        return outputs
    values = scaled_codebook_values(call.case.inputs["ids"][call.streams], weights).astype(np.float32)
    for stride in strides:
        pairs = values.reshape(*values.shape[:2], -1, 2, stride)
        values = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        values = values.reshape(*pairs.shape[:2], GROUP)
    rows = (values * np.float32(1 / 16) * weights.signs.astype(np.float32)).reshape(call.rows, -1)
    return {"rows": np.ascontiguousarray(rows[:, : weights.hidden])}


@plant("embedding", "reference", "the row of the next id is read")
def next_id(call: Call) -> Outputs:
    ids, weights = call.case.inputs["ids"], call.case.inputs["weights"]
    table = weights.trellis if isinstance(weights, QuantizedEmbedding) else weights.rows
    return call.replay(ids=(ids + 1) % np.int32(len(table)))


@plant("embedding", "reference", "the signs are left out")
def no_signs(call: Call) -> Outputs:
    weights = call.case.inputs["weights"]
    if not isinstance(weights, QuantizedEmbedding):
        return call.run()
    return call.replay(weights=replace(weights, signs=np.abs(weights.signs)))


@plant("embedding", "rows", "every 8th row of a batch is the row before")
def repeated_row(call: Call) -> Outputs:
    rows = call.run()["rows"]
    rows[7::8] = rows[6::8][: len(rows[7::8])]
    return {"rows": rows}


@plant("embedding", "rows", "batches are rotated with the largest stride first")
def order_by_row_count(call: Call) -> Outputs:
    return call.run() if call.rows == 1 else rotated(call, [128, 64, 32, 16, 8, 4, 2, 1])


@plant("embedding", "replaces", "the butterfly begins with the largest stride")
def largest_stride_first(call: Call) -> Outputs:
    return rotated(call, [128, 64, 32, 16, 8, 4, 2, 1])


@plant("embedding", "replaces", "rows are rounded to half")
def half_rows(call: Call) -> Outputs:
    return {"rows": as_halves(call.run()["rows"])}


@plant("embedding", "hygiene", "the short last group of 256 is not written")
def last_group_unwritten(call: Call) -> Outputs:
    rows = call.run()["rows"]
    return {"rows": unwritten(rows, ..., slice((rows.shape[1] - 1) // GROUP * GROUP, None))}


@plant("embedding", "hygiene", "the short last group of 256 is written whole")
def last_group_overrun(call: Call) -> Outputs:
    rows = rebuffered(call.run()["rows"])
    overrun(rows, 4 * (-rows.shape[1] % GROUP) // 4)
    return {"rows": rows}


@plant("embedding", "hygiene", "ids become offsets in place")
def ids_in_place(call: Call) -> Outputs:
    outputs, (ids,) = run_and_lend(call)
    ids *= 2
    return outputs
