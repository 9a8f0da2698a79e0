"""The team: threads that do one task at a time, cut in parts, and stay near for the next.

A forward of few rows is some hundred short tasks, and a thread that sleeps in between comes too late for each. So
members watch a board for a while first. Whoever is there takes the next part of the task on it; nobody waits for a
member that has taken none.
"""

import time
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread

import numpy as np
from numba import njit, types

from isobit.ops import environment
from isobit.ops.linear.atomics import count_one, load_shared, pause, replace_shared, store_shared
from isobit.ops.linear.memory import address_of, call, field, put_field

WATCHES = 1 << 15  # looks at the board before a member goes to sleep
PATIENCE = 1 << 14  # looks at the board after which a member that holds a part must have lost its core
FIRST_REST, LONGEST_REST = 1 << 8, 1 << 14  # short tasks that are not shared after that
STEADY = 1 << 12  # tasks without such a loss after which the next rest is a short one

# What is on the board: int64 numbers, in cache lines of their own where several threads write them.
CLAIMS = 0  # the task's number, its parts, and how many of them are taken: 31, 16 and 16 bits
DONE = 8
PHASE, FIRST_ARGUMENT = 16, 17
BOARD_SIZE = 24
CACHE_LINE = 64
PART_BITS = 0xFFFF
NUMBER_BITS = 0x7FFFFFFF


class Team:
    """The members beside the calling thread; they start when they are first needed."""

    def __init__(self) -> None:
        memory = np.zeros(BOARD_SIZE + CACHE_LINE // 8, np.int64)
        start = -memory.ctypes.data % CACHE_LINE // 8
        self._board = memory[start : start + BOARD_SIZE]
        self._busy = Lock()
        self._members = 0
        self._bells_of_sleepers: deque[Lock] = deque()
        self._tasks = self._lost_at = 0
        self._rest, self._rest_left = FIRST_REST, 0

    def is_near(self) -> bool:
        """Whether to share the next short task: not for a while after a member lost its core during a task."""
        if self._rest_left:
            self._rest_left -= 1
        return not self._rest_left

    def run(self, compiled: Callable[..., int], phases: int, parts: int, *task: object) -> bool:
        """Have all do a task of several phases; False, with nothing done, while another one is being done.

        compiled(board, number, begun, waiting, *task) -> phases done, all of them unless a member lost its core; then
        it is called again, waiting for the phase that has begun.
        """
        if not self._busy.acquire(blocking=False):
            return False
        try:
            self._call_members(parts - 1)
            self._tasks += 1
            done = compiled(self._board, self._tasks, 0, False, *task)
            if done < phases:
                self._note_loss()
            while done < phases:
                time.sleep(0)
                done = compiled(self._board, self._tasks, done, True, *task)
        except BaseException:
            finish_phase(self._board)  # after Ctrl-C, a member may still write to the task's arrays
            raise
        finally:
            self._busy.release()
        return True

    def _call_members(self, count: int) -> None:
        while self._members < count:
            self._members += 1
            Thread(target=self._attend, name="isobit-kernel", daemon=True).start()
        while self._bells_of_sleepers:
            self._bells_of_sleepers.pop().release()

    def _attend(self) -> None:
        environment.set_default()
        bell = Lock()
        bell.acquire()
        while True:
            help_others(self._board, WATCHES)
            self._bells_of_sleepers.append(bell)
            bell.acquire()

    def _note_loss(self) -> None:
        steady = self._tasks - self._lost_at > STEADY
        self._rest = FIRST_REST if steady else min(2 * self._rest, LONGEST_REST)
        self._rest_left, self._lost_at = self._rest, self._tasks


@njit(nogil=True, error_model="numpy")
def do_parts(board):
    """Do parts of the task on the board as long as there are any left to take; whether there were."""
    found = False
    while True:
        claims = load_shared(board + 8 * CLAIMS)
        part, parts = claims & PART_BITS, claims >> 16 & PART_BITS
        if part >= parts:
            return found
        if replace_shared(board + 8 * CLAIMS, claims, claims + 1):
            at = board + 8 * FIRST_ARGUMENT
            arguments = (field(at, 0), field(at, 1), field(at, 2), field(at, 3), field(at, 4), field(at, 5))
            call(field(board, PHASE), (*arguments, part, parts))
            count_one(board + 8 * DONE)
            found = True


@njit(types.void(types.int64[::1], types.int64), nogil=True, cache=True, error_model="numpy")
def help_others(board, watches):
    """Do parts of whatever is put on the board, until there was nothing for `watches` looks at it."""
    place = address_of(board)
    watched = 0
    while watched < watches:
        if do_parts(place):
            watched = 0
        pause()
        watched += 1


@njit(nogil=True, error_model="numpy")
def put_on_board(board, number, phase, arguments, parts):
    """Offer a phase(*arguments, part, parts) to the members. All parts of the one before must be done."""
    put_field(board, PHASE, phase)
    for i in range(len(arguments)):
        put_field(board, FIRST_ARGUMENT + i, arguments[i])
    put_field(board, DONE, 0)
    store_shared(board + 8 * CLAIMS, (number & NUMBER_BITS) << 32 | parts << 16)


@njit(nogil=True, error_model="numpy")
def are_done(board, parts):
    """Whether all parts of the task on the board are done, at the latest after PATIENCE looks at it."""
    for _ in range(PATIENCE):
        if load_shared(board + 8 * DONE) == parts:
            return True
        pause()
    return False


@njit(types.void(types.int64[::1]), nogil=True, cache=True, error_model="numpy")
def finish_phase(board):
    """Wait until all parts of the task on the board are done, however long that takes."""
    place = address_of(board)
    do_parts(place)
    parts = load_shared(place + 8 * CLAIMS) >> 16 & PART_BITS
    while not are_done(place, parts):
        pause()
