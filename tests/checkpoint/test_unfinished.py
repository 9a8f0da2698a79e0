"""Folders in the making: killed processes, full disks and processes side by side leave nothing, and take nothing."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isobit.checkpoint.unfinished import remove_abandoned, unfinished_folder
from isobit.cli.demo_checkpoint import demo_checkpoint
from tests.checkpoint.test_convert import SMALL, source_tensors, write_source

# Runs a command in a process whose files may not grow beyond a size, kernels and all else being loaded before.
LIMITED = """
import resource, signal, sys
from pathlib import Path
from isobit.cli.app import run
limit, arguments = int(sys.argv[1]), sys.argv[2:]
if arguments[0] == "convert":
    assert run(["convert", arguments[1], arguments[2] + "-unlimited", *arguments[3:]]) == 0
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(run(arguments))
"""


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def test_a_folder_is_there_within_and_gone_after(tmp_path):
    target = tmp_path / "target"
    with unfinished_folder(target) as folder:
        (folder / "file").touch()
        assert hidden(tmp_path) == [folder.name]
    with unfinished_folder(target) as folder:
        (folder / "file").touch()
        folder.rename(target)
    with pytest.raises(ZeroDivisionError), unfinished_folder(target):
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert (target / "file").exists()


def hold(target: Path, ready, go_on) -> None:
    with unfinished_folder(target) as folder:
        (folder / "half").touch()
        ready.set()
        go_on.wait()
        folder.rename(target)


def test_only_what_nobody_works_on_is_removed(tmp_path):
    target = tmp_path / "target"
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    worker = context.Process(target=hold, args=(target, ready, go_on))
    worker.start()
    assert ready.wait(60)
    held = hidden(tmp_path)
    others = [
        ".target.0123456.partial",
        ".target.0123abcz.partial",
        ".other.0123abcd.partial",
        ".target.x.0123abcd.partial",
    ]
    for name in (*others, ".target.0123abcd.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".target.fedcba98.partial").write_text("a file of somebody else's")
    (tmp_path / ".target.aaaaaaaa.partial").symlink_to(tmp_path / others[0])
    remove_abandoned(target)
    kept = [*others, ".target.fedcba98.partial", ".target.aaaaaaaa.partial", *held]
    assert hidden(tmp_path) == sorted(kept)
    go_on.set()
    worker.join()
    assert worker.exitcode == 0
    assert (target / "half").exists()


def killed_once_begun(command: list[str], folder: Path, **environment: str) -> None:
    """Start a command and kill it when its hidden folder holds a file."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment)
    wait_for(lambda: any(folder.glob(".*.partial/**/*.safetensors.*")) or any(folder.glob(".*.partial/**/.*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(hidden(folder)) == 1


def test_synth_removes_what_a_killed_one_left(tmp_path):
    target = tmp_path / "checkpoint"
    command = [sys.executable, "-m", "isobit", "synth", str(target), "--preset", "demo"]
    killed_once_begun(command, tmp_path)
    assert not target.exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_the_demo_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    code = "from isobit.cli.demo_checkpoint import demo_checkpoint; demo_checkpoint()"
    cache = tmp_path / "isobit"
    killed_once_begun([sys.executable, "-c", code], cache, XDG_CACHE_HOME=str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("isobit.cli.demo_checkpoint.PRESET", "demo")
    folder = demo_checkpoint()
    assert hidden(cache) == []
    assert (folder / "config.json").exists()


def limited(limit: int, *arguments: str) -> str:
    """What a command says whose files may have `limit` bytes; it fails, in one line."""
    command = [sys.executable, "-c", LIMITED, str(limit), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert said.startswith("isobit: ")
    assert "File too large" in said
    return said


@pytest.mark.parametrize("limit", [100, 20_000], ids=["texts", "tensors"])
def test_a_disk_that_is_full_midway_is_one_line_of_synth_and_leaves_nothing(tmp_path, limit):
    said = limited(limit, "synth", str(tmp_path / "checkpoint"), "--preset", "test")
    assert str(tmp_path / "checkpoint") in said
    assert ".partial" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_midway_is_one_line_of_convert_that_can_go_on(tmp_path):
    source = write_source(tmp_path / "source", source_tensors(**SMALL), **SMALL)
    target = tmp_path / "target"
    said = limited(5000, "convert", str(source), str(target), "--bits", "2")
    assert "finished tensors are kept" in said
    assert not target.exists()
    assert not list(tmp_path.rglob(".*"))
    again = [sys.executable, "-m", "isobit", "convert", str(source), str(target), "--bits", "2"]
    subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target", "target-unlimited"]
    whole = tmp_path / "target-unlimited"
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
