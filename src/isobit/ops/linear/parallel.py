"""Running a compiled function in parts, one a thread: the one parallel loop of the linear and expert layers."""

from threading import Lock

import numpy as np
from numba import njit, prange

from isobit.ops.linear.memory import address_of, call

_one_at_a_time = Lock()  # not every threading layer of Numba lets two threads start parallel loops


def run_parts(
    function: int,
    x: np.ndarray,
    y: np.ndarray,
    record: np.ndarray,
    plan: np.ndarray,
    part_floats: int,
    phases: int,
    parts: int,
    shared_floats: int = 0,
) -> None:
    """Call function(rows, x, y, record, plan, scratch, phase, part, parts) for every part, phase after phase.

    All its arguments are int64, the arrays by address: x float32 [R, in], y float32 [R, out], record and plan int64,
    scratch float32 [shared_floats + parts * part_floats]. Raises MemoryError before anything is written.
    """
    scratch = np.empty(shared_floats + parts * part_floats, np.float32)
    with _one_at_a_time:
        _run(function, x, y, record, plan, scratch, phases, parts)


@njit(nogil=True, cache=True, error_model="numpy", parallel=True)
def _run(function, x, y, record, plan, scratch, phases, parts):
    rows, at_x, at_y = x.shape[0], address_of(x), address_of(y)
    at_record, at_plan, at_scratch = address_of(record), address_of(plan), address_of(scratch)
    for phase in range(phases):
        if parts == 1:
            call(function, (rows, at_x, at_y, at_record, at_plan, at_scratch, phase, 0, 1))
        else:
            for part in prange(parts):
                call(function, (rows, at_x, at_y, at_record, at_plan, at_scratch, phase, part, parts))
