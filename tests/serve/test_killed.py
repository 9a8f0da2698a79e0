"""A server that is killed while it spills, and the next one on the same folder: nothing bad is trusted."""

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from isobit.checkpoint.store import TensorStore
from isobit.engine.origin import origin_of, spill_identity
from isobit.engine.spill import SpillStore
from tests.serve.processes import ServerProcess

CONTEXT = 400
PROMPTS = 24
OPTIONS = ("--context", str(CONTEXT), "--parallel", "4", "--threads", "1", "--device", "cpu")


def body(number: int) -> dict:
    """A request of its own prompt, whose state is worth keeping."""
    text = "".join(random.Random(number).choices("abcdefgh ", k=150 + 8 * number))
    return {"prompt": text, "max_tokens": 6, "seed": number, "ignore_eos": True}


def hashes(answer: dict) -> tuple[str, str]:
    return answer["isobit"]["token_hash"], answer["isobit"]["logits_hash"]


@pytest.fixture(scope="module")
def alone(test_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What each request gives row by row, on a server that keeps nothing."""
    log = tmp_path_factory.mktemp("alone") / "log"
    with ServerProcess(test_checkpoint, log, *OPTIONS, "--prompt-cache-gib", "0", "--no-drafts") as server:
        return [hashes(server.complete(**body(number), prefill="serial")) for number in range(PROMPTS)]


def spilling(folder: Path, log: Path, spill: Path) -> ServerProcess:
    """A server whose prompt cache is so small that most states go to disk at once."""
    kept = ("--prompt-cache-gib", "0.001", "--spill-dir", str(spill), "--spill-gib", "0.1")
    return ServerProcess(folder, log, *OPTIONS, *kept)


@pytest.fixture(scope="module")
def identity(test_checkpoint: Path) -> str:
    """Whose the server's states are."""
    store = TensorStore(test_checkpoint)
    return spill_identity(origin_of(store, "cpu"), store)


@pytest.mark.parametrize("moment", ["while it serves", "while it stops"])
def test_a_killed_server_leaves_states_that_give_the_same_replies(test_checkpoint, alone, identity, tmp_path, moment):
    spill, log = tmp_path / "spill", tmp_path / "log"
    for life in range(2):
        with spilling(test_checkpoint, log, spill) as server:
            assert_same_replies(server, alone, range(life * 4, life * 4 + 4))
            kill_while_spilling(server, spill, moment, life)
        assert_every_state_is_whole(spill, identity, tmp_path / f"copy {life}")
    with spilling(test_checkpoint, log, spill) as server:
        assert unfinished(spill) == []
        reused = assert_same_replies(server, alone, range(PROMPTS))
        assert reused > 0
        assert server.metric("cache_restored_total") > 0
        assert server.stop() == 0
    told = [line for line in server.said.splitlines() if not line.startswith("isobit: waiting up to 30 s for ")]
    assert told == []


def test_states_that_were_damaged_while_no_server_ran_are_not_served(test_checkpoint, alone, tmp_path):
    spill, log = tmp_path / "spill", tmp_path / "log"
    with spilling(test_checkpoint, log, spill) as server:
        assert_same_replies(server, alone, range(PROMPTS))
        assert server.stop() == 0
    states = sorted(spill.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    assert len(states) >= PROMPTS
    for number, path in enumerate(states):
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes((content, content[:half], content[:half] + b"?" * 64 + content[half + 64 :])[number % 3])
    (spill / f".{states[0].name}.0000.partial").write_bytes(states[0].read_bytes()[:1000])
    with spilling(test_checkpoint, log, spill) as server:
        assert unfinished(spill) == []
        assert assert_same_replies(server, alone, range(PROMPTS)) > 0
        assert server.metric("cache_restored_total") > 0
        assert server.stop() == 0
    said = log.read_text()
    assert "is damaged or truncated and was removed" in said
    assert "is damaged and was removed: its checksum does not match" in said
    assert "Traceback" not in said


def assert_same_replies(server: ServerProcess, alone: list[tuple[str, str]], numbers: Iterable[int]) -> int:
    """Compare the replies to some requests; the rows that kept states stood for."""
    answers = {number: server.complete(**body(number)) for number in numbers}
    assert {number: hashes(answer) for number, answer in answers.items()} == {n: alone[n] for n in answers}
    return sum(answer["isobit"]["rows_reused"] for answer in answers.values())


def assert_every_state_is_whole(spill: Path, identity: str, copy: Path) -> None:
    """Read all that bears a final name, in a copy, for the next server is to find the folder as it was left."""
    shutil.copytree(spill, copy)
    store = SpillStore(copy, 1 << 30, identity, "cpu")
    states = list(store._states)
    assert states
    for state in states:
        list(store.load(state).pieces)
    assert len(store) == len(states)
    store.close()


def kill_while_spilling(server: ServerProcess, spill: Path, moment: str, life: int) -> None:
    """Kill the server when a file has just been begun."""
    with ThreadPoolExecutor(4) as pool:
        for number in random.Random(life).sample(range(PROMPTS), PROMPTS):
            pool.submit(ask, server, number)
        if moment == "while it serves":
            wait_for(lambda: server.metric("cache_spilled_total") > 2 + life)
        else:
            wait_for(lambda: server.metric("cache_entries") > 0)
            server.process.terminate()
        written = len(list(spill.glob("*.safetensors")))
        wait_for(lambda: bool(unfinished(spill)) or len(list(spill.glob("*.safetensors"))) > written)
        server.kill()


def ask(server: ServerProcess, number: int) -> None:
    """Send a request to a server that may die of another cause than the request."""
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json=body(number), timeout=60, trust_env=False)


def unfinished(spill: Path) -> list[Path]:
    """Files that were begun and not finished."""
    return list(spill.glob(".*.partial"))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
