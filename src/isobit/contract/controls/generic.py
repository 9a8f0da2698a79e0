"""Defects that every op can have."""

import numpy as np

from isobit.contract.controls.planted import (
    Call,
    Defect,
    Planting,
    last_bits_flipped,
    overrun,
    rebuffered,
    run_and_lend,
    unwritten,
)
from isobit.ops import threads
from isobit.ops.contract import Op, Outputs

TILE = 16


def nothing(call: Call) -> Outputs:
    """No defect at all: the null control, which every gate must pass."""
    return call.run()


def twice_the_value(call: Call) -> Outputs:
    def spoil(values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return values + np.asarray(1 + np.abs(values)).astype(values.dtype)

    return {name: spoil(values) for name, values in call.run().items()}


def rows_in_reverse(call: Call) -> Outputs:
    return {name: np.ascontiguousarray(values[::-1]) for name, values in call.run().items()}


def not_a_number(call: Call) -> Outputs:
    def spoil(values: np.ndarray) -> np.ndarray:
        return np.full_like(values, np.nan) if values.dtype.kind == "f" else values + np.ones_like(values)

    return {name: spoil(values) for name, values in call.run().items()}


def batch_size_dependence(call: Call) -> Outputs:
    outputs = call.run()
    return outputs if call.rows == 1 else {name: last_bits_flipped(values) for name, values in outputs.items()}


def neighbour_leak(call: Call) -> Outputs:
    return {name: np.roll(values, 1, axis=0) for name, values in call.run().items()}


def second_tile(call: Call) -> Outputs:
    """Rows from the 17th on in a call are computed otherwise."""
    outputs = call.run()
    for name, values in outputs.items():
        outputs[name] = np.concatenate([values[:TILE], last_bits_flipped(values[TILE:])])
    return outputs


def thread_dependence(call: Call) -> Outputs:
    outputs = call.run()
    return outputs if threads() == 1 else {name: last_bits_flipped(values) for name, values in outputs.items()}


def last_bit(call: Call) -> Outputs:
    return {name: last_bits_flipped(values) for name, values in call.run().items()}


def last_bit_of_one_element(call: Call) -> Outputs:
    outputs = call.run()
    for values in outputs.values():
        if values.size:
            values.reshape(-1)[-1:] = last_bits_flipped(values.reshape(-1)[-1:])
    return outputs


def unwritten_element(call: Call) -> Outputs:
    def lose_last(values: np.ndarray) -> np.ndarray:
        return unwritten(values, -1) if values.ndim == 1 else unwritten(values, -1, ..., -1)

    return {name: lose_last(values) if values.size else values for name, values in call.run().items()}


def write_past_the_end(call: Call) -> Outputs:
    outputs = {name: rebuffered(values) for name, values in call.run().items()}
    for values in outputs.values():
        overrun(values, 1)
    return outputs


def write_before_the_start(call: Call) -> Outputs:
    outputs = {name: rebuffered(values) for name, values in call.run().items()}
    for values in outputs.values():
        overrun(values, -1)
    return outputs


def run_dependence(call: Call) -> Outputs:
    outputs = call.run()
    return outputs if call.number % 2 else {name: last_bits_flipped(values) for name, values in outputs.items()}


def changed_input(call: Call) -> Outputs:
    outputs, lent = run_and_lend(call)
    for array in lent:
        array.reshape(-1)[-1:] = last_bits_flipped(array.reshape(-1)[-1:])
    return outputs


def stale_state(call: Call) -> Outputs:
    """A call of several rows leaves the state as it was."""
    before = {name: np.array(values) for name, values in call.state_arrays().items()}
    outputs = call.run()
    if call.rows > 1:
        with call.changed_state() as arrays:
            for name, values in arrays.items():
                values[...] = before[name]
    return outputs


def strangers_state(call: Call) -> Outputs:
    """Every call also writes the first element of the state, which belongs to no stream of the call."""
    outputs = call.run()
    with call.changed_state() as arrays:
        for values in arrays.values():
            if values.size:
                first = values.reshape(-1)[:1]
                first[...] = last_bits_flipped(first)
    return outputs


def state_overrun(call: Call) -> Outputs:
    outputs = call.run()
    for values in call.live_state().values():
        overrun(values, 1)
    return outputs


ALL_OPS: tuple[tuple[str, str, Defect], ...] = (
    ("reference", "every value is twice too large", twice_the_value),
    ("reference", "NaN where a number belongs", not_a_number),
    ("rows", "a row alone is computed otherwise than rows together", batch_size_dependence),
    ("rows", "a row gets what its neighbour should have", neighbour_leak),
    ("rows", "rows past the first tile of a call are computed otherwise", second_tile),
    ("replaces", "the last bit of every element", last_bit),
    ("replaces", "the last bit of one element", last_bit_of_one_element),
    ("hygiene", "the last element is not written", unwritten_element),
    ("hygiene", "one byte past the end is written", write_past_the_end),
    ("hygiene", "one byte before the start is written", write_before_the_start),
    ("hygiene", "the bytes change from run to run", run_dependence),
    ("hygiene", "an input is changed", changed_input),
)
OPS_WITH_STATE: tuple[tuple[str, str, Defect], ...] = (
    ("rows", "a call of several rows leaves the state as it was", stale_state),
    ("hygiene", "the state of a stream outside the call is written", strangers_state),
    ("hygiene", "one byte past the end of the state is written", state_overrun),
)
OPS_ON_THREADS: tuple[tuple[str, str, Defect], ...] = (
    ("rows", "the bytes depend on the number of threads", thread_dependence),
)


def generic_plantings(op: Op, has_state: bool, two_threads: bool) -> list[Planting]:
    """The generic defects for an op; thread dependence only shows where two threads can run."""
    chosen = ALL_OPS + (OPS_WITH_STATE if has_state else ()) + (OPS_ON_THREADS if two_threads else ())
    return [Planting(op.name, *parts) for parts in chosen]
