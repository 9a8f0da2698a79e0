"""`isobit contract`: its table, its JSON, its exit codes."""

import json

import pytest

from isobit.cli.app import run
from isobit.ops import contract
from tests.contract.toy import Doubling


class Broken(Doubling):
    name = "broken"
    implementations = ("cpu",)

    def compute(self, implementation, x, out):
        out[...] = 3 * x


@pytest.fixture
def broken_op():
    contract.registered()
    contract.register(Broken())
    yield
    del contract._registry["cpu"]["broken"]


def test_a_green_contract(capsys):
    assert run(["contract", "--filter", "shift_*"]) == 0
    out = capsys.readouterr().out
    assert "shift_rows" in out
    assert "The contract holds" in out
    assert "Not covered:" in out


def test_json(capsys):
    assert run(["contract", "--filter", "shift_rows", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    (op,) = report["ops"]
    assert op["name"] == "shift_rows"
    assert op["cases"]
    assert op["limits"]
    assert {check["gate"] for check in op["checks"]} == {"reference", "rows", "replaces", "hygiene"}
    assert all(control["seen"] for control in op["controls"])


@pytest.mark.usefixtures("broken_op")
def test_a_red_gate_is_exit_code_1(capsys):
    assert run(["contract", "--filter", "broken"]) == 1
    out = capsys.readouterr().out
    assert "failed: broken, cpu, gate reference" in out
    assert "The contract is broken" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--filter", "nonesuch"], "matches no op"), (["--device", "abacus"], "--device is abacus: expected one of cpu")],
)
def test_what_cannot_be_run_is_one_line(capsys, arguments, words):
    assert run(["contract", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
