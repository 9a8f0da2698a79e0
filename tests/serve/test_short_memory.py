"""The server over a real engine whose memory runs out: the same replies, or 503 with the numbers, and it goes on."""

import json

import pytest
from starlette.testclient import TestClient

from isobit.engine.engine import Engine, EngineSettings
from isobit.engine.shortage import Shortage
from isobit.serve.app import ServerOptions, create_app
from tests.short_memory import larger_than, never, only, short_memory

REQUEST = {"prompt": "some words " * 20, "max_tokens": 4, "seed": 3}


@pytest.fixture(scope="module")
def engine(test_checkpoint):
    settings = EngineSettings(context=300, segment_rows=128, prompt_cache_gib=0.0)
    return Engine(test_checkpoint, settings)


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(create_app(engine, ServerOptions("short", None, 1 << 20))) as client:
        yield client


def test_a_server_short_of_memory_gives_the_same_reply_or_503_and_serves_on(client, engine):
    undisturbed = client.post("/v1/completions", json=REQUEST).json()
    assert undisturbed["isobit"]["notice"] is None
    with short_memory(only(30)) as allocations:
        shrunk = client.post("/v1/completions", json=REQUEST).json()
        assert allocations.failures
        for key in ("token_hash", "logits_hash"):
            assert shrunk["isobit"][key] == undisturbed["isobit"][key]
        assert shrunk["choices"] == undisturbed["choices"]
        assert "memory ran out in a larger one" in shrunk["isobit"]["notice"]
        allocations.fails = larger_than(300)
        failed = client.post("/v1/completions", json=REQUEST)
        assert (failed.status_code, failed.headers["Retry-After"]) == (503, "5")
        error = failed.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "out_of_memory")
        assert "GiB free" in error["message"]
        assert "--parallel" in error["message"]
        streamed = client.post("/v1/completions", json={**REQUEST, "stream": True}).text
        data = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: ")]
        assert json.loads(data[-2])["error"]["code"] == "out_of_memory"
        assert data[-1] == "[DONE]"
        allocations.fails = never
    assert client.get("/health").json()["status"] == "ok"
    engine.rounds.shortage = Shortage()
    again = client.post("/v1/completions", json=REQUEST).json()
    assert again["isobit"]["token_hash"] == undisturbed["isobit"]["token_hash"]
    assert again["isobit"]["notice"] is None
