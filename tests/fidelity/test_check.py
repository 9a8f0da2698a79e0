"""`isobit fidelity` from end to end: three checkpoints agree, planted defects in isobit's own run exit 1."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from isobit.cli.app import run as isobit
from tests.goldens.checkpoints import CHECKPOINTS, make_checkpoint

pytest.importorskip("torch", reason="needs isobit[fidelity]")
pytest.importorskip("transformers.models.qwen4_exp", reason="needs isobit[fidelity]")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("fidelity")
    return {name: make_checkpoint(name, parent / name) for name in CHECKPOINTS}


def fidelity(capsys, *arguments):
    code = isobit(["fidelity", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_agrees(folders, name, capsys):
    code, report = fidelity(capsys, folders[name])
    assert code == 0, report["failures"]
    assert report["passed"]
    assert report["past_budget"] >= 72
    assert report["free"]["top1"] + len(report["differences"]) == report["tokens"]
    assert max(part["error"] for part in report["parts"]) < 1e-4


def swapped_experts(checkpoint):
    """isobit's expert 0 and 1 of layer 1 change places."""
    linear = checkpoint.linear

    def tampered(name, *sizes):
        other = {"0": "1", "1": "0"}
        parts = name.split(".experts.")
        if len(parts) == 2 and parts[0] == "layers.1.mlp":
            expert, _, projection = parts[1].partition(".")
            name = f"{parts[0]}.experts.{other.get(expert, expert)}.{projection}"
        return linear(name, *sizes)

    return tampered


def scaled_output(checkpoint):
    """One scale vector of isobit's output projection is one percent off."""
    linear = checkpoint.linear

    def tampered(name, *sizes):
        found = linear(name, *sizes)
        if name == "layers.3.self_attn.o_proj":
            return dataclasses.replace(found, svh=(found.svh.astype(np.float32) * 1.01).astype(np.float16))
        return found

    return tampered


@pytest.mark.parametrize("defect", [swapped_experts, scaled_output])
def test_a_planted_defect_exits_1(folders, defect, capsys, monkeypatch):
    from isobit.fidelity import isobit_run

    load_model = isobit_run.load_model

    def load_tampered(checkpoint, ops, context):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "linear", defect(checkpoint))
            return load_model(checkpoint, ops, context)

    monkeypatch.setattr(isobit_run, "load_model", load_tampered)
    code, report = fidelity(capsys, folders["plain_sailing"])
    assert code == 1
    assert report["failures"]


def test_a_checkpoint_that_is_edited_meanwhile_gives_no_verdict(folders, tmp_path, capsys, monkeypatch):
    from isobit.fidelity import check

    folder, load_reference = shutil.copytree(folders["plain_sailing"], tmp_path / "edited"), check.load_reference

    def edit_and_load(reference, checkpoint):
        path = checkpoint.store.files[0]
        path.write_bytes(path.read_bytes())
        load_reference(reference, checkpoint)

    monkeypatch.setattr(check, "load_reference", edit_and_load)
    assert isobit(["fidelity", str(folder), "--tokens", "20"]) == 2
    said = capsys.readouterr()
    assert "was edited since it was opened" in said.err
    assert "PASS" not in said.out


def test_the_report_says_pass_plainly(folders, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question:\n" * 8)
    assert isobit(["fidelity", str(folders["plain_sailing"]), "--text", str(text), "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "40 positions, 5 past the indexer's budget" in lines
    assert lines[-1].startswith("PASS: top-1 agreement ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-gib", "0.001"], "the float32 reference needs"),
        (["--tokens", "5000"], "5000 tokens: expected 1 to the checkpoint's window of 2,048"),
        (["--text", "/nonexistent/text"], "/nonexistent/text: cannot be read"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(folders, arguments, message, capsys):
    assert isobit(["fidelity", str(folders["plain_sailing"]), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_missing_extra_is_named(folders, capsys, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "isobit.fidelity.check", raising=False)
    monkeypatch.setitem(sys.modules, "isobit.fidelity.reference", None)
    for name in [name for name in sys.modules if name.startswith("isobit.fidelity.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert isobit(["fidelity", str(folders["plain_sailing"])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "isobit fidelity needs torch" in line
    assert "pip install 'isobit[fidelity]'" in line
