"""Every op has planted defects of its own for every gate, on every device, and the emulator's gates see them too."""

from collections import Counter

import pytest

from isobit.contract.controls import controls_of
from isobit.contract.controls.planted import Planting, plantings_of
from isobit.contract.gates import GATES
from isobit.contract.run import cases_of, run_control
from isobit.ops.contract import registered

FEWEST = 2  # defects of an op's own for each gate


def own_plantings(op) -> list[Planting]:
    controls_of(op)  # imports the families
    return plantings_of(op)


def too_few(op) -> dict[str, int]:
    counts = Counter(planting.gate for planting in own_plantings(op))
    return {gate: counts[gate] for gate in GATES if counts[gate] < FEWEST}


@pytest.mark.parametrize("name", registered("cpu"))
def test_each_op_has_defects_of_its_own_for_every_gate(name):
    assert too_few(registered("cpu")[name]) == {}


@pytest.mark.usefixtures("emulated_cuda")
def test_each_cuda_op_has_defects_of_its_own_for_every_gate():
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")
    assert {name: few for name, op in registered("cuda").items() if (few := too_few(op))} == {}


def test_every_op_of_the_cpu_is_one_of_cuda():
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")
    assert registered("cuda").keys() == registered("cpu").keys()


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("name", registered("cpu"))
def test_the_gates_see_every_defect_on_a_device(name):
    pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")
    op = registered("cuda")[name]
    cases = cases_of(op, wide=False)
    results = [run_control(control, cases) for control in controls_of(op)]
    assert [result.defect for result in results if not result.red] == []
