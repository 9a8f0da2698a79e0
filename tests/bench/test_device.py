"""The script of a device session: it names what exists, keeps its limits, and says what became of every step."""

import importlib
import sys
import time
from pathlib import Path

import click
import pytest
import typer

from isobit.cli.app import app
from isobit.ops.contract import registered

pytest.importorskip("torch", reason="needs isobit[cuda]")
ROOT = Path(__file__).parents[2]
LONG = "import time; time.sleep(60)"


@pytest.fixture
def device(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench/cuda"))
    return importlib.import_module("device")


def session(device, tmp_path, gpu_gib=10.0, seconds=30.0, most=8):
    return device.Session(tmp_path / "out", gpu_gib, seconds, most)


def step(device, name, code, **options):
    return device.Step(name, (sys.executable, "-c", code), options.pop("seconds", 20), **options)


def verdicts(ran):
    return {name: outcome.verdict for name, outcome in ran.outcomes.items()}


@pytest.mark.parametrize(("contract", "thorough"), [("quick", False), ("normal", True), ("full", True)])
def test_every_step_names_what_exists(device, tmp_path, contract, thorough):
    steps = device.all_steps(tmp_path, contract, 512, thorough)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert {name.removeprefix("contract-") for name in names if name.startswith("contract-")} == set(registered("cuda"))
    commands = typer.main.get_command(app)
    for one in steps:
        assert set(one.needs) <= set(names)
        assert one.script is None or one.script.exists(), one.name
        if "isobit" in one.command:
            name, *arguments = one.command[one.command.index("isobit") + 1 :]
            command = commands.get_command(click.Context(commands), name)
            command.make_context(name, list(arguments))


def test_steps_are_chosen_with_what_they_need(device, tmp_path):
    steps = device.all_steps(tmp_path, "quick", 512, False)

    def chosen(only=(), skip=()):
        return [step.name for step in device.chosen_steps(steps, list(only), list(skip))]

    assert chosen(only=["exact"]) == ["synth-test", "exact"]
    timed = chosen(only=["timed"], skip=["peers"])
    assert "linear" in timed
    assert "peers" not in timed
    assert "synth-narrow" not in chosen(skip=["fidelity-*"])
    with pytest.raises(ValueError, match="nonsense matches no step"):
        chosen(only=["nonsense"])


def test_only_racecheck_has_kernels_that_it_can_follow(device, tmp_path):
    steps = device.all_steps(tmp_path, "quick", 512, False)
    assert [step.name for step in steps if "ISOBIT_RACECHECK" in step.environment] == ["racecheck", "racecheck-prompt"]


def test_what_reads_the_real_checkpoint_is_told_what_it_takes(device, tmp_path):
    steps = device.all_steps(tmp_path, "quick", 512, False)
    reading = {step.name: step for step in steps if str(tmp_path / "real") in step.command and step.alone}
    assert reading.keys() == {"peers", "load", "short_memory"}
    assert all(step.needs == ("synth-real",) and step.gpu_gib == device.REAL_GIB for step in reading.values())


def test_outcomes_are_told_and_logs_are_kept(device, tmp_path):
    made = tmp_path / "made"
    made.touch()
    steps = [
        step(device, "good", "print('first'); print('all is well')"),
        step(device, "bad", "raise SystemExit(3)"),
        step(device, "needy", "", needs=("bad",)),
        step(device, "made", "raise SystemExit(1)", makes=made),
        step(device, "large", "", gpu_gib=11),
        step(device, "slow", LONG, seconds=0.5),
        device.Step("absent", (sys.executable, "bench/no_such.py"), 5),
        device.Step("unknown", ("no-such-program",), 5),
        step(device, "timed", "print('42 ms')", alone=True, needs=("good",)),
    ]
    ran = session(device, tmp_path)
    ran.run(steps)
    assert verdicts(ran) == {
        "good": "passed",
        "bad": "FAILED 3",
        "needy": "no bad",
        "made": "passed",
        "large": "no room",
        "slow": "OUT OF TIME",
        "absent": "no such script",
        "unknown": "FAILED",
        "timed": "passed",
    }
    assert ran.outcomes["good"].said == "all is well"
    assert "42 ms" in (tmp_path / "out/all.log").read_text()
    assert len((tmp_path / "out/summary.txt").read_text().splitlines()) == len(steps)


def test_what_is_timed_runs_alone_and_a_waiting_step_measures_then(device, tmp_path):
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write"
    waits = "import sys, time; from pathlib import Path; go = Path(sys.argv[-1]); " + note + "('loaded ')\n"
    waits += "while not go.exists(): time.sleep(0.02)\n" + note + "('measured ')"
    steps = [
        step(device, "check", f"import time; time.sleep(1.5); {note}('checked ')"),
        step(device, "model", waits, alone=True, waits=True),
        step(device, "bench", f"{note}('benched ')", alone=True),
    ]
    ran = session(device, tmp_path)
    ran.run(steps)
    assert set(verdicts(ran).values()) == {"passed"}
    assert log.read_text() == "loaded checked measured benched "


def test_memory_and_numbers_bound_what_runs_together(device, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    code = (
        f"import time, os; from pathlib import Path; marks = Path({str(marks)!r}); mine = marks / str(os.getpid());"
        "mine.touch(); time.sleep(0.4); assert len(list(marks.iterdir())) <= 2; mine.unlink()"
    )
    ran = session(device, tmp_path, gpu_gib=10)
    ran.run([step(device, str(number), code, gpu_gib=5) for number in range(4)])
    assert set(verdicts(ran).values()) == {"passed"}


def test_the_limit_of_the_whole_ends_everything(device, tmp_path):
    ran = session(device, tmp_path, seconds=1)
    begin = time.monotonic()
    ran.run([step(device, "check", LONG), step(device, "timed", LONG, alone=True)])
    assert time.monotonic() - begin < 10
    assert verdicts(ran) == {"check": "CUT OFF", "timed": "not started"}
    assert (tmp_path / "out/summary.txt").exists()
