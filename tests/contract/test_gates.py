"""Every implementation of every op passes the gates, and every planted defect turns its gate red."""

import sys
from pathlib import Path

import numpy as np
import pytest

from isobit.contract.gates import GATES
from isobit.ops.contract import registered

sys.path.insert(0, str(Path(__file__).parent))
from controls import generic_controls

OPS = registered()
PAIRS = [(name, implementation) for name, op in OPS.items() for implementation in op.implementations]


def cases_of(op, gate_seed=7):
    return list(op.cases(np.random.default_rng(gate_seed), full=False))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("name", "implementation"), PAIRS)
def test_gate_is_green(name, implementation, gate):
    op = OPS[name]
    cases = cases_of(op)
    assert cases
    for case in cases:
        problem = GATES[gate](op, implementation, case, np.random.default_rng(3))
        assert problem is None, f"{name}/{implementation} on {case.label}: {problem}"


@pytest.mark.parametrize("name", OPS)
def test_controls_are_red(name):
    op = OPS[name]
    cases = cases_of(op)
    for control in generic_controls(op):
        found = [GATES[control.gate](control.plant(), "planted", case, np.random.default_rng(3)) for case in cases]
        assert any(found), f"{name}: gate {control.gate} stays green with {control.defect} planted"


def test_every_op_folder_registers():
    assert len(OPS) >= 10
    assert all(op.limits() for op in OPS.values())
