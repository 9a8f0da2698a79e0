"""Defects of journals, which every state op can have."""

import numpy as np

from isobit.contract.controls.planted import Call, as_halves, plant
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


def halves(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "journal": as_halves(outputs["journal"])}


def places_in_order(call: Call) -> Outputs:
    """The journal's rows are filled in the order of the call, whatever places were asked for."""
    outputs = call.run()
    chosen = [i for i, place in enumerate(zip(call.streams, call.positions, strict=True)) if is_journaled(*place)]
    outputs["journal"][chosen] = outputs["journal"][chosen[::-1]]
    return outputs


def plant_journal_defects(op: str) -> None:
    """Plant them into the journaled op of that name."""
    plant(op, "reference", "the journal holds the state before the row")(before_the_row)
    plant(op, "rows", "all rows of a segment journal what it leaves")(last_of_the_segment)
    plant(op, "rows", "the journal's rows are filled in the order of the call")(places_in_order)
    plant(op, "replaces", "rows journal what the row above them should")(previous_rows)
