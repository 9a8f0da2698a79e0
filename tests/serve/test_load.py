"""The server under load: 64 clients over 8 lanes, good ones and bad ones, and nothing that they disturb."""

import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from tests.serve.load_clients import Case, Client, Tally, alone, cases
from tests.serve.processes import ServerProcess

SECONDS = float(os.environ.get("ISOBIT_LOAD_SECONDS", "25"))
CLIENTS, LANES, CONTEXT = 64, 8, 400
CASES = 24
NO_HTTP = "WARNING:  Invalid HTTP request received."
RESTING_THREADS = 40  # the event loop's workers stay for a while
SAMPLE_SECONDS = 0.25
GROWTH_MIB = 24 if SECONDS < 60 else 8  # the allocator is still filling its arenas in a short run


@pytest.fixture(scope="module")
def known(test_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Requests with the replies of a server that serves nothing else, row by row."""
    log = tmp_path_factory.mktemp("alone") / "log"
    options = ("--context", str(CONTEXT), "--parallel", "1", "--no-drafts", "--prompt-cache-gib", "0", "--threads", "1")
    with ServerProcess(test_checkpoint, log, *options) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        found = [Case(body, alone(connection, body)) for body in cases(random.Random(5), CASES, CONTEXT)]
        connection.close()
    assert len({case.alone[0] for case in found}) > CASES // 2
    return found


@pytest.mark.timeout(SECONDS + 300)
def test_load_changes_no_reply_and_leaves_nothing_behind(test_checkpoint, known, tmp_path):
    options = ("--context", str(CONTEXT), "--parallel", str(LANES), "--queue", "40", "--threads", "1")
    spill = ("--prompt-cache-gib", "0.004", "--spill-dir", str(tmp_path / "spill"), "--spill-gib", "0.01")
    with ServerProcess(test_checkpoint, tmp_path / "log", *options, *spill) as server:
        warm_up(server, known)
        idle = full_house(server)
        before = server.usage.num_fds(), server.usage.num_threads()
        tally, memory = loaded(server, known)
        print(dict(tally.seen), f"memory: {memory[0]:.1f} to {memory[-1]:.1f} MiB, {len(memory)} samples")
        assert tally.wrong == []
        assert_every_kind_was_seen(tally)
        server.wait_until_idle(10)
        assert full_house(server) == idle
        metrics = server.metrics("running", "queue_length", "cache_hits_total", "cache_spilled_total")
        assert metrics["running"] == metrics["queue_length"] == 0
        assert min(metrics["cache_hits_total"], metrics["cache_spilled_total"]) > 0
        server.wait_until_idle(10)
        assert_flat(memory)
        assert server.usage.num_fds() <= before[0] + 4
        assert server.usage.num_threads() <= before[1] + RESTING_THREADS
        assert server.stop() == 0
    said = server.said.splitlines()
    assert [line for line in said if line != NO_HTTP] == []


def loaded(server: ServerProcess, known: list[Case]) -> tuple[Tally, list[float]]:
    """Let the clients loose; what they saw, and the server's resident memory over that time, MiB."""
    tally, until = Tally(), time.monotonic() + SECONDS
    clients = [Client(server.port, seed, known, CONTEXT + 1, until, tally) for seed in range(CLIENTS)]
    memory = []
    for client in clients:
        client.start()
    while time.monotonic() < until:
        memory.append(server.usage.memory_info().rss / 2**20)
        time.sleep(SAMPLE_SECONDS)
    for client in clients:
        client.join(timeout=120)
        assert not client.is_alive(), "a client waits for a reply that does not come"
    return tally, memory


def warm_up(server: ServerProcess, known: list[Case]) -> None:
    """Have every kernel loaded, so that memory tells of requests alone."""
    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(lambda case: httpx.post(f"{server.url}{case.route}", json=case.body, timeout=300), known))


def full_house(server: ServerProcess) -> list[str]:
    """Token hashes of as many requests as there are lanes, each as long as the context, side by side."""
    with ThreadPoolExecutor(LANES) as pool:
        asked = [
            {"prompt": "y" * (20 + lane), "seed": lane, "max_tokens": CONTEXT, "ignore_eos": True, "reuse": False}
            for lane in range(LANES)
        ]
        replies = [pool.submit(lambda body: server.complete(**body), body) for body in asked]
        most = 0
        while not all(reply.done() for reply in replies):
            most = max(most, server.get("/health").json()["running"])
    assert most == LANES, f"only {most} of {LANES} lanes run"
    return [reply.result()["isobit"]["token_hash"] for reply in replies]


def assert_every_kind_was_seen(tally: Tally) -> None:
    kinds = ("whole", "streamed", "slow", "left the stream", "left before the reply", "left within the body")
    assert all(tally.seen[kind] >= 3 for kind in (*kinds, "malformed", "no http", "too long")), tally.seen


def assert_flat(memory: list[float]) -> None:
    """The first half of the time warms up; after it, the later half takes no more than the earlier one."""
    measured = memory[len(memory) // 2 :]
    halves = measured[: len(measured) // 2], measured[len(measured) // 2 :]
    earlier, later = (statistics.median(half) for half in halves)
    assert later - earlier <= GROWTH_MIB, f"memory grows: {earlier:.1f} to {later:.1f} MiB"
