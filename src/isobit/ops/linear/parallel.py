"""Running a compiled function in parts, one a thread: the one parallel loop of the linear and expert layers."""

from threading import Lock

import numpy as np
from numba import njit, prange, types

from isobit.ops.linear.memory import address_of, call

_one_at_a_time = Lock()  # not every threading layer of Numba lets two threads start parallel loops


def run_parts(
    phases: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    record: np.ndarray,
    plan: np.ndarray,
    part_floats: int,
    parts: int,
    shared_floats: int = 0,
) -> None:
    """Call each phase(rows, x, y, record, plan, scratch, part, parts) for every part, one phase after the other.

    phases: addresses, int64. All arguments of a phase are int64, the arrays by address: x float32 [R, in], y float32
    [R, out], record and plan int64, scratch float32 [shared_floats + parts * part_floats].
    Raises MemoryError before anything is written.
    """
    scratch = np.empty(shared_floats + parts * part_floats, np.float32)
    with _one_at_a_time:
        _run(phases, x, y, record, plan, scratch, parts)


# One signature, so that an array of another type is refused and not misread.
_SIGNATURE = types.void(
    types.int64[::1],
    types.float32[:, ::1],
    types.float32[:, ::1],
    types.int64[::1],
    types.int64[::1],
    types.float32[::1],
    types.int64,
)


@njit(_SIGNATURE, nogil=True, cache=True, error_model="numpy", parallel=True)
def _run(phases, x, y, record, plan, scratch, parts):
    rows, at_x, at_y = x.shape[0], address_of(x), address_of(y)
    at_record, at_plan, at_scratch = address_of(record), address_of(plan), address_of(scratch)
    for phase in phases:
        if parts == 1:
            call(phase, (rows, at_x, at_y, at_record, at_plan, at_scratch, 0, 1))
        else:
            for part in prange(parts):
                call(phase, (rows, at_x, at_y, at_record, at_plan, at_scratch, part, parts))
