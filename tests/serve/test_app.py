"""The routes over a fake engine, through real sockets: full queues, failures, disconnects, bodies of nonsense."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from isobit.engine.lane import token_hash
from isobit.errors import IsobitError
from isobit.serve.app import ServerOptions, create_app
from isobit.serve.server import bind, configuration
from tests.serve.fake_engine import END, FakeEngine

BODY_LIMIT = 1 << 20
PROMPT = {"prompt": "hi"}


@contextmanager
def serving(engine: FakeEngine, max_tokens: int | None = None) -> Iterator[httpx.Client]:
    app = create_app(engine, ServerOptions("fake", max_tokens, BODY_LIMIT))  # type: ignore[arg-type]
    server = uvicorn.Server(configuration(app))
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: server.started)
        port = bound.getsockname()[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
    assert engine.closed


def until(condition, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(FakeEngine()) as client:
        yield client


def sse(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def test_a_completion_names_what_to_compare_it_by(client):
    reply = client.post("/v1/completions", json={**PROMPT, "seed": 5, "return_token_ids": True}).json()
    assert reply["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert reply["isobit"] == {
        "token_hash": token_hash(tuple(b"hello")),
        "logits_hash": "0" * 64,
        "seed": 5,
        "prefill": "deep",
        "segment_rows": 1,
        "rows_computed": 2,
        "rows_reused": 1,
        "drafted": 0,
        "accepted": 0,
        "timings": {"queued": 0.1, "first_token": 0.2, "total": 0.3, "prompt_rate": 10.0, "reply_rate": 20.0},
        "notice": None,
        "receipt": {
            "checkpoint": "c" * 64,
            "arithmetic": "1",
            "device": "cpu",
            "prompt_hash": token_hash(tuple(b"hi")),
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5},
            "max_tokens": 16,
            "reply_tokens": 5,
            "context": 4096,
        },
        "tokens": list(b"hello"),
    }


def test_a_stream_carries_progress_text_and_the_end(client):
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/chat/completions", json=asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert any(line.startswith(": prompt ") for line in response.text.split("\n"))
    first, *middle, last, usage = sse(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "hello"
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert last["isobit"] == usage["isobit"]
    assert len({chunk["id"] for chunk in (first, *middle, last, usage)}) == 1


def test_a_stop_string_cuts_text_tokens_and_hash_whatever_the_engine_did_since():
    with serving(FakeEngine(tuple(b"hello there, hello")), 100) as client:
        for stream in (False, True):
            asked = {**PROMPT, "stop": ["lo th", "zz"], "return_token_ids": True, "stream": stream}
            response = client.post("/v1/completions", json=asked)
            chunks = sse(response) if stream else [response.json()]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hel"
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert bytes(chunks[-1]["isobit"]["tokens"]) == b"hello th"
            assert chunks[-1]["isobit"]["token_hash"] == token_hash(tuple(b"hello th"))


def test_streamed_characters_are_whole():
    with serving(FakeEngine(tuple("né €".encode())), 100) as client:
        pieces = [c["choices"][0]["text"] for c in sse(client.post("/v1/completions", json={**PROMPT, "stream": True}))]
        assert "".join(pieces) == "né €"
        assert not any("\ufffd" in piece for piece in pieces)


def test_logprobs_have_every_token_in_either_form():
    script = (*"é".encode(), *b"ab", END)
    with serving(FakeEngine(script), 100) as client:
        asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
        whole = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
        chunks = sse(client.post("/v1/chat/completions", json={**asked, "stream": True}))
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for part in logprobs if part for entry in part["content"]] == whole
        assert [entry["token"] for entry in whole] == ["bytes:\\xc3", "bytes:\\xa9", "a", "b", "token_id:256"]
        assert whole[2]["top_logprobs"][1] == {"token": "A", "logprob": -1.5, "bytes": [65]}
        plain = client.post("/v1/completions", json={**PROMPT, "logprobs": 2}).json()["choices"][0]["logprobs"]
        assert plain["tokens"] == [entry["token"] for entry in whole]
        assert plain["text_offset"] == [0, 0, 1, 2, 3]
        assert plain["top_logprobs"][2] == {"a": -0.5, "A": -1.5}


def test_ignore_eos_goes_past_the_end_token():
    with serving(FakeEngine((104, END, 105)), 100) as client:
        assert client.post("/v1/completions", json=PROMPT).json()["usage"]["completion_tokens"] == 2
        longer = client.post("/v1/completions", json={**PROMPT, "ignore_eos": True}).json()
        assert longer["usage"]["completion_tokens"] == 3


def test_the_reply_limit_is_the_requests_then_the_servers():
    engine = FakeEngine(tuple(b"x" * 40))
    with serving(engine) as client:
        client.post("/v1/completions", json=PROMPT)
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        client.post("/v1/completions", json={**PROMPT, "max_tokens": 3})
    with serving(second := FakeEngine(), max_tokens=9) as client:
        client.post("/v1/completions", json=PROMPT)
        client.post("/v1/completions", json={"prompt": "x" * 4090})
    tickets = (*engine.tickets, *second.tickets)
    room = 4096 - len(engine.tickets[1].request.tokens)
    assert [ticket.request.max_tokens for ticket in tickets] == [16, room, 3, 9, 6]


@pytest.mark.parametrize(
    ("asked", "reuse"),
    [
        ({}, True),
        ({"prefill": "deep"}, False),
        ({"segment_rows": 8}, False),
        ({"prefill": None}, True),
        ({"prefill": "serial", "reuse": True}, True),
        ({"reuse": False}, False),
    ],
    ids=str,
)
def test_a_request_that_names_how_its_prompt_is_computed_has_it_computed(asked, reuse):
    with serving(engine := FakeEngine()) as client:
        assert client.post("/v1/completions", json={**PROMPT, **asked}).status_code == 200
    assert engine.tickets[0].request.reuse is reuse


def test_the_engine_hears_of_priority_drafts_and_message_borders():
    with serving(engine := FakeEngine()) as client:
        client.post("/v1/completions", json=PROMPT)
        asked = {"messages": [{"role": "user", "content": "x"}], "priority": "background", "draft": False}
        client.post("/v1/chat/completions", json=asked)
    plain, chat = (ticket.request for ticket in engine.tickets)
    assert (plain.priority, plain.draft, plain.keep_rows) == ("normal", True, ())
    assert (chat.priority, chat.draft, chat.keep_rows) == ("background", False, (3, 5))


def test_tools_reach_the_template_unless_they_are_not_to_be_used():
    tool = {"type": "function", "function": {"name": "look_up"}}
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "chat_template_kwargs": {"think": False}}
    with serving(engine := FakeEngine()) as client:
        for choice in ("auto", "none"):
            assert client.post("/v1/chat/completions", json={**asked, "tool_choice": choice}).status_code == 200
    prompts = [bytes(ticket.request.tokens).decode() for ticket in engine.tickets]
    assert ["look_up" in prompt for prompt in prompts] == [True, False]
    assert all("'think': False" in prompt for prompt in prompts)


def test_the_template_keeps_its_own_variables(client):
    asked = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}
    assert error_of(client.post("/v1/chat/completions", json=asked), 400)["param"] == "chat_template_kwargs.messages"


def test_a_full_queue_asks_for_patience():
    engine = FakeEngine()
    with serving(engine) as client:
        engine.full = True
        response = client.post("/v1/completions", json=PROMPT)
        error_of(response, 503)
        assert int(response.headers["retry-after"]) > 0
        engine.full = False
        assert client.post("/v1/completions", json=PROMPT).status_code == 200


def test_an_engine_error_ends_the_request_with_its_message():
    with serving(FakeEngine("a logit at position 7 is not finite")) as client:
        assert "position 7" in error_of(client.post("/v1/completions", json=PROMPT), 500)["message"]
        (streamed,) = sse(client.post("/v1/completions", json={**PROMPT, "stream": True}))
        assert "position 7" in streamed["error"]["message"]
        assert 'isobit_requests_total{outcome="error"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_work(stream):
    engine = FakeEngine(None)
    with serving(engine) as client:
        with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
            body = json.dumps({**PROMPT, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            until(lambda: engine.tickets)
            if stream:
                assert connection.recv(100)
            assert not engine.tickets[0].cancelled.is_set()
        until(engine.tickets[0].cancelled.is_set)
        until(lambda: 'outcome="cancelled"} 1.0' in client.get("/metrics").text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff\xfe{}", "not valid UTF-8 at byte 0"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object, got a list of 1"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "not valid JSON"),
        (b'{"prompt": [' + b"9" * 100 + b"]}", "field 'prompt[0]': expected a token id"),
        (b'{"prompt": ""}', "prompt is empty"),
        (b'{"prompt": []}', "prompt is empty"),
    ],
)
def test_a_body_that_is_no_request_is_refused(client, body, said):
    assert said in error_of(client.post("/v1/completions", content=body), 400)["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_and_the_server_lives(client, chunked):
    """The client sends 100 MB before it reads anything, as simple clients do."""
    piece = b" " * 65536
    declared = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {1600 * len(piece)}"
    with socket.create_connection(("127.0.0.1", client.base_url.port), timeout=20) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{declared}\r\n\r\n".encode())
        for _ in range(1600):
            connection.sendall(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
        connection.sendall(b"0\r\n\r\n" if chunked else b"")
        head, body = connection.makefile("rb").read().split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert "1 MiB" in json.loads(body)["error"]["message"]
    assert client.get("/health").json()["status"] == "ok"


def test_a_body_of_exactly_the_limit_is_read(client):
    body = json.dumps(PROMPT).encode()
    assert client.post("/v1/completions", content=body.ljust(BODY_LIMIT)).status_code == 200


def test_long_wrong_names_are_cut_in_the_message(client):
    long = "x" * 5000
    answers = [
        client.post("/v1/completions", json={**PROMPT, "model": long}),
        client.post("/v1/completions", json={**PROMPT, long: 1}),
        client.post("/v1/completions", json={**PROMPT, "prefill": long}),
        client.get(f"/{long}"),
        client.request(long, "/health"),
    ]
    for answer in answers:
        assert len(error_of(answer, answer.status_code)["message"]) < 300


def test_unknown_things_are_named(client):
    assert "fake" in error_of(client.post("/v1/completions", json={**PROMPT, "model": "gpt"}), 404)["message"]
    assert error_of(client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
    assert "/v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    refused = client.get("/v1/completions")
    assert "GET" in error_of(refused, 405)["message"]
    assert refused.headers["allow"] == "POST"


def test_models_and_health(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 4096)
    assert client.get("/v1/models/fake").json() == model
    health = client.get("/health").json()
    assert (health["status"], health["model"], health["lanes"], health["queued"]) == ("ok", "fake", 4, 0)


def test_metrics_count_tokens_and_outcomes():
    with serving(FakeEngine()) as client:
        client.post("/v1/completions", json=PROMPT)
        client.post("/v1/completions", json={"prompt": 5})
        text = client.get("/metrics").text
    for line in (
        'isobit_requests_total{outcome="length"} 1.0',
        'isobit_requests_total{outcome="refused"} 1.0',
        "isobit_prompt_tokens_total 2.0",
        "isobit_reply_tokens_total 5.0",
        "isobit_queue_length 0.0",
        "isobit_lanes 4.0",
        "isobit_free_pages 13.0",
        "isobit_prompt_rows_total 11.0",
        'isobit_draft_tokens_proposed_total{source="mtp"} 5.0',
        'isobit_draft_tokens_accepted_total{source="mtp"} 3.0',
        'isobit_draft_guard_stops_total{source="mtp"} 2.0',
        'isobit_draft_guard_probes_total{source="mtp"} 1.0',
        'isobit_draft_resting_lanes{source="copies"} 6.0',
        "isobit_cache_entries 21.0",
        "isobit_cache_bytes 22.0",
        "isobit_cache_hits_total 24.0",
        "isobit_cache_misses_total 25.0",
        "isobit_cache_rows_saved_total 26.0",
        "isobit_cache_evictions_total 27.0",
        "isobit_cache_spilled_total 28.0",
        "isobit_cache_restored_total 29.0",
        "isobit_cache_spill_bytes 31.0",
        "isobit_cache_host_entries 33.0",
        "isobit_cache_host_bytes 34.0",
        "isobit_cache_host_limit_bytes 35.0",
        "isobit_cache_host_stored_total 36.0",
        "isobit_cache_host_hits_total 37.0",
        "isobit_cache_host_skipped_total 38.0",
        'isobit_time_to_first_token_seconds_bucket{le="0.25"} 1.0',
        "isobit_prompt_tokens_per_second_sum 10.0",
    ):
        assert line in text.split("\n")


FRAMING = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "illegal request line"),
    "no version": (b"GET /health\r\n\r\n", 400, "illegal request line"),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
    "a header without a colon": (b"GET /health HTTP/1.1\r\nHost x\r\n\r\n", 400, "illegal header line"),
    "two lengths": (
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        400,
        "Content-Length",
    ),
    "a head without end": (b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000, 431, "too long"),
    "no chunk": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "chunk"),
    "an encoding": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "chunked"),
}


def raw(client: httpx.Client, sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as connection:
        connection.sendall(sent)
        answer = b""
        while piece := _piece(connection):
            answer += piece
        return answer


def _piece(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("sent", "status", "said"), FRAMING.values(), ids=FRAMING)
def test_bytes_that_are_no_http_get_an_error_body_too(client, sent, status, said):
    head, _, body = raw(client, sent).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/json" in head
    assert said in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


def test_a_body_that_goes_wrong_after_its_answer_is_no_defect(client, caplog):
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 404")
        connection.sendall(b"no chunk\r\n")
        while _piece(connection):
            pass
    assert "Traceback" not in caplog.text
    assert [record.levelname for record in caplog.records if record.exc_info] == []


def test_an_address_of_another_machine_is_said_to_be_one():
    with pytest.raises(IsobitError, match="name an address of this machine with --host"):
        bind("192.0.2.1", 0)
