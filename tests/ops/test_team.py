"""The team of threads: every part of every phase is done once, whoever comes late, and no phase begins early."""

import os
import threading
import time

import numpy as np
import pytest
from numba import cfunc, types

from isobit.ops.linear import parallel, team
from isobit.ops.linear.atomics import count_one, load_shared
from isobit.ops.linear.memory import field, place_of, put_field
from isobit.ops.linear.team import Team

PHASE = types.void(*[types.int64] * 8)
PARTS = 5
COUNT = 6  # where phases count all parts; the parts' own counts lie before


@cfunc(PHASE)
def count_parts(rows, x, y, record, plan, scratch, part, parts):
    """Count the part, after about plan[0] units of work."""
    for _ in range(field(plan, 0)):
        load_shared(record)
    put_field(record, part, field(record, part) + 1)
    count_one(record + 8 * COUNT)


@cfunc(PHASE)
def note_count(rows, x, y, record, plan, scratch, part, parts):
    """Note how many parts had been done when this one of the next phase began."""
    put_field(plan, 1 + part, field(record, COUNT))


@pytest.fixture(autouse=True)
def fresh_team(monkeypatch):
    monkeypatch.setattr(parallel, "_team", Team())


def run(phases, work=0, parts=PARTS):
    """(times that each part of the counting phases was done, counts noted by `note_count`)."""
    record, plan = np.zeros(COUNT + 1, np.int64), np.zeros(1 + parts, np.int64)
    plan[0] = work
    places = np.array([place_of(phase) for phase in phases], np.int64)
    nothing = np.zeros((1, 1), np.float32)
    parallel.run_parts(places, nothing, nothing, record, plan, 1, parts, parallel.LONG_WORK)
    return record[:parts].tolist(), plan[1:].tolist()


@pytest.mark.parametrize("work", [0, 3, 1000, 100_000])
@pytest.mark.parametrize("pause", [0.0, 0.01])
def test_every_part_is_done_once_and_phases_follow_each_other(work, pause):
    for _ in range(20):
        time.sleep(pause)
        assert run([count_parts, note_count, count_parts], work) == ([2] * PARTS, [PARTS] * PARTS)


def test_tasks_beside_each_other_are_all_done():
    results = []
    callers = [threading.Thread(target=lambda: results.extend(run([count_parts, note_count], 300) for _ in range(200)))]
    callers += [threading.Thread(target=callers[0]._target) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [([1] * PARTS, [PARTS] * PARTS)] * 600


def test_a_member_that_keeps_a_part_is_waited_for_and_then_spared(monkeypatch):
    monkeypatch.setattr(team, "FIRST_REST", 3)
    monkeypatch.setattr(parallel._team, "_rest", 1)
    for _ in range(100):
        assert run([count_parts, note_count], 3_000_000, parts=2) == ([1, 1], [2, 2])
        if not parallel._team.is_near():
            break
    else:
        pytest.skip("no member took a part: the machine has no second core to spare")
    assert [parallel._team.is_near() for _ in range(3)][-1]


def test_an_interrupted_task_ends_when_no_member_holds_a_part_of_it(monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(team.time, "sleep", interrupt)
        for _ in range(40):
            record, plan = np.zeros(COUNT + 1, np.int64), np.array([30_000_000], np.int64)
            places, nothing = np.array([place_of(count_parts)], np.int64), np.zeros((1, 1), np.float32)
            try:
                parallel.run_parts(places, nothing, nothing, record, plan, 1, 2, parallel.LONG_WORK)
            except KeyboardInterrupt:
                assert record[:2].tolist() == [1, 1]
                break
        else:
            pytest.skip("no member took a part: the machine has no second core to spare")
    assert run([count_parts, note_count]) == ([1] * PARTS, [PARTS] * PARTS)


def test_members_start_when_they_are_needed_and_only_once():
    run([count_parts], parts=1)
    assert parallel._team._members == 0
    for _ in range(3):
        run([count_parts], parts=3)
    assert parallel._team._members == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_works_without_the_members_of_its_parent():
    run([count_parts])
    child = os.fork()
    if child == 0:
        os._exit(0 if run([count_parts, note_count]) == ([1] * PARTS, [PARTS] * PARTS) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
