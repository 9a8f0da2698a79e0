"""Kept states on disk: whole or absent, checked before they are trusted, within a limit, for one process at a time."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.checkpoint.store import TensorStore, read_tensors
from isobit.engine import spill as spill_module
from isobit.engine import spill_writer
from isobit.engine.spill import SpillDamagedError, SpillStore
from isobit.errors import IsobitError

AMPLE = 1 << 30
CHUNK = 64
TOKENS = np.random.default_rng(2).integers(0, 1 << 17, 200).tolist()
NBYTES = 4000  # more than any state here takes, its rows files included
RECURRENT = {"conv": np.arange(6, dtype=np.float32).reshape(2, 3), "history": np.array([-3, 4], np.int32)}

# Runs in processes of its own: a store that is written to until it is killed, and one that holds the lock.
WRITER = """
import sys
from isobit.engine import spill
from tests.engine.test_spill import CHUNK, RECURRENT, TOKENS, recurrent, rows_of
spill.CHUNK_ROWS = CHUNK
store = spill.SpillStore(sys.argv[1], 30_000, "checkpoint", queue_bytes=9000)
print("ready", flush=True)
if sys.argv[2] == "hold":
    sys.stdin.read()
number = int(sys.argv[2]) if sys.argv[2] != "hold" else 0
while True:
    number += 1
    tokens = [*TOKENS[: number * 37 % 200], number % 50 + 1]
    store.put(tokens, recurrent, rows_of(tokens), 4000, RECURRENT["conv"][0] if number % 2 else None, wait=True)
