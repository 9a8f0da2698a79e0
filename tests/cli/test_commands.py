"""The command line: what scripts and newcomers rely on."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from isobit.cli.app import BROKEN_PIPE, run
from isobit.cli.common import COMPILING, printable
from isobit.errors import IsobitError

COMMANDS = ("demo", "generate", "serve", "verify", "inspect", "synth", "convert", "fidelity", "contract", "bench")


def isobit(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "isobit", *arguments], capture_output=True, text=True, **options)


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys, isobit.cli.app as app; app.run(['--help']); print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    for command in COMMANDS:
        assert command in done.stdout
    assert not loaded & {"torch", "transformers", "numba", "numpy", "fastapi"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert run([command, "--help"]) == 0
    assert "Usage: isobit" in capsys.readouterr().out


def test_no_command_shows_the_help(capsys):
    assert run([]) == 0
    assert "isobit demo" in capsys.readouterr().out


def test_the_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("isobit ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "frob"),
        (["--nope"], "--nope"),
        (["generate"], "DIR"),
        (["generate", "DIR", "hi", "--temperature", "hot"], "--temperature"),
        (["generate", "DIR", "hi", "--seed", "abc"], "--seed"),
        (["synth", "DIR", "--layers", "0"], "--layers"),
        (["bench", "frob"], "frob"),
        (["generate", "DIR", "hi", "--temperature", "3"], "0 to 2"),
        (["generate", "DIR", "hi", "--temperature", "nan"], "0 to 2"),
        (["generate", "DIR", "hi", "--prefill", "fast"], "deep, batched, serial"),
        (["generate", "DIR", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "DIR", "hi", "--raw", "--system", "x"], "--system"),
        (["generate", "/no/such/folder", "hi"], "/no/such/folder"),
        (["serve", "DIR", "--port", "99999"], "65,535"),
        (["serve", "DIR", "--parallel", "0"], "1 to 256"),
        (["serve", "DIR", "--spill-dir", "x", "--prompt-cache-gib", "0"], "--spill-dir needs a prompt cache"),
        (["serve", "DIR", "--host-cache-gib", "1", "--prompt-cache-gib", "0"], "--host-cache-gib needs a prompt cache"),
        (["serve", "DIR", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["bench", "prefill", "DIR", "--lengths", "a,b"], "--lengths"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_one_line(arguments, said, capsys):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("isobit: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "DIR", "hi", "--seed", "abc"],
        ["generate", "DIR", "hi", "--temperature", "hot"],
        ["synth", "DIR", "--layers", "0"],
        ["bench", "resume", "DIR", "--length", "3"],
    ],
    ids=" ".join,
)
def test_a_wrong_value_is_told_in_words_for_people(arguments, capsys):
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert "Input should" not in said
    assert "parse" not in said
    assert arguments[-2] in said
    assert arguments[-1] in said


def test_generate_names_the_seed_that_it_drew(test_checkpoint, capsys):
    arguments = ["generate", str(test_checkpoint), "hi", "--max-tokens", "12", "--ignore-eos"]
    assert run(arguments) == 0
    first = capsys.readouterr()
    option, seed = first.err.removeprefix("isobit: ").removesuffix(" gives this reply again\n").split()
    assert option == "--seed"
    assert run([*arguments, "--seed", seed]) == 0
    assert capsys.readouterr() == (first.out, "")
    assert run([*arguments, "--temperature", "0"]) == 0
    assert capsys.readouterr().err == ""


def test_a_warning_is_told_once_as_all_else_is(test_checkpoint, capsys):
    for _ in range(2):
        arguments = ["hi", "--max-tokens", "1", "--seed", "1", "--device", "cpu", "--memory-gib", "60000"]
        assert run(["generate", str(test_checkpoint), *arguments]) == 0
        said = capsys.readouterr().err
        assert said.startswith("isobit: --memory-gib is 60000.00 GiB, but the machine has ")
        assert said.count("\n") == 1


def test_a_prompt_that_is_too_long_is_told_what_generate_can_do_about_it(test_checkpoint, capsys):
    assert run(["generate", str(test_checkpoint), "x" * 30, "--raw", "--context", "20"]) == 2
    said = capsys.readouterr().err
    assert "the prompt has 30 tokens, but 19 fit in a context of 20 with a reply" in said
    assert "or raise --context, up to the model's window of 2,048" in said
    assert run(["generate", str(test_checkpoint), "x" * 3000, "--raw"]) == 2
    said = capsys.readouterr().err
    assert "3,000 tokens, but 2,047 fit" in said
    assert "shorten it, as this is the model's whole window" in said
    assert "raise" not in said


def test_the_silence_of_a_first_run_is_explained_on_a_terminal(test_checkpoint, capsys, monkeypatch):
    arguments = ["generate", str(test_checkpoint), "hi", "--max-tokens", "1", "--seed", "1"]
    monkeypatch.setattr("isobit.kernels.none_kept", lambda: True)
    assert run(arguments) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(arguments) == 0
    assert capsys.readouterr().err.startswith(f"{COMPILING}\n")
    monkeypatch.setattr("isobit.kernels.refused_folder", lambda: "/nowhere")
    assert run(arguments) == 0
    assert "since /nowhere cannot be written: set NUMBA_CACHE_DIR" in capsys.readouterr().err
    monkeypatch.setattr("isobit.kernels.none_kept", lambda: False)
    assert run(arguments) == 0
    assert COMPILING not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (IsobitError("first\nsecond"), "first second"),
        (IsobitError("tensor \x1b[2Jx"), "tensor \ufffd[2Jx"),
        (PermissionError(13, "Permission denied", "model.safetensors"), "model.safetensors: Permission denied"),
        (MemoryError("Unable to allocate 9 TiB"), "memory ran out (Unable to allocate 9 TiB): close other programs"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_of_the_world_is_one_line(error, shown, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("isobit.cli.generate.open_engine", fail)
    assert run(["generate", "DIR", "hi"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"isobit: {shown}")
    assert said.count("\n") == 1


def test_a_stream_that_is_closed_or_cannot_spell_a_character_is_no_defect(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("isobit.cli.generate.open_engine", lambda *_, **__: print("é\udcff"))
    with pytest.raises(AttributeError, match="NoneType"):
        run(["generate", "DIR", "hi"])
    sys.stdout.flush()
    assert written.getvalue() == b"\\xe9\\udcff\n"
    assert run(["generate", "DIR", "-", "--prefill", "x"]) == 2
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["--version"]) == 0


def test_a_prompt_that_is_no_utf8_is_named(capsys):
    assert run(["generate", "DIR", "ab\udcff"]) == 2
    assert "the prompt is not valid UTF-8 at byte 2" in capsys.readouterr().err
    assert run(["generate", "DIR", "ab", "--system", "\udcff"]) == 2
    assert "--system is not valid UTF-8 at byte 0" in capsys.readouterr().err


def test_a_full_disk_behind_standard_output_is_one_line(test_checkpoint):
    command = [sys.executable, "-m", "isobit", "inspect", str(test_checkpoint), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "isobit: input or output: No space left on device\n"


@pytest.mark.parametrize("command", [["synth", "DIR"], ["convert", "DIR", "NEW", "--bits", "3"]], ids=lambda c: c[0])
def test_progress_leaves_no_line_where_there_is_no_terminal(command, tmp_path, capsys):
    (tmp_path / "something").touch()
    names = {"DIR": str(tmp_path), "NEW": str(tmp_path / "new")}
    assert run([names.get(part, part) for part in command]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_defect_is_not_hidden(monkeypatch):
    monkeypatch.setattr("isobit.cli.generate.open_engine", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["generate", "DIR", "hi"])


def generate_json(capsys, folder, *options: str) -> dict:
    arguments = ["generate", str(folder), "Bits are bits. " * 8, "--json", "--max-tokens", "12", "--ignore-eos"]
    assert run([*arguments, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_gives_the_same_reply_however_the_prompt_is_computed(test_checkpoint, capsys):
    ways = (["--prefill", "serial"], ["--prefill", "batched"], [], ["--segment-rows", "5"], ["--threads", "1"])
    replies = [generate_json(capsys, test_checkpoint, "--seed", "4", *way) for way in ways]
    assert len({(r["text"], tuple(r["tokens"]), r["token_hash"], r["logits_hash"]) for r in replies}) == 1
    whole = replies[0]["prompt_tokens"]
    assert [reply["segment_rows"] for reply in replies] == [1, 64, whole, 5, whole]
    assert {"queued", "first_token", "total", "prompt_rate", "reply_rate"} == set(replies[0]["timings"])
    assert generate_json(capsys, test_checkpoint, "--seed", "5")["token_hash"] != replies[0]["token_hash"]
    raw = generate_json(capsys, test_checkpoint, "--seed", "4", "--raw")
    assert raw["prompt_tokens"] == 8 * 15 < replies[0]["prompt_tokens"]


def test_generate_streams_its_text_and_reads_standard_input(test_checkpoint):
    options = (str(test_checkpoint), "-", "--seed", "4", "--max-tokens", "12", "--ignore-eos")
    shown = isobit("generate", *options, input="né")
    described = json.loads(isobit("generate", *options, "--json", input="né").stdout)
    assert shown.stdout == described["text"] + "\n"
    assert shown.stderr == ""


def test_a_terminal_is_not_given_orders():
    assert printable("a\x1b[2Jb\r\nc\td\x9b é") == "a\ufffd[2Jb\ufffd\nc\td\ufffd é"


def test_generate_without_a_seed_names_the_one_it_took(test_checkpoint, capsys):
    first = generate_json(capsys, test_checkpoint)
    assert generate_json(capsys, test_checkpoint, "--seed", str(first["seed"]))["tokens"] == first["tokens"]


def test_a_reader_that_leaves_ends_generate_quietly(test_checkpoint):
    command = f"{sys.executable} -m isobit generate {test_checkpoint} hi --max-tokens 400 --ignore-eos | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True)
    assert len(done.stdout) == 1
    assert done.stderr == b""
    assert done.returncode == BROKEN_PIPE


def test_ctrl_c_ends_generate_with_130(test_checkpoint):
    command = [sys.executable, "-m", "isobit", "generate", str(test_checkpoint), "hi", "--max-tokens", "1900"]
    command += ["--ignore-eos", "--no-drafts"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == b""


@pytest.mark.parametrize("pause", [0.001, 0.03])
def test_ctrl_c_again_and_again_ends_generate_without_a_traceback(test_checkpoint, pause):
    command = [sys.executable, "-m", "isobit", "generate", str(test_checkpoint), "hi", "--max-tokens", "1900"]
    process = subprocess.Popen([*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.read(process.stdout.fileno(), 1)
    deadline = time.monotonic() + 20
    while process.poll() is None:
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    _, errors = process.communicate()
    assert process.returncode in (130, -signal.SIGINT)
    assert errors == b""


def test_bench_reports_ratios_of_one_run(test_checkpoint, capsys):
    assert run(["bench", "prefill", str(test_checkpoint), "--lengths", "8,70", "--repeats", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["tokens"] for result in report["lengths"]] == [8, 70]
    for result in report["lengths"]:
        assert set(result["tokens_per_second"]) == {"serial", "batched", "deep"}
        assert min(*result["tokens_per_second"].values(), result["deep_to_serial"], result["deep_to_batched"]) > 0


def test_bench_cuts_its_own_lengths_to_the_window(make_checkpoint, capsys):
    folder = make_checkpoint("test", overrides={"max_position_embeddings": 300})
    assert run(["bench", "prefill", str(folder), "--repeats", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "isobit: 3,000 tokens are beyond the window: measuring 299 instead\n"
    assert [result["tokens"] for result in json.loads(shown.out)["lengths"]] == [256, 299]


def test_bench_alone_shows_its_help(capsys):
    assert run(["bench"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "prefill" in shown.out


def test_bench_refuses_lengths_beyond_the_window(test_checkpoint, capsys):
    assert run(["bench", "prefill", str(test_checkpoint), "--lengths", "9000"]) == 2
    assert "2048" in capsys.readouterr().err
