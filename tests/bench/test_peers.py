"""The measurement beside exllamav3: its calls keep that package's rules, and both engines see the same rows."""

import importlib
import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.fidelity.choices import Run
from isobit.fidelity.isobit_run import run_isobit

pytest.importorskip("torch", reason="needs isobit[fidelity]")
ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake_peer"


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of bench/, with the fake exllamav3 beside it."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("peers", "fidelity_peers", "peer_isobit", "peer_exllamav3", "exllamav3"):
            del sys.modules[name]


def test_both_engines_draw_the_same_tokens(bench, test_checkpoint, monkeypatch):
    peers, peer_module = bench("peers"), bench("peer_exllamav3")
    monkeypatch.setattr(peer_module, "CHUNK_ROWS", 12)
    work = peers.Work(prompts=(40, 9), contexts=(30,), lanes=(1, 3), steps=3, repeats=1, vocabulary=384)
    mine = bench("peer_isobit").Isobit(test_checkpoint, work.rows, 3, "cpu")
    other = peer_module.Exllamav3(test_checkpoint, work.rows, 3, "cpu")
    found = [peers.measure(engine, work) for engine in (mine, other)]
    assert found[0]["first_tokens"] == found[1]["first_tokens"]
    assert list(found[0]["ms"]) == list(found[1]["ms"])
    prompts = [work.tokens(25, lane) for lane in range(3)]
    assert mine.open(prompts, 4) == other.open(prompts, 4)
    for row in ([5, 6, 7], [300, 2, 9]):
        assert mine.step(row) == other.step(row)
    tokens = work.tokens(31, 0)
    expected = run_isobit(Checkpoint(test_checkpoint), np.array(tokens)).logits
    np.testing.assert_array_equal(other.logits(tokens), expected.astype(np.float16))
    other.close()
    assert len(other.cache.free_slots) == 3


def test_ratios_are_of_rounds(bench):
    def found(ms, first):
        return {"version": "1", "ms": {"prompt": ms}, "first_tokens": {"40": first, "50": 1}, "load_seconds": 2.0}

    rounds = [{"isobit": found(a, 3), "exllamav3": found(b, 4)} for a, b in ((1.0, 2.0), (2.0, 8.0), (4.0, 9.0))]
    result = bench("peers").compared(rounds)
    assert result["ms"]["prompt"] == {"isobit": 2.0, "exllamav3": 8.0, "ratio": 2.25}
    assert result["same_first_token"] == "1/2"


@pytest.mark.parametrize(("mine", "peer", "code"), [(1e-4, 1e-3, 0), (1e-3, 1e-4, 1)])
def test_the_verdict_names_who_is_closer(bench, test_checkpoint, mine, peer, code, monkeypatch, capsys):
    pytest.importorskip("transformers.models.qwen4_exp", reason="needs isobit[fidelity]")
    script = bench("fidelity_peers")
    truth = np.random.default_rng(0).standard_normal((40, 384)).astype(np.float32)
    wrong = np.random.default_rng(1).standard_normal((40, 384)).astype(np.float32)
    reference = SimpleNamespace(run=lambda tokens: Run(truth, {}))
    monkeypatch.setattr(script.peer_exllamav3, "what_lacks", lambda folder: None)
    monkeypatch.setattr(script, "fitting_reference", lambda *arguments, **keywords: reference)
    monkeypatch.setattr(script, "load_reference", lambda *arguments: None)
    monkeypatch.setattr(script, "run_isobit", lambda *arguments: Run(truth + mine * wrong, {}))
    monkeypatch.setattr(script, "peer_logits", lambda *arguments: truth + peer * wrong)
    monkeypatch.setattr(sys, "argv", ["fidelity_peers.py", str(test_checkpoint), "--tokens", "40", "--json"])
    assert script.main() == code
    found = json.loads(capsys.readouterr().out)
    assert found["closer"] == (code == 0)
    assert found["isobit"]["error_mean"] == pytest.approx(mine, rel=0.1)
    assert found["exllamav3"]["error_mean"] == pytest.approx(peer, rel=0.1)


def test_a_missing_peer_is_one_line(test_checkpoint):
    if PathFinder.find_spec("exllamav3"):
        pytest.skip("exllamav3 is installed here")
    command = [sys.executable, str(ROOT / "bench/peers.py"), str(test_checkpoint)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "exllamav3 is not installed: pip install" in line


def test_a_recipe_has_nothing_for_the_peer(bench, tmp_path):
    assert "holds no *.safetensors files" in bench("peer_exllamav3").what_lacks(tmp_path)
