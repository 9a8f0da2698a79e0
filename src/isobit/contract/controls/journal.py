"""Defects of journals, which every state op can have."""

import numpy as np

from isobit.contract.controls.planted import Call, overrun, plant, rebuffered, unwritten
from isobit.ops.contract import Outputs
from isobit.ops.journaled import is_journaled


def previous_rows(call: Call) -> Outputs:
    """Every row of a call journals what its neighbour above should."""
    outputs = call.run()
    return {**outputs, "journal": np.roll(outputs["journal"], 1, axis=0)}


def before_the_row(call: Call) -> Outputs:
    """The journal is taken before the row: where a row and the one before it are journaled, it shows the former's."""
    outputs, start = call.run(), 0
    journal = outputs["journal"].copy()
    for span in call.plan:
        for row in range(1, span.count):
            if is_journaled(span.stream, span.first + row) and is_journaled(span.stream, span.first + row - 1):
                journal[start + row] = outputs["journal"][start + row - 1]
        start += span.count
    return {**outputs, "journal": journal}


def last_of_the_segment(call: Call) -> Outputs:
    """All rows of a segment journal the state that the segment leaves."""
    outputs, start = call.run(), 0
    (pool,) = call.state_arrays().values()
    for span in call.plan:
        for row in range(span.count):
            if is_journaled(span.stream, span.first + row):
                outputs["journal"][start + row] = pool[len(call.case.rows) - span.stream]
        start += span.count
    return outputs


def last_row_missing(call: Call) -> Outputs:
    """The last row of a segment is not journaled."""
    outputs, end = call.run(), 0
    for span in call.plan:
        end += span.count
        outputs["journal"][end - 1] = 0
    return outputs


def state_reversed(call: Call) -> Outputs:
    """The first axis of a journaled state runs from the last to the first."""
    outputs = call.run()
    return {**outputs, "journal": np.ascontiguousarray(outputs["journal"][:, ::-1])}


def journaled_places(call: Call) -> list[int]:
    """Which rows of the call are journaled."""
    return [i for i, place in enumerate(zip(call.streams, call.positions, strict=True)) if is_journaled(*place)]


def places_in_order(call: Call) -> Outputs:
    """The journal's rows are filled in the order of the call, whatever places were asked for."""
    outputs, chosen = call.run(), journaled_places(call)
    outputs["journal"][chosen] = outputs["journal"][chosen[::-1]]
    return outputs


def last_state_unwritten(call: Call) -> Outputs:
    """The last state that the call journals is not written."""
    outputs = call.run()
    return {**outputs, "journal": unwritten(outputs["journal"], journaled_places(call)[-1:])}


def one_state_too_many(call: Call) -> Outputs:
    """A row without a place in the journal is journaled behind its end."""
    outputs = call.run()
    journal = rebuffered(outputs["journal"])
    overrun(journal, journal[0].nbytes)
    return {**outputs, "journal": journal}


def plant_journal_defects(op: str) -> None:
    """Plant them into the journaled op of that name."""
    plant(op, "reference", "the journal holds the state before the row")(before_the_row)
    plant(op, "reference", "the last row of a segment is not journaled")(last_row_missing)
    plant(op, "rows", "all rows of a segment journal what it leaves")(last_of_the_segment)
    plant(op, "rows", "the journal's rows are filled in the order of the call")(places_in_order)
    plant(op, "replaces", "rows journal what the row above them should")(previous_rows)
    plant(op, "replaces", "a journaled state is stored from its last part to its first")(state_reversed)
    plant(op, "hygiene", "the last journaled state is not written")(last_state_unwritten)
    plant(op, "hygiene", "a state is written past the journal's end")(one_state_too_many)
