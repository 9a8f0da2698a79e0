"""`isobit generate --device cuda` as a process: one reply through graphs, step by step and without drafts."""

import json
import subprocess
import sys

import pytest

from isobit.checkpoint.synth_recipe import write_recipe

pytestmark = pytest.mark.usefixtures("real_gpu")

PROMPT = "Bits are bits. " * 6
LAYERS = 48
SAME = ("tokens", "token_hash", "logits_hash", "prompt_tokens", "receipt")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """As many layers as the real model has, of the tiny widths."""
    folder = tmp_path_factory.mktemp("recipe") / "checkpoint"
    write_recipe(folder, "test", layers=LAYERS)
    return folder


def generate(folder, *options: str) -> dict:
    """What a process prints about its reply."""
    asked = ("--max-tokens", "40", "--ignore-eos", "--seed", "4", "--device", "cuda", "--json", *options)
    command = [sys.executable, "-m", "isobit", "generate", str(folder), PROMPT, *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_profile_or_no_drafts_leave_the_reply_as_it_is(recipe):
    plain, profiled, undrafted = (generate(recipe, *options) for options in ((), ("--profile",), ("--no-drafts",)))
    assert plain["receipt"]["device"].startswith("cuda-")
    assert len(plain["tokens"]) == 40
    for other in (profiled, undrafted):
        assert {name: other[name] for name in SAME} == {name: plain[name] for name in SAME}
    assert undrafted["drafted"] == 0
    decode = {phase["phase"]: phase for phase in profiled["profile"]}["decode, 1 lane"]
    calls = {op["op"]: op["calls"] for op in decode["ops"]}
    assert calls["experts"] >= LAYERS * decode["rounds"]
    assert decode["milliseconds"] > 0
