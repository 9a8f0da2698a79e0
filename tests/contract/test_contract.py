"""Every implementation of every op passes the gates, and every planted defect turns its gate red."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import isobit
from isobit.contract.controls import FAMILIES, controls_of
from isobit.contract.controls.planted import _plantings
from isobit.contract.coverage import called_functions, op_functions
from isobit.contract.gates import GATES
from isobit.contract.report import spans
from isobit.contract.run import QUICK, cases_of, run_control, run_op
from isobit.ops import OP_FOLDERS, contract, load_ops
from isobit.ops.contract import Control, registered
from tests.contract.toy import Doubling

OPS = registered()
PACKAGE = Path(isobit.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
ARCHITECTURE, CONTRACT_PAGE = DOCS / "architecture.md", DOCS / "contract.md"


@pytest.mark.parametrize("name", OPS)
def test_gates_are_green_and_controls_red(name):
    report = run_op(OPS[name], QUICK)
    assert report.problems() == []
    assert report.controls
    assert report.limits


def test_a_control_that_stays_green_fails_the_run():
    control = Control("doubling", "rows", "none at all", Doubling)
    result = run_control(control, cases_of(Doubling(), wide=False))
    assert not result.red


def test_a_defect_that_raises_has_not_been_caught():
    class Raising(Doubling):
        implementations = ("oracle", "planted")

        def compute(self, implementation, x, out):
            raise ZeroDivisionError

    result = run_control(Control("doubling", "rows", "raises", Raising), cases_of(Doubling(), wide=False))
    assert not result.red
    assert "ZeroDivisionError" in result.defect


def test_every_op_function_is_called_by_the_contract():
    functions = op_functions("cpu")
    covered = {name for op in OPS.values() for name in called_functions(op, functions)}
    assert set(functions) - covered == set()


def test_the_architecture_page_lists_the_functions_that_there_are():
    table = ARCHITECTURE.read_text().split("## Ops as the model sees them")[1].split("\n## ")[0]
    listed = {
        line.split("`")[i].split("(")[0]
        for line in table.splitlines()
        if line.startswith("|")
        for i in range(1, line.count("`"), 2)
        if "(" in line.split("`")[i]
    }
    assert listed & set(op_functions("cpu")) == listed - {"Draw"}
    assert load_ops("cpu").device == "cpu"


def test_each_op_has_controls_of_every_gate():
    for op in OPS.values():
        assert {control.gate for control in controls_of(op)} == set(GATES)
    assert set(FAMILIES) == set(OP_FOLDERS)


def test_every_defect_is_for_an_op_that_exists():
    for op in OPS.values():
        controls_of(op)
    assert {planting.op for planting in _plantings} <= set(OPS)
    assert {planting.gate for planting in _plantings} <= set(GATES)
    assert len({(planting.op, planting.gate, planting.defect) for planting in _plantings}) == len(_plantings)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_contract_imports_the_controls():
    importers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("isobit.contract.controls") for name in imports_of(path))
    }
    assert importers == {"contract"}


def test_nothing_below_the_command_line_imports_the_contract():
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(name.split(".")[:2] == ["isobit", "contract"] for name in imports_of(path))
    }
    assert {name for name in importers if not name.startswith("contract/")} == {"cli/contract.py"}


def test_the_command_line_and_the_server_start_without_the_contract():
    code = (
        "import sys, isobit.cli.app, isobit.serve.app, isobit.engine.engine, isobit.ops; isobit.ops.load_ops('cpu'); "
        "print([name for name in sys.modules if name.startswith('isobit.contract')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_cases_are_the_same_in_every_run():
    for op in OPS.values():
        one, other = cases_of(op, wide=False), cases_of(op, wide=False)
        assert [case.label for case in one] == [case.label for case in other]
        labels = [case.label for case in one]
        assert len(set(labels)) == len(labels)


def test_spans():
    assert spans([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert spans(list(np.arange(4))) == "0-3"


def test_the_worked_example_of_the_page_passes():
    blocks = re.findall(r"^ +```python\n(.*?)^ +```", CONTRACT_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    plantings, names = list(_plantings), {}
    try:
        for block in blocks:
            exec(textwrap.dedent(block), names)
        report = run_op(names["Bounded"](), QUICK)
    finally:
        _plantings[:] = plantings
        contract._registry["cpu"].pop("bounded", None)
    assert report.problems() == []
    assert "rows of a batch are bounded by the first row's largest value" in [c.defect for c in report.controls]
