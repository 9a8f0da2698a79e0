"""A forward that memory runs out in leaves its streams as they were, wherever it stops; the next one is unharmed."""

import shutil

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.errors import CheckpointError
from isobit.model.drafting import propose_mtp
from isobit.model.flash_next import FlashNext
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.undo import StateLostError
from isobit.ops import load_ops
from isobit.ops.batch import Array
from tests.short_memory import Allocations, never, only, short_device_memory, short_memory


class Bench:
    """Two streams of one model, of which a forward computes a few rows: the same forward again and again."""

    def __init__(self, model: FlashNext, first: int, rows: tuple[int, int], journal: bool = False):
        self.model, self.rows, self.journal = model, rows, journal
        self.tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, (2, 200)).tolist()
        self.state = model.new_state(slots=3, pages=24)
        self.streams = [self.state.open(), self.state.open()]
        for stream, tokens in zip(self.streams, self.tokens, strict=True):
            model.forward(self.state, Plan((Segment(stream, tuple(tokens[:first])),)))
        # A page that is shared is copied before it is written.
        self.kept = [self.state.save(stream) for stream in self.streams]
        self.digests = self.digest()

    def digest(self) -> list[str]:
        return [self.state.digest(stream) for stream in self.streams]

    def forward(self) -> Array:
        """The logits of the next rows."""
        segments = [
            Segment(stream, tuple(tokens[stream.rows : stream.rows + rows]), "all", self.journal)
            for stream, tokens, rows in zip(self.streams, self.tokens, self.rows, strict=True)
        ]
        return self.model.forward(self.state, Plan(tuple(segments)))

    def result(self) -> tuple[bytes, list[str]]:
        """The bytes of the logits, and the state afterwards."""
        return self.model.ops.to_host(self.forward()).tobytes(), self.digest()

    def allocations_of(self, allocations: Allocations) -> int:
        """How many a forward makes; the streams are what they were before."""
        allocations.count = 0
        self.forward()
        total = allocations.count
        self.again()
        return total

    def again(self) -> None:
        """Back to before the forward."""
        for stream, kept in zip(self.streams, self.kept, strict=True):
            self.state.rewind(stream, kept)
        assert self.digest() == self.digests

    def fail_at(self, allocations: Allocations, number: int) -> None:
        """A forward in which this allocation fails, counted from its start, changes nothing."""
        self.again()
        allocations.count, allocations.fails = 0, only(number)
        with pytest.raises((MemoryError, RuntimeError), match="no room"):
            self.forward()
        allocations.fails = never
        assert self.digest() == self.digests


@pytest.mark.parametrize(
    ("first", "rows", "journal"), [(70, (90, 1), False), (37, (3, 2), True), (1, (1, 1), False)], ids=str
)
def test_a_forward_that_fails_anywhere_can_be_had_again(test_checkpoint, first, rows, journal):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=256)
    bench = Bench(model, first, rows, journal)
    expected = bench.result()
    with short_memory() as allocations:
        model.ops.passes.release()
        bench.again()
        total = bench.allocations_of(allocations)
        assert total > 20
        for number in range(1, total + 1, 1 if sum(rows) < 64 else 3):
            model.ops.passes.release()
            bench.fail_at(allocations, number)
            if number % 10 == 1:
                assert bench.result() == expected


@pytest.mark.usefixtures("emulated_cuda")
def test_a_forward_that_fails_on_the_device_can_be_had_again(test_checkpoint):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cuda"), context=256)
    # A capture that fails is no failed forward.
    model.ops.passes.enabled = False
    bench = Bench(model, 3, (1, 2))
    expected = bench.result()
    with short_device_memory() as allocations:
        bench.again()
        total = bench.allocations_of(allocations)
        assert total > 20
        for number in range(1, total + 1, 1 + total // 8):
            bench.fail_at(allocations, number)
        assert bench.result() == expected


def test_a_replay_that_there_is_no_memory_for_runs_step_by_step(test_checkpoint, caplog):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=256)
    bench = Bench(model, 5, (1, 1))
    expected = bench.result()
    with short_memory() as allocations:
        bench.again()
        total = bench.allocations_of(allocations)
        assert 0 < total < 20
        for number in range(1, total + 1):
            caplog.clear()
            allocations.count, allocations.fails = 0, only(number)
            try:
                assert bench.result() == expected
                assert caplog.messages == ["no memory to replay a forward: it runs step by step"]
            except MemoryError:
                # What a forward is given is made before it begins.
                assert not caplog.messages
            else:
                assert model.ops.passes.nbytes == 0
                bench.again()
            allocations.fails = never
            assert bench.result() == expected
            bench.again()


def test_a_replay_that_fails_says_that_the_state_is_lost(test_checkpoint, monkeypatch):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=256)
    bench = Bench(model, 5, (1, 1))
    bench.forward()
    bench.again()

    def broken(tape, inputs, places):
        raise MemoryError("no room")

    monkeypatch.setattr("isobit.ops.replay.Tape.replay", broken)
    with pytest.raises(StateLostError, match="send the request again"):
        bench.forward()


def test_a_forward_whose_files_are_edited_while_it_reads_them_is_taken_back(test_checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(test_checkpoint, tmp_path / "checkpoint")
    model = load_model(Checkpoint(folder), load_ops("cpu"), context=256)
    bench, embed = Bench(model, 5, (70, 2)), model.ops.embed
    edited = [file.path for file in model.files]
    assert len(edited) == 2

    def edit_and_embed(*arguments):
        path = edited.pop()
        path.write_bytes(path.read_bytes())
        return embed(*arguments)

    monkeypatch.setattr(model.ops, "embed", edit_and_embed)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="was edited since it was opened"):
            bench.forward()
        assert bench.digest() == bench.digests
    assert len(edited) == 1, "a forward began on files that were edited"


def test_drafts_are_not_made_from_files_that_were_edited(test_checkpoint, tmp_path):
    folder = shutil.copytree(test_checkpoint, tmp_path / "checkpoint")
    model = load_model(Checkpoint(folder), load_ops("cpu"), context=256)
    bench = Bench(model, 5, (1, 1))
    path = model.files[0].path
    path.write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{path} was edited since it was opened"):
        propose_mtp(model, bench.state, bench.streams, [3, 4], 2)


def test_a_stream_that_cannot_be_restored_takes_no_slot_or_page(test_checkpoint, monkeypatch):
    model = load_model(Checkpoint(test_checkpoint), load_ops("cpu"), context=256)
    bench = Bench(model, 5, (1, 1))
    free = bench.state.free_slots, bench.state.free_pages
    put_rows, calls = model.ops.put_rows, []

    def put_some(x, indices, values):
        calls.append(indices)
        if len(calls) == 3:
            raise MemoryError("no room")
        put_rows(x, indices, values)

    monkeypatch.setattr(model.ops, "put_rows", put_some)
    with pytest.raises(MemoryError):
        bench.state.restore(bench.kept[0])
    assert (bench.state.free_slots, bench.state.free_pages) == free
    calls.clear()
    with pytest.raises(MemoryError):
        bench.state.reserve(bench.streams[0], 1)
    assert (bench.state.free_slots, bench.state.free_pages) == free
    monkeypatch.undo()
    assert bench.digest() == bench.digests
