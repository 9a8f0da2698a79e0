"""The server as a process: real sockets, a real checkpoint, the official client."""

import hashlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from isobit.checkpoint.tokenizer import Tokenizer
from isobit.cli.app import run
from isobit.serve.child import running_server, stop

CONTEXT = 600
PROMPT = "The three ways to compute a prompt give the same bytes. " * 6
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why é?"}]


@pytest.fixture(scope="module")
def url(test_checkpoint: Path) -> Iterator[str]:
    with running_server(test_checkpoint, ["--context", str(CONTEXT), "--name", "tiny", "--threads", "2"]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        yield client


def complete(http: httpx.Client, **fields) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 11, "ignore_eos": True, "return_token_ids": True, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def reply_of(answer: dict) -> tuple[str, str, str]:
    return answer["choices"][0]["text"], answer["isobit"]["token_hash"], answer["isobit"]["logits_hash"]


def test_the_official_client_chats(client):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens <= 20
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    asked["extra_body"] = {"reuse": False}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].isobit["token_hash"] == chunks[-2].isobit["token_hash"] == whole.isobit["token_hash"]


def test_the_official_client_lists_models_and_sees_errors_as_its_own(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == CONTEXT
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="'n' is not supported"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)


@pytest.mark.parametrize(
    "how",
    [{"prefill": "batched"}, {"prefill": "deep"}, {"prefill": "deep", "segment_rows": 7}, {"segment_rows": 100}],
    ids=str,
)
def test_the_reply_does_not_depend_on_how_the_prompt_is_computed(http, how):
    serial = complete(http, prefill="serial")
    assert (serial["isobit"]["prefill"], serial["isobit"]["segment_rows"]) == ("serial", 1)
    other = complete(http, **how)
    assert other["isobit"]["segment_rows"] == min(
        how.get("segment_rows", 64 if "batched" in how.values() else 1024), 336
    )
    assert reply_of(other) == reply_of(serial)


def test_the_token_hash_is_of_the_tokens_and_tells_replies_apart(http):
    answer = complete(http, reuse=False)
    tokens = answer["isobit"]["tokens"]
    assert answer["isobit"]["token_hash"] == hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).hexdigest()
    assert answer["usage"]["completion_tokens"] == len(tokens) == 24
    assert answer["isobit"]["rows_computed"] == len(PROMPT) + 23
    other = complete(http, seed=12)["isobit"]
    assert other["token_hash"] != answer["isobit"]["token_hash"]
    assert other["logits_hash"] == answer["isobit"]["logits_hash"]
    assert complete(http, prompt=PROMPT + "!")["isobit"]["logits_hash"] != answer["isobit"]["logits_hash"]


def test_a_reply_without_a_seed_names_the_one_that_gives_it_again(http):
    first, second = complete(http, seed=None), complete(http, seed=None)
    assert first["isobit"]["seed"] != second["isobit"]["seed"]
    assert reply_of(complete(http, seed=first["isobit"]["seed"])) == reply_of(first)


def test_token_ids_are_a_prompt_too(http):
    assert reply_of(complete(http, prompt=list(PROMPT.encode()))) == reply_of(complete(http))


def test_greedy_replies_need_no_seed(http):
    greedy = [complete(http, temperature=0, seed=seed) for seed in (1, 2)]
    assert reply_of(greedy[0]) == reply_of(greedy[1])
    assert reply_of(complete(http, top_k=1)) == reply_of(greedy[0])


def test_logprobs_are_of_the_tokens_drawn(http):
    answer = complete(http, temperature=0, logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24
    for name, logprob, best in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(best) == 3
        assert best[name] == logprob == max(best.values()) < 0
    assert reply_of(answer) == reply_of(complete(http, temperature=0))


def test_a_stop_string_ends_the_reply_streamed_or_not(http):
    full = complete(http, max_tokens=60)
    text = full["choices"][0]["text"]
    stop_string = text[20:23]
    cut = complete(http, max_tokens=60, stop=["never said", stop_string])
    assert cut["choices"][0]["text"] == text[: text.index(stop_string)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    tokens = cut["isobit"]["tokens"]
    assert tokens == full["isobit"]["tokens"][: len(tokens)]
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 11, "ignore_eos": True, "stop": stop_string, "stream": True}
    lines = http.post("/v1/completions", json=body).text.split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut["choices"][0]["text"]
    assert chunks[-1]["isobit"]["token_hash"] == cut["isobit"]["token_hash"]


def test_the_context_limits_the_prompt_and_the_reply(http):
    room = 10
    answer = complete(http, prompt="x" * (CONTEXT - room), max_tokens=500)
    assert answer["usage"]["completion_tokens"] == room
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = http.post("/v1/completions", json={"prompt": "x" * (CONTEXT + 1)})
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert str(CONTEXT + 1) in error["message"]


@pytest.mark.parametrize(
    "body",
    [{"prompt": [5, -1]}, {"prompt": [10**6]}, {"prompt": ""}, {"prompt": "a", "temperature": 9}, {"prompt": "\ud800"}],
    ids=str,
)
def test_bad_prompts_are_refused(http, body):
    response = http.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]["message"]


