"""Defects of the row movements."""

import numpy as np

from isobit.contract.controls.journal import plant_journal_defects
from isobit.contract.controls.planted import Call, overrun, plant, rebuffered, run_and_lend, unwritten
from isobit.ops.contract import Outputs


@plant("shift_rows", "reference", "a row gets itself, not its predecessor")
def not_shifted(call: Call) -> Outputs:
    call.run()
    x = call.case.inputs["x"]
    return {"previous": np.concatenate([x[span.stream][span.first : span.first + span.count] for span in call.plan])}


@plant("shift_rows", "reference", "a row gets the one two before it")
def shifted_twice(call: Call) -> Outputs:
    pairs = zip(call.case.inputs["x"], call.case.inputs["before"], strict=True)
    return call.replay(x=[np.concatenate([before[None], rows[:-1]]) for rows, before in pairs])


@plant("shift_rows", "rows", "a segment's first row gets the row above it in the batch")
def neighbour_above(call: Call) -> Outputs:
    previous = call.run()["previous"]
    x, start = call.case.inputs["x"], 0
    for span, after in zip(call.plan, call.plan[1:], strict=False):
        start += span.count
        previous[start] = x[span.stream][span.first + span.count - 1]
        assert after.count
    return {"previous": previous}


@plant("shift_rows", "rows", "the pool keeps the first row of a segment")
def first_row_kept(call: Call) -> Outputs:
    outputs = call.run()
    (pool,) = call.state_arrays().values()
    for span in call.plan:
        pool[len(call.case.rows) - span.stream] = call.case.inputs["x"][span.stream][span.first]
    return outputs


@plant("shift_rows", "replaces", "-0 becomes +0")
def lost_sign_of_zero(call: Call) -> Outputs:
    return {"previous": call.run()["previous"] + np.float32(0)}


@plant("shift_rows", "replaces", "subnormals are flushed to zero")
def flushed_subnormals(call: Call) -> Outputs:
    previous = call.run()["previous"]
    return {"previous": np.where(np.abs(previous) < np.finfo(np.float32).tiny, np.float32(0), previous)}


@plant("shift_rows", "hygiene", "the first row is not written")
def first_row_unwritten(call: Call) -> Outputs:
    return {"previous": unwritten(call.run()["previous"], 0)}


@plant("shift_rows", "hygiene", "the last row is also written past the end")
def row_past_the_end(call: Call) -> Outputs:
    previous = rebuffered(call.run()["previous"])
    overrun(previous, 8)
    return {"previous": previous}


@plant("move_rows", "reference", "the row after the one asked for is taken")
def next_row(call: Call) -> Outputs:
    return call.replay(x=np.roll(call.case.inputs["x"], -1, axis=0))


@plant("move_rows", "reference", "columns are cut one too early")
def cut_too_early(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "right": np.roll(outputs["right"], 1, axis=1), "left": np.roll(outputs["left"], 1, axis=1)}


@plant("move_rows", "rows", "a row that is asked for twice comes once")
def repeated_row_lost(call: Call) -> Outputs:
    outputs = call.run()
    _, first = np.unique(call.streams, return_index=True)
    lost = np.setdiff1d(np.arange(call.rows), first)
    outputs["taken"][lost] = 0
    return outputs


@plant("move_rows", "rows", "rows are written in the order of their places")
def written_in_place_order(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "put": np.ascontiguousarray(outputs["put"][::-1])}


@plant("move_rows", "replaces", "-0 becomes +0")
def sign_of_zero(call: Call) -> Outputs:
    return {name: values + np.float32(0) for name, values in call.run().items()}


@plant("move_rows", "replaces", "subnormals are flushed to zero")
def subnormals(call: Call) -> Outputs:
    tiny = np.finfo(np.float32).tiny
    return {name: np.where(np.abs(values) < tiny, np.float32(0), values) for name, values in call.run().items()}


@plant("move_rows", "hygiene", "the last column of the right part is not written")
def last_column_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "right": unwritten(outputs["right"], ..., -1)}


@plant("move_rows", "hygiene", "a taken row is a view that is written to")
def view_written(call: Call) -> Outputs:
    outputs, (x,) = run_and_lend(call)
    x[call.streams[0]] = 0
    return outputs


plant_journal_defects("shift_rows_journal")
