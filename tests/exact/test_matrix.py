"""The exactness matrix is green, covers what it says, and turns red when a defect is planted."""

from dataclasses import replace

import numpy as np
import pytest

from isobit.engine.rounds import Rounds
from isobit.exact.cells import DIMENSIONS, Cell, all_cells, all_pairs, covering_cells
from isobit.exact.matrix import compute, run_matrix
from isobit.exact.workload import Laboratory
from isobit.model import flash_next
from isobit.model.state import StatePool
from isobit.ops import set_threads, threads
from isobit.ops.sample import packed_draws

DRAFTED = Cell("deep whole", "among strangers", "half right", "fresh", "sampled", "2")
RESUMED = Cell("batched", "alone", "off", "resumed", "greedy", "1")
FROM_HOST = Cell("deep small", "among strangers", "copies", "from host memory", "sampled", "1")
RESTARTED = Cell("deep middle", "alone", "mtp", "after restart", "sampled", "2")


@pytest.fixture
def laboratory(test_checkpoint):
    before = threads()
    laboratory = Laboratory(test_checkpoint, np.random.default_rng(3), context=300)
    yield laboratory
    laboratory.close()
    set_threads(before)


def test_every_pair_of_values_is_covered():
    cells = covering_cells(np.random.default_rng(0))
    assert frozenset().union(*(cell.pairs for cell in cells)) == all_pairs()
    assert len(cells) < 40 < len(list(all_cells())) == np.prod([len(values) for values in DIMENSIONS.values()])


def test_every_pair_of_values_agrees(laboratory):
    outcomes = list(run_matrix(laboratory, np.random.default_rng(1), minutes=0))
    assert [outcome for outcome in outcomes if outcome.difference] == []


@pytest.mark.parametrize("cell", [DRAFTED, RESUMED, FROM_HOST, RESTARTED], ids=str)
def test_a_cell_uses_what_it_names(laboratory, cell, monkeypatch):
    """Drafts are proposed and partly wrong, rows are reused: else a cell would prove nothing."""
    ends = []
    retire = Rounds._retire
    monkeypatch.setattr(Rounds, "_retire", lambda rounds, lane, *rest: (ends.append(lane), retire(rounds, lane, *rest)))
    subject = laboratory.subject(cell.sampling == "sampled")
    ends.clear()
    before = laboratory.engine.status().cache
    assert compute(laboratory, subject, cell).difference is None
    lane = next(lane for lane in ends if lane.request.tokens == subject.request.tokens)
    assert (lane.rows_reused > 0) == (cell.start != "fresh")
    after = laboratory.engine.status().cache
    assert (after.host_hits > before.host_hits) == (cell.start == "from host memory")
    if cell.drafts == "half right":
        assert 0 < lane.accepted < lane.drafted


def test_a_state_that_is_not_rewound_is_found(laboratory, monkeypatch):
    def settle_all(state, stream, rows):
        segment = state._unsettled.pop(stream.slot)
        stream.rows = segment.first + rows

    subject = laboratory.subject(sampled=True)
    monkeypatch.setattr(StatePool, "settle", settle_all)
    assert compute(laboratory, subject, DRAFTED).difference is not None


def test_a_stale_kept_state_is_found(laboratory, monkeypatch):
    restore = StatePool.restore

    def restore_wrongly(state, kept):
        stream = restore(state, kept)
        name = next(name for name in state.recurrent if name.endswith(".recurrent"))
        state.recurrent[name][stream.slot] *= np.float32(1 + 2**-20)
        return stream

    subject = laboratory.subject(sampled=False)
    monkeypatch.setattr(StatePool, "restore", restore_wrongly)
    assert compute(laboratory, subject, RESUMED).difference is not None


def test_draws_that_depend_on_company_are_found(laboratory, monkeypatch):
    def keyed_by_row(draws):
        return packed_draws([d if i == 0 else replace(d, position=0) for i, d in enumerate(draws)])

    subject = laboratory.subject(sampled=True)
    monkeypatch.setattr(flash_next, "packed_draws", keyed_by_row)
    cell = Cell("serial", "strangers mid-prefill", "half right", "fresh", "sampled", "1")
    assert compute(laboratory, subject, cell).difference is not None