def test_what_the_template_refuses_is_the_clients_fault(http):
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]


def test_requests_do_not_disturb_each_other(http):
    alone = [reply_of(complete(http, seed=seed)) for seed in range(3)]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(complete, http, seed=seed) for seed in range(3)]
        bad = [pool.submit(http.post, "/v1/completions", content=b"\xff") for _ in range(3)]
        bad += [pool.submit(http.post, "/v1/completions", json={"prompt": "x" * 5000}) for _ in range(3)]
    assert [reply_of(answer.result()) for answer in good] == alone
    assert {answer.result().status_code for answer in bad} == {400}


def test_a_client_that_leaves_stops_its_work_within_a_segment(http):
    def cancelled() -> float:
        found = re.search(r'isobit_requests_total\{outcome="cancelled"\} (\S+)', http.get("/metrics").text)
        return float(found.group(1)) if found else 0.0

    before = cancelled()
    body = {"prompt": "x" * 500, "prefill": "serial", "stream": True, "max_tokens": 99, "ignore_eos": True}
    # A fast machine may finish the reply before it hears that the client is gone.
    for _ in range(10):
        with http.stream("POST", "/v1/completions", json=body | {"draft": False}) as response:
            assert next(response.iter_lines()).startswith(": prompt ")
        deadline = time.monotonic() + 5
        while http.get("/health").json()["running"]:
            assert time.monotonic() < deadline, "the work goes on"
            time.sleep(0.01)
        if cancelled() > before:
            return
    pytest.fail("no request was cancelled")


def stream(http: httpx.Client, **fields) -> Iterator[dict]:
    """The chunks of a streamed completion."""
    body = {"prompt": PROMPT, "max_tokens": 150, "seed": 11, "ignore_eos": True, "stream": True, **fields}
    with http.stream("POST", "/v1/completions", json=body) as response:
        yield from (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))


def test_two_streams_move_on_together_and_change_nothing(http):
    alone = [complete(http, seed=seed, max_tokens=150, reuse=False)["isobit"]["token_hash"] for seed in (1, 2)]
    first, second = stream(http, seed=1, reuse=False), stream(http, seed=2, reuse=False)
    next(first)
    next(second)
    assert http.get("/health").json()["running"] == 2
    assert [list(chunks)[-1]["isobit"]["token_hash"] for chunks in (first, second)] == alone


def chat(http: httpx.Client, messages: list[dict], **fields) -> dict:
    body = {"messages": messages, "max_tokens": 12, "seed": 5, "ignore_eos": True, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: dict) -> int:
    count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["isobit"]["rows_reused"] == count
    assert (
        answer["isobit"]["rows_computed"] + count
        == sum(answer["usage"][part] for part in ("prompt_tokens", "completion_tokens")) - 1
    )
    return count


def test_the_next_turn_of_a_chat_goes_on_from_the_last(http, test_checkpoint):
    messages = [{"role": "system", "content": "Answer in rhymes. " * 5}, {"role": "user", "content": "Why is it so?"}]
    first = chat(http, messages)
    assert cached(first) == 0
    reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turn = [*messages, reply, {"role": "user", "content": "And then?"}]
    second = chat(http, turn)
    assert cached(second) >= first["usage"]["prompt_tokens"]
    fresh = chat(http, turn, reuse=False)
    assert cached(fresh) == 0
    assert [second["isobit"][name] for name in ("token_hash", "logits_hash")] == [
        fresh["isobit"][name] for name in ("token_hash", "logits_hash")
    ]
    other = chat(http, [messages[0], {"role": "user", "content": "Something else"}])
    system = Tokenizer(test_checkpoint).chat(messages[:1], add_generation_prompt=False)
    assert cached(other) == len(system)


