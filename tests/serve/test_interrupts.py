"""Ctrl-C once, twice, and while a client does not read: the server ends, says what it waits for, and nothing else."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.processes import ServerProcess

LONG = {"max_tokens": 2000, "ignore_eos": True, "draft": False, "stream": True}
WAITS = "isobit: waiting up to 60 s for {}; press Ctrl-C again to stop now\n"


def interrupted_server(folder: Path, tmp_path: Path, *options: str) -> ServerProcess:
    return ServerProcess(folder, tmp_path / "log", "--grace", "60", "--threads", "1", *options)


def last_event(server: ServerProcess, prompt: str) -> dict:
    """The last event of a long stream."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"prompt": prompt}, timeout=120) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")][-1]


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(("count", "named"), [(1, "1 running reply"), (3, "3 running replies")])
def test_a_second_ctrl_c_stops_at_once(test_checkpoint, tmp_path, count, named):
    with (
        interrupted_server(test_checkpoint, tmp_path, "--parallel", "3") as server,
        ThreadPoolExecutor(count) as pool,
    ):
        streams = [pool.submit(last_event, server, "a" * (1 + number)) for number in range(count)]
        wait_for(lambda: server.get("/health").json()["running"] == count)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.said == WAITS.format(named))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130
        assert [stream.result()["error"]["code"] for stream in streams] == ["shutting_down"] * count
    assert server.said == WAITS.format(named)


def test_a_client_that_does_not_read_does_not_keep_the_server(test_checkpoint, tmp_path):
    with interrupted_server(test_checkpoint, tmp_path) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps(LONG | {"prompt": "a", "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        client.sendall(head + body)
        wait_for(lambda: server.metric("drawn_tokens_total") >= 600)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(40) == 130
    assert server.said in ("", WAITS.format("1 running reply"))


@pytest.mark.parametrize("inherited", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_server_whose_terminal_closes_ends_as_by_sigterm_but_under_nohup(test_checkpoint, tmp_path, inherited):
    before = signal.signal(signal.SIGHUP, inherited)
    try:
        with interrupted_server(test_checkpoint, tmp_path) as server:
            server.process.send_signal(signal.SIGHUP)
            if inherited == signal.SIG_IGN:
                assert server.get("/health").status_code == 200
            else:
                assert server.process.wait(30) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert server.said == ""


@pytest.mark.parametrize("pause", [0, 0.03, 0.4])
def test_an_idle_server_ends_quietly_however_often_it_is_told(test_checkpoint, tmp_path, pause):
    with interrupted_server(test_checkpoint, tmp_path) as server:
        deadline = time.monotonic() + 30
        while server.process.poll() is None:
            assert time.monotonic() < deadline
            server.process.send_signal(signal.SIGINT)
            time.sleep(pause)
        assert server.process.returncode in (130, -signal.SIGINT)
    assert server.said == ""
