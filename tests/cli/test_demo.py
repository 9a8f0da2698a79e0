"""The demo: equal replies end with 0, others with 1, and no server is left behind."""

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from isobit.cli import demo as demo_command
from isobit.cli.app import run
from isobit.cli.demo_checkpoint import demo_checkpoint, kept_or_temporary
from isobit.cli.prompt_text import standard_library_text
from isobit.errors import IsobitError


@pytest.fixture
def small_demo(make_checkpoint, monkeypatch):
    """The demo on the tiny checkpoint, its window made long enough for the demo's prompt."""
    folder = make_checkpoint("test", overrides={"max_position_embeddings": 4096})
    monkeypatch.setattr("isobit.cli.demo_checkpoint.demo_checkpoint", lambda: folder)


def child_servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "isobit" in child.cmdline()]


def test_three_equal_ways(small_demo, capsys):
    assert run(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is True
    assert [(r["prefill"], r["segment_rows"]) for r in report["runs"]] == [
        ("serial", 1),
        ("batched", 64),
        ("deep", 1024),
    ]
    for result in report["runs"]:
        assert result["prompt_tokens"] >= 3000
        assert result["reply_tokens"] == 64
        assert result["token_hash"] == report["runs"][0]["token_hash"]
        assert result["logits_hash"] == report["runs"][0]["logits_hash"]
    assert not child_servers()


@pytest.mark.parametrize("field", ["token_hash", "logits_hash"])
def test_one_bit_of_difference_is_an_error(monkeypatch, capsys, field):
    same = demo_command.Run("serial", 1, 3072, 64, 1.0, 2.0, 3.0, "a" * 64, "b" * 64)
    deep = replace(same, prefill="deep", prompt_rate=24.0)
    odd = replace(deep, **{field: "c" * 64})
    monkeypatch.setattr("isobit.cli.demo_checkpoint.demo_checkpoint", lambda: Path("unused"))
    monkeypatch.setattr("isobit.serve.child.running_server", no_server)
    monkeypatch.setattr(demo_command, "_warm_up", lambda *_: None)
    monkeypatch.setattr(demo_command, "_runs", lambda *_: [same, same, odd])
    assert run(["demo"]) == 1
    shown = capsys.readouterr().out
    assert "NOT" in shown
    assert "c" * 64 in shown
    monkeypatch.setattr(demo_command, "_runs", lambda *_: [same, same, deep])
    assert run(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "All three agree" in shown
    assert "12.0 times as fast" in shown


class no_server:
    """Stands where the server process would."""

    def __init__(self, *_):
        pass

    def __enter__(self) -> str:
        return "http://127.0.0.1:9"

    def __exit__(self, *_) -> None:
        pass


def test_a_demo_that_fails_leaves_no_server(small_demo, monkeypatch, capsys):
    def fail(*_):
        assert len(child_servers()) == 1
        raise IsobitError("planted")

    monkeypatch.setattr(demo_command, "_warm_up", fail)
    assert run(["demo"]) == 2
    assert "planted" in capsys.readouterr().err
    assert not child_servers()


def test_the_demo_checkpoint_is_made_once_and_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("isobit.cli.demo_checkpoint.PRESET", "test")
    folder = demo_checkpoint()
    assert folder.is_relative_to(tmp_path)
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert made
    assert demo_checkpoint() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == made
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_cache_that_cannot_be_written_does_not_end_the_demo(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("isobit.cli.demo_checkpoint.PRESET", "test")
    with pytest.raises(IsobitError, match="XDG_CACHE_HOME"):
        demo_checkpoint()
    with kept_or_temporary() as folder:
        assert (folder / "config.json").is_file()
    assert not folder.parent.exists()


def test_an_interrupted_demo_leaves_no_half_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def interrupted(folder, preset):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("isobit.checkpoint.synth.synthesize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_checkpoint()
    assert list((tmp_path / "isobit").iterdir()) == []


def test_the_prompt_is_real_text_and_always_the_same():
    text = standard_library_text(3072)
    assert len(text) == 3072
    assert text == standard_library_text(8000)[:3072]
    assert "def " in text
    with pytest.raises(IsobitError, match="expected 10,000,000"):
        standard_library_text(10_000_000)
