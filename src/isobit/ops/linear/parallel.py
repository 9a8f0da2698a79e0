"""Running a compiled function in parts, one a thread: the one parallel loop of the linear and expert layers."""

from typing import Any

import numpy as np
from numba import njit, types

from isobit.ops import buffers, threads
from isobit.ops.linear.memory import address_of, call
from isobit.ops.linear.team import Team, are_done, do_parts, put_on_board
from isobit.ops.tape import do
from isobit.ops.work import pieces_are_forced

LEAST_WORK = 1 << 19  # multiply-adds that are worth sharing with threads that are near
LONG_WORK = 1 << 22  # that are worth waking a thread for

_team = Team()


def parts_of(work: int) -> int:
    """Into how many parts to cut so many multiply-adds: 1 or one a thread."""
    return threads() if work >= LEAST_WORK or pieces_are_forced() else 1


def run_parts(
    phases: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    record: np.ndarray,
    plan: np.ndarray,
    part_floats: int,
    parts: int,
    work: int,
    shared_floats: int = 0,
) -> None:
    """Call each phase(rows, x, y, record, plan, scratch, part, parts) for every part, one phase after the other.

    phases: addresses, int64. All arguments of a phase are int64, the arrays by address: x float32 [R, in], y float32
    [R, out], record and plan int64, scratch float32 [shared_floats + parts * part_floats]. work: multiply-adds.
    Raises MemoryError before anything is written.
    """
    scratch = buffers.scratch(shared_floats + parts * part_floats)
    task = phases, x, y, record, plan, scratch, parts
    if parts == 1:
        do(_run_alone, *task)
    else:
        do(_run_long if work >= LONG_WORK else _run_short, *task)


def _run_short(phases: np.ndarray, *task: Any) -> None:
    """Share a task with members that are near, if any are."""
    if _team.is_near():
        _run_long(phases, *task)
    else:
        _run_alone(phases, *task)


def _run_long(phases: np.ndarray, *task: Any) -> None:
    if not _team.run(_run_together, len(phases), task[-1], phases, *task):
        _run_alone(phases, *task)


# One signature, so that an array of another type is refused and not misread.
_TASK = (
    types.int64[::1],
    types.float32[:, ::1],
    types.float32[:, ::1],
    types.int64[::1],
    types.int64[::1],
    types.float32[::1],
    types.int64,
)


@njit(nogil=True, error_model="numpy")
def _arguments(x, y, record, plan, scratch):
    places = (address_of(x), address_of(y), address_of(record), address_of(plan), address_of(scratch))
    return (np.int64(x.shape[0]), *places)


@njit(types.void(*_TASK), nogil=True, cache=True, error_model="numpy")
def _run_alone(phases, x, y, record, plan, scratch, parts):
    arguments = _arguments(x, y, record, plan, scratch)
    for phase in phases:
        for part in range(parts):
            call(phase, (*arguments, part, parts))


@njit(types.int64(types.int64[::1], types.int64, types.int64, types.boolean, *_TASK), nogil=True, cache=True)
def _run_together(board, number, begun, waiting, phases, x, y, record, plan, scratch, parts):
    place = address_of(board)
    arguments = _arguments(x, y, record, plan, scratch)
    for i in range(begun, len(phases)):
        if not waiting or i > begun:
            put_on_board(place, number * len(phases) + i, phases[i], arguments, parts)
            do_parts(place)
        if not are_done(place, parts):
            return i
    return len(phases)
