"""Saved replies are computed again: equal, different, or not comparable."""

import json
from pathlib import Path

import pytest

from isobit.cli.app import run
from isobit.engine.engine import Engine
from isobit.engine.origin import Origin

PROMPT = "Receipts are bits that one can check. "


@pytest.fixture(scope="module")
def saved(test_checkpoint, tmp_path_factory) -> dict:
    """What `generate --json` says of one reply."""
    path = tmp_path_factory.mktemp("receipts") / "reply.json"
    with pytest.MonkeyPatch.context() as patch, open(path, "w", encoding="utf-8") as file:
        patch.setattr("sys.stdout", file)
        options = ["--json", "--max-tokens", "9", "--seed", "8", "--temperature", "0.9", "--top-k", "90"]
        assert run(["generate", str(test_checkpoint), PROMPT, *options]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def verify(tmp_path, capsys):
    """verify(records or text, *arguments) -> (exit code, standard output, standard error)."""

    def call(content: list[dict] | dict | str, *arguments: str) -> tuple[int, str, str]:
        lines = content if isinstance(content, str) else "\n".join(map(json.dumps, listed(content)))
        (tmp_path / "saved.jsonl").write_text(lines, encoding="utf-8")
        code = run(["verify", str(tmp_path / "saved.jsonl"), *arguments])
        return code, *capsys.readouterr()

    return call


def listed(content: list[dict] | dict) -> list[dict]:
    return content if isinstance(content, list) else [content]


def changed(saved: dict, **fields) -> dict:
    """A copy with fields of the reply changed, those of its receipt by receipt__NAME."""
    copy = json.loads(json.dumps(saved))
    for name, value in fields.items():
        part, _, inner = name.rpartition("__")
        (copy[part] if part else copy)[inner] = value
    return copy


def exchange(saved: dict) -> dict:
    """The same reply as a server's response to a request that names less."""
    request = {"prompt": saved["request"]["prompt"], "seed": 8, "stream": True, "model": "m"}
    hashes = {name: saved[name] for name in ("token_hash", "logits_hash", "receipt")}
    choices = [{"index": 0, "text": saved["text"], "finish_reason": saved["finish_reason"]}]
    return {"request": request, "response": {"choices": choices, "isobit": hashes}}


@pytest.mark.parametrize("prefill", ["serial", "deep"])
def test_equal_replies_are_equal_however_they_are_computed(saved, verify, prefill):
    code, said, _ = verify([saved, exchange(saved)], "--prefill", prefill)
    assert code == 0
    assert said.count(": equal (9 tokens") == 2
    assert said.endswith("All 2 equal.\n")


def test_differences_are_named(saved, verify, test_checkpoint):
    other = [*saved["tokens"]]
    other[5] += 1
    records = [
        changed(saved, tokens=other),
        changed(saved, tokens=saved["tokens"][:4]),
        changed(exchange(saved), response__isobit=changed(exchange(saved)["response"]["isobit"], token_hash="0" * 64)),
        changed(saved, logits_hash="1" * 64),
        changed(saved, text="x" + saved["text"]),
        changed(saved, finish_reason="stop"),
        changed(saved, receipt__reply_tokens=8),
        saved,
    ]
    code, said, _ = verify(records, str(test_checkpoint), "--json")
    report = json.loads(said)
    assert code == 1
    assert report["equal"] is False
    assert [reply["equal"] for reply in report["replies"]] == [False] * 7 + [True]
    differences = [reply["difference"] for reply in report["replies"]]
    first = {"what": "reply token 5 differs", "recorded": other[5], "computed": saved["tokens"][5], "position": 5}
    assert differences[0] == first
    assert (differences[1]["position"], differences[1]["recorded"]) == (4, "the end")
    told = [difference["what"] for difference in differences[2:6]]
    assert told == [f"the {what} differs" for what in ("token hash", "logits hash", "text", "finish reason")]
    assert differences[6]["what"] == "the number of tokens differs"


def test_a_difference_is_one_line_for_people(saved, verify):
    code, said, _ = verify(changed(saved, tokens=[1, *saved["tokens"][1:]]))
    assert code == 1
    line, verdict = said.splitlines()
    assert line.endswith(f"reply token 0 differs: 1 in the record, {saved['tokens'][0]} computed")
    assert verdict == "1 of 1 differs."


FOREIGN = {
    "checkpoint": ({"receipt__checkpoint": "f" * 64}, ("checkpoint", "f" * 64)),
    "arithmetic": ({"receipt__arithmetic": "0"}, ("arithmetic version is 0", "is 1")),
    "device": ({"receipt__device": "sm_90"}, ("device kind is sm_90", "is cpu")),
}


@pytest.mark.parametrize(("fields", "named"), FOREIGN.values(), ids=FOREIGN)
def test_what_cannot_be_compared_is_refused(saved, verify, fields, named):
    foreign = changed(saved, **fields)
    code, said, error = verify([foreign, foreign])
    assert (code, said, error.count("\n")) == (2, "", 1)
    assert "line 1" in error
    assert "(and 1 more that cannot be compared)" in error
    assert all(name in error for name in named)


@pytest.mark.parametrize(("fields", "named"), FOREIGN.values(), ids=FOREIGN)
def test_what_cannot_be_compared_stops_no_other_line(saved, verify, fields, named):
    code, said, error = verify([saved, changed(saved, **fields), changed(saved, finish_reason="stop"), exchange(saved)])
    lines = said.splitlines()
    assert (code, error, len(lines)) == (1, "", 5)
    assert [": equal (" in line for line in lines[:4]] == [True, False, False, True]
    assert "line 2" in lines[1]
    assert all(name in lines[1] for name in named)
    assert lines[4] == "1 of 4 differs, 1 cannot be compared."


EDITED = {
    "seed": ({"request__seed": 9}, "different sampling"),
    "top_p": ({"request__top_p": 0.5}, "different sampling"),
    "prompt": ({"request__prompt": [1, 2]}, "its prompt has hash"),
    "more tokens": ({"request__max_tokens": 10}, "asks for at most 10 tokens, but its receipt is of at most 9"),
    "fewer tokens": ({"request__max_tokens": 8}, "asks for at most 8 tokens, but its receipt is of at most 9"),
    "the limit": ({"receipt__max_tokens": 12}, "asks for at most 9 tokens, but its receipt is of at most 12"),
    "the context": ({"receipt__context": 60}, "asks for at most 9 tokens, but its receipt is of at most 9"),
}


@pytest.mark.parametrize(("fields", "said"), EDITED.values(), ids=EDITED)
def test_a_request_that_is_not_its_receipts_is_noticed(saved, verify, fields, said):
    code, out, error = verify([changed(saved, **fields), saved])
    first, second, summary = out.splitlines()
    assert (code, error, summary) == (1, "", "1 of 2 differs.")
    assert "line 1" in first
    assert said in first
    assert ": equal (" in second
    code, out, _ = verify(changed(saved, **fields), "--json")
    report = json.loads(out)
    assert (code, report["equal"], report["replies"][0]["equal"]) == (1, False, False)
    assert said in report["replies"][0]["problem"]


def test_a_limit_that_the_context_cuts_is_no_edit(test_checkpoint, verify, capsys):
    arguments = ["generate", str(test_checkpoint), "abc", "--raw", "--context", "12", "--seed", "1", "--ignore-eos"]
    assert run([*arguments, "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert (reply["receipt"]["max_tokens"], reply["receipt"]["context"]) == (9, 12)
    whole = changed(reply, request__max_tokens=256)
    older = changed(whole, receipt__context=None)
    code, said, _ = verify([reply, whole, older])
    assert (code, said.count(": equal (")) == (0, 3)
    assert verify(changed(older, request__max_tokens=8))[0] == 1


def test_the_folder_must_be_known(saved, verify):
    code, _, error = verify(exchange(saved))
    assert (code, error.count("\n")) == (2, 1)
    assert "isobit verify FILE DIR" in error


BROKEN = {
    "empty": ("", "is empty"),
    "no JSON": ("{", "is not valid JSON"),
    "bad lines": ('{\n{"a": 1}', "line 1 is not valid JSON"),
    "a number": ("5", "holds no request and reply"),
    "a response alone": ('{"choices": [], "isobit": {}}', "holds no request and reply"),
    "a request alone": ('{"request": {"prompt": "a"}}', "no receipt: field 'token_hash' is missing"),
    "no receipt": ('{"request": {}, "token_hash": "", "logits_hash": ""}', "field 'receipt' is missing"),
    "a failed response": ('{"request": {}, "response": {"error": {}}}', "no receipt"),
    "not an object": ('{"request": {}, "response": [5]}', "no receipt"),
}


@pytest.mark.parametrize(("content", "said"), BROKEN.values(), ids=BROKEN)
def test_a_file_of_anything_else_is_one_line(verify, content, said):
    code, out, error = verify(content)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert said in error


def test_a_line_of_anything_else_stops_no_other(saved, verify):
    code, said, error = verify("\n".join(["{", json.dumps(saved), "5"]))
    first, second, third, summary = said.splitlines()
    assert (code, error) == (1, "")
    assert "line 1 is not valid JSON" in first
    assert ": equal (" in second
    assert "line 3 holds no request and reply" in third
    assert summary == "0 of 3 differ, 2 cannot be compared."


def test_a_bad_request_or_receipt_is_named(saved, verify):
    for record, said in (
        (changed(saved, request__top_k="many"), "'top_k'"),
        (changed(saved, receipt__max_tokens="many"), "'receipt.max_tokens'"),
        (changed(saved, request__top_p=7), "'top_p'"),
        (changed(saved, tokens=["a"]), "'tokens[0]'"),
    ):
        code, out, error = verify(record)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert said in error


def test_a_missing_file_is_one_line(tmp_path: Path, capsys):
    assert run(["verify", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err


def test_a_checkpoint_that_is_replaced_between_its_identity_and_its_weights_is_told(saved, verify, monkeypatch):
    monkeypatch.setattr(Engine, "origin", Origin("another", 1, "cpu"))
    code, said, wrong = verify(saved)
    assert (code, said) == (2, "")
    assert f"{saved['folder']} was replaced while it was read: start again" in wrong
