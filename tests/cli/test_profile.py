"""`--profile`: time per op beside the same replies, and what a prompt and a round are made of."""

import inspect
import json

import pytest

from isobit.cli.app import run
from isobit.cli.bench import bench
from isobit.cli.profile import BETWEEN

PROMPT = "Bits are bits. " * 6


def generate(capsys, folder, *options):
    arguments = ["generate", str(folder), PROMPT, "--max-tokens", "20", "--ignore-eos", "--seed", "4"]
    assert run([*arguments, "--device", "cpu", *options]) == 0
    return capsys.readouterr()


def by_phase(profile):
    return {phase["phase"]: phase for phase in profile}


def assert_adds_up(phase):
    """All of a phase's time is some op's, or between them."""
    assert sum(op["milliseconds"] for op in phase["ops"]) == pytest.approx(phase["milliseconds"])
    assert sum(op["share"] for op in phase["ops"]) == pytest.approx(1)
    assert BETWEEN in {op["op"] for op in phase["ops"]}
    times = [op["milliseconds"] for op in phase["ops"]]
    assert times == sorted(times, reverse=True)
    assert min(times) >= 0


def test_generate_prints_the_same_reply_and_the_profile_beside_it(test_checkpoint, capsys):
    plain, profiled = (generate(capsys, test_checkpoint, *options) for options in ((), ("--profile",)))
    assert profiled.out == plain.out
    assert plain.err == ""
    for said in ("prompt, deep: 1 round", "decode, 1 lane: ", "attention_read", "share", "step by step"):
        assert said in profiled.err


def test_generate_counts_each_round_once(test_checkpoint, capsys):
    plain = json.loads(generate(capsys, test_checkpoint, "--json", "--no-drafts").out)
    profiled = json.loads(generate(capsys, test_checkpoint, "--json", "--no-drafts", "--profile").out)
    phases = by_phase(profiled.pop("profile"))
    same = profiled.keys() - {"timings"}
    assert {name: profiled[name] for name in same} == {name: plain[name] for name in same}
    assert phases.keys() == {"prompt, deep", "decode, 1 lane"}
    prompt, decode = phases["prompt, deep"], phases["decode, 1 lane"]
    assert (prompt["rounds"], prompt["rows"]) == (1, profiled["prompt_tokens"])
    assert (decode["rounds"], decode["rows"]) == (19, 19)
    for phase in phases.values():
        assert_adds_up(phase)
        calls = {op["op"]: op["calls"] for op in phase["ops"]}
        assert calls["experts"] == 4 * phase["rounds"]
        assert calls["sample"] == phase["rounds"]


def test_bench_prefill_tells_the_three_ways_apart(test_checkpoint, capsys):
    lengths = ["--lengths", "8,70", "--repeats", "2", "--device", "cpu"]
    assert run(["bench", "prefill", str(test_checkpoint), *lengths, "--profile", "--json"]) == 0
    phases = by_phase(json.loads(capsys.readouterr().out)["profile"])
    rounds = {name: (phase["rounds"], phase["rows"]) for name, phase in phases.items()}
    assert rounds == {"prompt, serial": (156, 156), "prompt, batched": (6, 156), "prompt, deep": (4, 156)}
    for phase in phases.values():
        assert_adds_up(phase)


def test_bench_concurrent_tells_lanes_apart(test_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("isobit.cli.bench_lanes.STREAMS", (1, 3))
    options = ["--repeats", "1", "--reply-tokens", "24", "--device", "cpu", "--profile", "--json"]
    assert run(["bench", "concurrent", str(test_checkpoint), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["streams"] for result in report["results"]] == [1, 3] * 2
    phases = by_phase(report["profile"])
    assert {"prompt, deep", "prompt, deep, beside replies", "decode, 1 lane", "decode, 3 lanes"} <= phases.keys()
    three = phases["decode, 3 lanes"]
    assert three["rows"] == 3 * three["rounds"]
    for phase in phases.values():
        assert_adds_up(phase)


def test_benches_cut_their_own_lengths_to_the_window_and_refuse_others(make_checkpoint, capsys):
    folder = str(make_checkpoint("test", overrides={"max_position_embeddings": 150}))
    assert run(["bench", "resume", folder, "--repeats", "1", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "isobit: a prompt of 3,000 tokens is beyond the window: measuring 133 instead\n"
    assert json.loads(shown.out)[0]["tokens"] == 133
    assert run(["bench", "drafts", folder, "--repeats", "1", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "isobit: a reply of 128 tokens is beyond the window: measuring 75 instead",
        "isobit: a chat prompt beside its reply of 96 tokens is beyond the window: measuring 75 instead",
    ]
    assert len(json.loads(shown.out)) == 4
    for wrong, said in (
        (["resume", folder, "--length", "140"], "expected 133 or less"),
        (["concurrent", folder, "--reply-tokens", "150"], "expected less than the window of 150"),
    ):
        assert run(["bench", *wrong, "--device", "cpu"]) == 2
        assert said in capsys.readouterr().err


def test_bench_drafts_profiles_the_engine_that_drafts(test_checkpoint, capsys, monkeypatch):
    # Whether drafts pay is a matter of time.
    monkeypatch.setattr("isobit.engine.guard.RoundCosts.needs_plain_round", lambda costs, lanes: False)
    monkeypatch.setattr("isobit.engine.guard.DraftGuard.open", property(lambda guard: True))
    options = ["--repeats", "1", "--reply-tokens", "12", "--device", "cpu", "--profile", "--json"]
    assert run(["bench", "drafts", str(test_checkpoint), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["with"] for result in report["results"]] == ["neither", "cache, unused", "drafts", "drafts, wrong"]
    phases = by_phase(report["profile"])
    assert phases.keys() == {"prompt, deep", "decode, 1 lane"}
    assert phases["prompt, deep"]["rounds"] == 1
    # A drafted window has more rows than the one that neither would have.
    drafted = report["results"][2]["drafted"]
    assert drafted > 0
    assert phases["decode, 1 lane"]["rows"] == phases["decode, 1 lane"]["rounds"] + drafted
    for phase in phases.values():
        assert_adds_up(phase)


def test_every_bench_takes_it():
    for command in bench.registered_commands:
        assert "profile" in inspect.signature(command.callback).parameters, command.callback.__name__
