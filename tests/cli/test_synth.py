"""`isobit synth` as a command."""

import json
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from isobit.checkpoint.inspect import inspect_folder
from isobit.checkpoint.reader import Checkpoint
from isobit.cli.app import run as run_isobit
from isobit.cli.synth import synth
from isobit.errors import IsobitError

app = typer.Typer()
app.command()(synth)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_options_reach_the_checkpoint(tmp_path):
    folder = tmp_path / "made"
    options = (
        "--preset test --layers 5 --seed 7 --codebook mcg --bits 2 --head-bits 6 --ngram-rows 900 --no-mtp --biases"
    )
    result = run(str(folder), *options.split())
    assert result.exit_code == 0, result.output
    assert f"Wrote {folder}" in result.output
    checkpoint = Checkpoint(folder)
    assert inspect_folder(folder).usable
    assert checkpoint.config.num_hidden_layers == 5
    assert not checkpoint.has_mtp
    head = checkpoint.head()
    assert (head.bits, head.codebook) == (6, "mcg")
    assert checkpoint.linear("layers.0.linear_attn.out_proj").bits == 2
    assert checkpoint.linear("layers.3.self_attn.q_proj").bias is not None
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert quantization["codebook"] == "mcg"


def test_half_and_mixed_widths_are_understood(tmp_path):
    assert run(str(tmp_path / "half"), "--preset", "test", "--layers", "1", "--bits", "2.5").exit_code == 0
    assert run(str(tmp_path / "mixed"), "--preset", "test", "--layers", "1", "--bits", "mixed").exit_code == 0
    assert Checkpoint(tmp_path / "half").head().bits == 2.5


def test_a_predictable_checkpoint_says_nothing_else_of_itself(tmp_path):
    assert run(str(tmp_path / "made"), "--preset", "test", "--layers", "1", "--predictable").exit_code == 0
    assert inspect_folder(tmp_path / "made").usable
    assert Checkpoint(tmp_path / "made").has_mtp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bits", "three"), "--bits is three: expected a width"),
        (("--bits", "9"), "width 9 is unknown"),
        (("--bits", "nan"), "width nan is unknown"),
        (("--preset", "huge"), "preset 'huge' is unknown"),
        (("--preset", "test", "--predictable", "--no-mtp"), "needs the MTP head"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(tmp_path, options, message):
    result = run(str(tmp_path / "bad"), *options)
    assert isinstance(result.exception, IsobitError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_terminated_synth_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "isobit", "synth", str(tmp_path / "made"), "--preset", "full", "--layers", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not any(path.is_file() for path in tmp_path.rglob("*.partial")):
            assert process.poll() is None, "it ended before it could be terminated"
            time.sleep(0.02)
        process.terminate()
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def isobit(capsys, *arguments: str) -> tuple[int, str, str]:
    code = run_isobit(list(arguments))
    return code, *capsys.readouterr()


def test_a_recipe_is_a_checkpoint_to_other_commands_and_the_same_one_elsewhere(tmp_path, capsys):
    folders = [str(tmp_path / name) for name in ("one", "same", "other")]
    for folder, seed in zip(folders, "112", strict=True):
        code, out, _ = isobit(
            capsys, "synth", folder, "--preset", "test", "--layers", "2", "--seed", seed, "--in-memory"
        )
        assert code == 0
        assert f"Wrote {folder} (a recipe: 4 MB of weights, made in memory when the folder is opened)" in out
    code, shown, _ = isobit(capsys, "inspect", folders[0])
    assert code == 0
    assert "synthetic weights in memory" in shown
    asked = ("hi", "--max-tokens", "6", "--seed", "3", "--ignore-eos", "--json", "--device", "cpu")
    code, reply, _ = isobit(capsys, "generate", folders[0], *asked)
    assert code == 0
    (tmp_path / "reply.json").write_text(reply)
    assert isobit(capsys, "verify", str(tmp_path / "reply.json"), folders[1], "--device", "cpu")[0] == 0
    code, _, error = isobit(capsys, "verify", str(tmp_path / "reply.json"), folders[2], "--device", "cpu")
    assert code == 2
    assert "checkpoint" in error
    code, _, error = isobit(capsys, "convert", folders[0], str(tmp_path / "new"), "--bits", "3")
    assert code == 2
    assert error.count("\n") == 1
    assert "quantized" in error