def test_a_background_request_yields_to_others(http):
    expected = complete(http, seed=21, max_tokens=200)["isobit"]["token_hash"]
    background = stream(http, seed=21, max_tokens=200, priority="background")
    next(background)
    body = {"prompt": "urgent", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.get("/health").json()["running"] == 1
    assert list(background)[-1]["isobit"]["token_hash"] == expected


def test_drafts_change_no_token(http):
    # Long enough for a trial of drafts after the rest that earlier requests may have left.
    asked = {"prompt": "abc" * 60, "temperature": 0, "max_tokens": 150}
    with_drafts, without = complete(http, **asked), complete(http, **asked, draft=False)
    assert with_drafts["isobit"]["drafted"] >= with_drafts["isobit"]["accepted"]
    assert with_drafts["isobit"]["drafted"] > 0
    assert (without["isobit"]["drafted"], without["isobit"]["accepted"]) == (0, 0)
    assert reply_of(with_drafts) == reply_of(without)
    assert 'isobit_draft_tokens_proposed_total{source="mtp"}' in http.get("/metrics").text


def test_saved_exchanges_are_verified(http, test_checkpoint, tmp_path, capsys):
    completion = {"prompt": "Keep this.", "max_tokens": 9, "temperature": 0.8}
    talk = {"messages": MESSAGES, "max_tokens": 30, "seed": -3, "return_token_ids": True}
    streamed = {**completion, "stop": ["\n", "e"], "stream": True, "max_tokens": 40}
    exchanges = [
        {"request": completion, "response": http.post("/v1/completions", json=completion).json()},
        {"request": talk, "response": http.post("/v1/chat/completions", json=talk).json()},
        {"request": streamed, "response": list(stream(http, **streamed, ignore_eos=False))[-1]},
    ]
    exchanges[2]["request"] = {**streamed, "seed": 11}
    file = tmp_path / "exchanges.jsonl"
    file.write_text("\n".join(map(json.dumps, exchanges)))
    assert run(["verify", str(file), str(test_checkpoint)]) == 0
    assert capsys.readouterr().out.count(": equal (") == 3
    exchanges[1]["response"]["isobit"]["tokens"][3] += 1
    file.write_text("\n".join(map(json.dumps, exchanges)))
    assert run(["verify", str(file), str(test_checkpoint), "--prefill", "serial"]) == 1
    assert "line 2: reply token 3 differs" in capsys.readouterr().out
    exchanges[0]["response"]["isobit"]["receipt"]["checkpoint"] = "other"
    file.write_text("\n".join(map(json.dumps, exchanges)))
    assert run(["verify", str(file), str(test_checkpoint)]) == 1
    said = capsys.readouterr().out
    assert "line 1: its checkpoint is other, but here it is" in said
    assert said.endswith("1 of 3 differs, 1 cannot be compared.\n")


def start(folder: Path, *options: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "isobit", "serve", str(folder), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split("at ")[1].split("/v1")[0]


def leave_within_the_body(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")


@pytest.mark.parametrize(("grace", "finishes"), [(60, True), (0, False)])
def test_a_signal_lets_running_replies_finish_for_the_grace_time(test_checkpoint, grace, finishes):
    process, url = start(test_checkpoint, "--grace", str(grace), "--parallel", "3")
    asked = {"max_tokens": 900 if finishes else 2000, "stream": True, "ignore_eos": True, "draft": False}
    begun = threading.Barrier(4, timeout=60)

    def last_event(seed: int) -> dict:
        body = {"prompt": "x" * seed, "seed": seed, **asked}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data: "):
                pass
            begun.wait()
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]

    try:
        leave_within_the_body(url)
        with ThreadPoolExecutor(3) as pool, httpx.Client(base_url=url, timeout=60, trust_env=False) as late:
            streams = [pool.submit(last_event, seed) for seed in (1, 2, 3)]
            begun.wait()
            process.send_signal(signal.SIGTERM)
            if finishes:
                assert_new_requests_get_503(late)
            last = [stream.result() for stream in streams]
        if finishes:
            assert [event["choices"][0]["finish_reason"] for event in last] == ["length"] * 3
        else:
            assert [event["error"]["code"] for event in last] == ["shutting_down"] * 3
        assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        stop(process)


def assert_new_requests_get_503(late: httpx.Client) -> None:
    deadline = time.monotonic() + 10
    while (refused := late.post("/v1/completions", json={"prompt": "y", "max_tokens": 1})).status_code == 200:
        assert time.monotonic() < deadline, "new requests are still served"
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert int(refused.headers["retry-after"]) > 0
    health = late.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stopping")


def test_the_server_ends_with_the_process_that_started_it(test_checkpoint):
    process, _ = start(test_checkpoint, "--stop-with-stdin")
    try:
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        stop(process)


def one_line(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "isobit", "serve", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_port_in_use_is_one_line(test_checkpoint, url):
    port = url.rsplit(":", 1)[1]
    assert f"port {port}" in one_line(str(test_checkpoint), "--port", port)


def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path):
    assert str(tmp_path) in one_line(str(tmp_path), "--port", "0")


def test_a_child_that_does_not_start_says_why(tmp_path):
    with pytest.raises(Exception, match=str(tmp_path)), running_server(tmp_path):
        pass