"""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(spill_module, "CHUNK_ROWS", CHUNK)


def recurrent():
    return RECURRENT


def rows_of(tokens):
    """export_rows of the state after `tokens`: each row a function of the tokens up to it."""
    sums = np.cumsum(np.array(tokens, np.int64)).astype(np.uint16)

    def export_rows(first, last):
        return {"b.keys": sums[first:last], "b.pooled": sums[first // 4 * 4 : last // 4 * 4 : 4].astype(np.float32)}

    return export_rows


def put(store, tokens, logits=None, nbytes=NBYTES) -> bool:
    """Put a state and have it on disk; whether it is there."""
    taken = store.put(tokens, recurrent, rows_of(tokens), nbytes, logits)
    store.flush()
    return taken and len(store.path(tokens)) > 0 and store.path(tokens)[-1].rows == len(tokens)


def open_store(folder, limit=AMPLE, identity="checkpoint", device="cpu") -> SpillStore:
    return SpillStore(folder, limit, identity, device)


def assert_whole(store, state, tokens) -> None:
    """What is loaded is what was written, bytes, dtypes and shapes."""
    loaded = store.load(state)
    assert {name: array.tolist() for name, array in loaded.recurrent.items()} == {
        name: array.tolist() for name, array in RECURRENT.items()
    }
    pieces = list(loaded.pieces)
    assert [piece.first for piece in pieces] == list(range(0, len(tokens) + 1, CHUNK))
    export_rows = rows_of(tokens)
    for piece in pieces:
        expected = export_rows(piece.first, piece.last)
        assert piece.arrays.keys() == expected.keys()
        for name, array in piece.arrays.items():
            assert (array.dtype, array.shape) == (expected[name].dtype, expected[name].shape)
            assert array.tobytes() == expected[name].tobytes()


def files(folder) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(1, 200), min_size=1, max_size=5), own=st.lists(st.integers(0, 2), max_size=2))
def test_states_come_back_whole_after_a_restart(tmp_path_factory, rows, own):
    folder = tmp_path_factory.mktemp("spill")
    sequences = {(*TOKENS[:count], *own) for count in rows}
    store = open_store(folder)
    assert all(put(store, tokens) for tokens in sequences)
    for _ in range(2):
        assert len(store) == len(sequences)
        for tokens in sequences:
            state = store.path(tokens)[-1]
            assert (state.rows, state.has_logits) == (len(tokens), False)
            assert_whole(store, state, tokens)
        assert store.nbytes == sum(path.stat().st_size for path in files(folder))
        store.close()
        store = open_store(folder)
    store.close()


def test_files_are_safetensors_that_say_what_they_are(tmp_path):
    with_logits = np.array([1.5, -2], np.float32)
    assert put(open_store(tmp_path), TOKENS[:70], with_logits)
    numpy_files = pytest.importorskip("safetensors.numpy")
    rows, state = sorted(files(tmp_path), key=lambda path: "state" in path.name)
    assert numpy_files.load_file(state)["tokens"].tolist() == TOKENS[:70]
    _, metadata = read_tensors(state, ())
    assert metadata.items() >= {"checkpoint": "checkpoint", "arithmetic": "1", "device": "cpu", "rows": "70"}.items()
    assert len(metadata["sha256"]) == 64
    assert numpy_files.load_file(rows)["b.keys"].shape == (CHUNK,)
    with TensorStore(tmp_path) as store:
        assert "logits" in store


def test_logits_come_back_and_are_added_to_a_state_that_lacks_them(tmp_path):
    store = open_store(tmp_path)
    logits = np.array([1.5, -0.0, np.inf], np.float32)
    put(store, TOKENS)
    put(store, TOKENS, logits)
    put(store, TOKENS)
    (state,) = store.path(TOKENS)
    assert store.load(state).logits.tobytes() == logits.tobytes()
    assert len(store) == 1
    assert_whole(store, state, TOKENS)


def test_rows_that_states_share_are_written_once(tmp_path):
    store = open_store(tmp_path)
    put(store, TOKENS)
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path)}
    put(store, [*TOKENS[:150], 1, 2])
    new = set(files(tmp_path)) - set(before)
    assert len(before) == 4
    assert [path.name.split(".")[1] for path in new] == ["state"]
    store.drop(store.path(TOKENS)[-1])
    assert len(files(tmp_path)) == 3
    (state,) = store.path([*TOKENS[:150], 1, 2])
    assert_whole(store, state, [*TOKENS[:150], 1, 2])
    store.drop(state)
    assert files(tmp_path) == []
    assert store.nbytes == 0


def test_only_the_rows_asked_for_are_read(tmp_path):
    store = open_store(tmp_path)
    put(store, TOKENS)
    (state,) = store.path(TOKENS)
    assert [piece.first for piece in store.load(state, 130).pieces] == [128, 192]
    assert [piece.first for piece in store.load(state, 128).pieces] == [128, 192]
    assert [piece.first for piece in store.load(state, 127).pieces] == [64, 128, 192]


def test_the_least_recently_used_make_room(tmp_path):
    store = open_store(tmp_path)
    sequences = [[number, *TOKENS[:20]] for number in range(4)]
    for tokens in sequences[:3]:
        put(store, tokens)
    limit = store.nbytes + 1200  # room is made for the longest header that a file can have
    store.load(store.path(sequences[0])[0])
    store.close()
    store = open_store(tmp_path, limit)
    assert len(store) == 3
    with store.holding(store.path(sequences[1])[0]):
        put(store, sequences[3], nbytes=200)
    assert [len(store.path(tokens)) for tokens in sequences] == [1, 1, 0, 1]
    assert store.nbytes <= limit
    store.close()
    store = open_store(tmp_path, limit // 3)
    assert [len(store.path(tokens)) for tokens in sequences] == [0, 0, 0, 1]


def test_what_the_limit_cannot_hold_is_not_written_and_pushes_nothing_out(tmp_path):
    store = open_store(tmp_path, 2 * NBYTES)
    put(store, TOKENS[:20])
    assert not store.put(TOKENS, recurrent, rows_of(TOKENS), 2 * NBYTES + 1)
    assert len(store) == 1
    assert len(files(tmp_path)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_never_trusted(tmp_path_factory, data):
    """One changed byte, a cut or a tail anywhere in any file: the state is gone, and others still come back."""
    folder = tmp_path_factory.mktemp("spill")
    store = open_store(folder)
    put(store, TOKENS, np.ones(3, np.float32))
    put(store, [7, *TOKENS[:10]])
    store.close()
    path = data.draw(st.sampled_from(files(folder)))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "tail", "zero"]))
    changed = {
        "flip": content[:place] + bytes([content[place] ^ (1 << data.draw(st.integers(0, 7)))]) + content[place + 1 :],
        "cut": content[:place],
        "tail": content + b"\0" * (place + 1),
        "zero": content[:place] + b"\0" * (len(content) - place),
    }[how]
    path.write_bytes(changed)
    store = open_store(folder)
    for tokens in (TOKENS, [7, *TOKENS[:10]]):
        for state in store.path(tokens):
            try:
                loaded = store.load(state)
                list(loaded.pieces)
            except SpillDamagedError:
                assert changed != content
                assert state not in store
            else:
                assert_whole(store, state, tokens)
    if changed == content:
        assert len(store) == 2
    elif how == "cut":
        assert len(store) == 1
    store.close()
    reopened = open_store(folder)
    assert len(reopened) == (2 if changed == content else 1)
    reopened.close()


def test_damage_is_logged_with_the_file_and_the_reason(tmp_path, caplog):
    store = open_store(tmp_path)
    put(store, TOKENS[:20])
    put(store, [7, *TOKENS[:20]])
    store.close()
    truncated, flipped = files(tmp_path)
    truncated.write_bytes(truncated.read_bytes()[:-1])
    store = open_store(tmp_path)
    assert f"{truncated.name} in the spill folder is damaged or truncated and was removed" in caplog.text
    assert "download" not in caplog.text
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xee")
    (state,) = [*store.path(TOKENS[:20]), *store.path([7, *TOKENS[:20]])]
    with pytest.raises(SpillDamagedError, match="checksum"):
        store.load(state)
    assert f"{flipped.name} in the spill folder is damaged and was removed: its checksum" in caplog.text
    assert files(tmp_path) == []
    assert store.nbytes == 0


def test_a_state_under_the_name_of_another_is_not_taken_for_it(tmp_path):
    store = open_store(tmp_path)
    sequences = (TOKENS[:20], [7, *TOKENS[1:20]])
    for tokens in sequences:
        put(store, tokens)
    states = {store.path(tokens)[0].path: tokens for tokens in sequences}
    shutil.copy(*states)
    right, wrong = states.values()
    assert_whole(store, store.path(right)[0], right)
    with pytest.raises(SpillDamagedError, match="not hold the state it is named for"):
        store.load(store.path(wrong)[0])
    assert store.path(wrong) == []
    put(store, wrong)
    store.close()
    shutil.copy(*states)
    store = open_store(tmp_path)
    assert [len(store.path(tokens)) for tokens in (right, wrong)] == [1, 0]
    assert len(store) == len(files(tmp_path)) == 1


@pytest.mark.parametrize("changed", [{"identity": "another"}, {"device": "cuda-90"}, {"version": "2"}])
def test_foreign_states_are_ignored_with_a_warning_until_room_is_needed(tmp_path, caplog, monkeypatch, changed):
    store = open_store(tmp_path)
    put(store, TOKENS)
    nbytes = store.nbytes
    store.close()
    with monkeypatch.context() as patch:
        if "version" in changed:
            patch.setattr(spill_module, "ARITHMETIC_VERSION", changed["version"])
        named = {name: value for name, value in changed.items() if name != "version"}
        other = open_store(tmp_path, **named)
        assert "4 files" in caplog.text
        assert "ignored" in caplog.text
        assert (len(other), other.path(TOKENS), other.nbytes) == (0, [], nbytes)
        put(other, TOKENS[:10])
        other.close()
        assert len(open_store(tmp_path)) == 1
        tight = open_store(tmp_path, 2000, **named)
        assert tight.nbytes <= 2000
        assert len(tight.path(TOKENS[:10])) == 1
        tight.close()
    caplog.clear()
    assert len(open_store(tmp_path)) == 0
    assert len(files(tmp_path)) == 1


def test_one_process_at_a_time(tmp_path, caplog):
    code = [sys.executable, "-c", WRITER, str(tmp_path), "hold"]
    first = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert first.stdout.readline() == b"ready\n"
        second = open_store(tmp_path)
        assert not second.active
        assert "in use by another process: running without it" in caplog.text
        assert not put(second, TOKENS)
        assert (len(second), second.nbytes, second.path(TOKENS), files(tmp_path)) == (0, 0, [], [])
        second.close()
    finally:
        first.kill()
        first.communicate()
    third = open_store(tmp_path)
    assert third.active
    third.close()


def test_a_process_that_is_killed_leaves_a_usable_folder(tmp_path, caplog):
    """Killed at any time while it writes and makes room: what is found is whole, and nothing else is left."""
    for number in range(3):
        code = [sys.executable, "-c", WRITER, str(tmp_path), str(number * 1000)]
        writer = subprocess.Popen(code, stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.15 + 0.1 * number)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate()
        store = open_store(tmp_path, 30_000)
        states = [node.value for node in store._tree]
        assert states
        for state in states:
            assert_whole(store, state, state.node.tokens().tolist())
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path)) <= 30_000
        assert {path.name for path in tmp_path.iterdir()} == {"lock", *(path.name for path in files(tmp_path))}
        store.close()
    assert caplog.text == ""


def test_what_a_killed_process_leaves_half_done_is_removed_at_the_next_start(tmp_path):
    store = open_store(tmp_path)
    put(store, TOKENS)
    store.close()
    state = next(path for path in files(tmp_path) if "state" in path.name)
    state.unlink()
    (tmp_path / ".a.state.safetensors.0000.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    store = open_store(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]
    assert store.nbytes == 0


def test_a_full_disk_is_a_warning_once_and_no_error(tmp_path, caplog, monkeypatch):
    store = open_store(tmp_path)
    put(store, TOKENS[:20])
    with monkeypatch.context() as patch:
        patch.setattr("isobit.checkpoint.store.shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        assert not put(store, TOKENS)
        assert not put(store, TOKENS)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "more than its disk has free" in caplog.text
    assert len(files(tmp_path)) == 1
    assert put(store, TOKENS)
    assert_whole(store, store.path(TOKENS)[-1], TOKENS)


@pytest.fixture
def disk(monkeypatch):
    """An event that files wait for before they are written."""
    event, write = threading.Event(), spill_writer.write_tensors

    def write_in_time(*given, **named) -> None:
        assert event.wait(60)
        write(*given, **named)

    monkeypatch.setattr(spill_writer, "write_tensors", write_in_time)
    yield event
    event.set()


def test_a_state_on_its_way_to_the_disk_is_there_already(tmp_path, disk):
    store = open_store(tmp_path)
    logits = np.array([2.5, -1], np.float32)
    assert store.put(TOKENS, recurrent, rows_of(TOKENS), NBYTES, logits)
    assert store.put([*TOKENS[:150], 1], recurrent, rows_of([*TOKENS[:150], 1]), NBYTES)
    for tokens in (TOKENS, [*TOKENS[:150], 1]):
        assert_whole(store, store.path(tokens)[-1], tokens)
    assert store.load(store.path(TOKENS)[-1]).logits.tobytes() == logits.tobytes()
    assert (files(tmp_path), len(store)) == ([], 2)
    first_guess = store.nbytes
    disk.set()
    store.flush()
    assert sum(path.stat().st_size for path in files(tmp_path)) == store.nbytes <= first_guess
    assert_whole(store, store.path(TOKENS)[-1], TOKENS)


def test_a_state_that_is_dropped_on_its_way_never_arrives(tmp_path, disk):
    store = open_store(tmp_path)
    sequences = [[number, *TOKENS[:100]] for number in range(3)]
    for tokens in sequences:
        assert store.put(tokens, recurrent, rows_of(tokens), NBYTES)
    for tokens in sequences[:2]:
        store.drop(store.path(tokens)[-1])
    assert store.put(sequences[1], recurrent, rows_of(sequences[1]), NBYTES, np.ones(2, np.float32))
    disk.set()
    store.flush()
    assert [len(store.path(tokens)) for tokens in sequences] == [0, 1, 1]
    assert store.load(store.path(sequences[1])[-1]).logits.tolist() == [1, 1]
    assert len(files(tmp_path)) == 4
    assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))


def test_what_comes_faster_than_the_disk_takes_it_is_skipped_or_waits(tmp_path, disk):
    store = SpillStore(tmp_path, AMPLE, "checkpoint", queue_bytes=2 * NBYTES)
    asked = [store.put([number], recurrent, rows_of([number]), NBYTES) for number in range(20)]
    assert asked == sorted(asked, reverse=True)
    taken = sum(asked)
    assert 0 < taken < 20
    assert store.skipped == 20 - taken
    threading.Timer(0.1, disk.set).start()
    assert all(store.put([number], recurrent, rows_of([number]), NBYTES, wait=True) for number in range(20))
    store.close()
    assert len(open_store(tmp_path)) == 20


def test_a_state_larger_than_the_queue_is_written_piece_by_piece(tmp_path):
    store = SpillStore(tmp_path, AMPLE, "checkpoint", queue_bytes=1)
    assert store.put(TOKENS, recurrent, rows_of(TOKENS), NBYTES)
    store.flush()
    assert_whole(store, store.path(TOKENS)[-1], TOKENS)


def test_a_state_whose_file_cannot_be_written_vanishes_with_those_that_share_it(tmp_path, disk, monkeypatch, caplog):
    store = open_store(tmp_path)
    longer = [*TOKENS, 5]
    for tokens in (TOKENS, longer, [9, *TOKENS[:20]]):
        assert store.put(tokens, recurrent, rows_of(tokens), NBYTES)
    slow = spill_writer.write_tensors

    def refuse_rows(path, *given, **named) -> None:
        if "rows" in path.name:
            raise OSError(28, "No space left on device")
        slow(path, *given, **named)

    monkeypatch.setattr(spill_writer, "write_tensors", refuse_rows)
    state = store.path(longer)[-1]
    disk.set()
    store.flush()
    assert (store.path(longer), store.path(TOKENS), len(store), len(files(tmp_path))) == ([], [], 1, 1)
    with pytest.raises(SpillDamagedError, match="could not be written"):
        store.load(state)
    assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))
    assert caplog.text.count("No space left on device") == 1
    assert "Traceback" not in caplog.text


def test_a_use_on_the_way_counts_after_a_restart(tmp_path, disk):
    store = open_store(tmp_path)
    sequences = [[number, *TOKENS[:20]] for number in range(3)]
    for tokens in sequences:
        store.put(tokens, recurrent, rows_of(tokens), NBYTES)
    store.load(store.path(sequences[0])[0])
    disk.set()
    store.close()
    limit = sum(path.stat().st_size for path in files(tmp_path)) * 2 // 3
    store = open_store(tmp_path, limit)
    assert [len(store.path(tokens)) for tokens in sequences] == [1, 0, 1]


def test_a_hurried_close_drops_what_waits_and_leaves_nothing_half_written(tmp_path, disk):
    store = open_store(tmp_path)
    for number in range(5):
        store.put([number], recurrent, rows_of([number]), NBYTES)
    threading.Timer(0.1, disk.set).start()
    store.close(drop=True)
    assert len(files(tmp_path)) <= 1
    assert list(tmp_path.glob(".*")) == []


def test_a_folder_that_cannot_be_used_is_refused_with_its_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(IsobitError, match=r"the spill folder .*file/spill cannot be used \(Not a directory\)"):
        open_store(tmp_path / "file" / "spill")


def test_states_whose_files_vanish_are_dropped(tmp_path):
    store = open_store(tmp_path)
    put(store, TOKENS)
    for path in files(tmp_path):
        path.unlink()
    (state,) = store.path(TOKENS)
    with pytest.raises(SpillDamagedError, match="No such file"):
        store.load(state)
    assert (len(store), store.nbytes) == (0, 0)
    assert put(store, TOKENS)
