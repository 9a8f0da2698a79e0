"""A checkpoint's files changed under a running server: no reply of other bytes, no end of the process."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from isobit.checkpoint.reader import Checkpoint
from tests.serve.processes import ServerProcess

OPTIONS = ("--context", "200", "--parallel", "2", "--threads", "1", "--device", "cpu", "--prompt-cache-gib", "0")
BODY = {"prompt": "the same again and again", "max_tokens": 5, "seed": 1, "ignore_eos": True}


def cut_off(path: Path) -> None:
    os.truncate(path, 4096)


def one_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def copied_over(path: Path) -> None:
    """As `cp` does it: the file is emptied and written anew."""
    path.write_bytes(path.read_bytes())


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.rename(path)


@pytest.fixture
def folder(test_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(test_checkpoint, tmp_path / "checkpoint"))


def file_of(folder: Path, what: str) -> Path:
    """The file of the n-gram table, or of the token embeddings."""
    with Checkpoint(folder) as checkpoint:
        if what == "embeddings":
            return next(iter(checkpoint.embedding_layout().parts.values())).file
        return checkpoint.ngram_layout(checkpoint.config.ple_layers[0]).shards[0].file


@pytest.mark.parametrize(
    ("what", "edit"),
    [("table", cut_off), ("table", one_byte), ("embeddings", cut_off), ("embeddings", copied_over)],
)
def test_requests_after_an_edit_in_place_are_refused_by_the_files_name(
    folder, tmp_path, what: str, edit: Callable[[Path], None]
):
    path = file_of(folder, what)
    assert path != file_of(folder, "table" if what == "embeddings" else "embeddings")
    with ServerProcess(folder, tmp_path / "log", *OPTIONS) as server:
        server.complete(**BODY)
        assert server.get("/health").status_code == 200
        edit(path)
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60, trust_env=False)
            assert answer.status_code == 500
            message = answer.json()["error"]["message"]
            assert f"{path} was edited since it was opened" in message
            assert "\n" not in message
            assert ("4,096 now" in message) == (edit is cut_off)
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failing"
        assert str(path) in health.json()["problem"]
        assert "Traceback" not in server.said


@pytest.mark.parametrize("change", [replaced, Path.unlink])
def test_a_file_that_another_took_the_place_of_goes_on_being_read(folder, tmp_path, change: Callable[[Path], None]):
    paths = [file_of(folder, what) for what in ("table", "embeddings")]
    with ServerProcess(folder, tmp_path / "log", *OPTIONS) as server:
        before = server.complete(**BODY)["isobit"]
        for path in paths:
            change(path)
        after = server.complete(**BODY)["isobit"]
    assert before["receipt"] == after["receipt"]
    assert before["token_hash"] == after["token_hash"]
