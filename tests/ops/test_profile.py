"""Time per op: what is counted, when, and that nothing waits for the device in a round."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from isobit.checkpoint.reader import Checkpoint
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.ops import load_ops
from isobit.ops.profile import HostClock, OpProfile, clock_of


class Device:
    """A device that comes to a mark only when it is told to; its work takes the seconds that an op is given."""

    def __init__(self):
        self.now, self.reached, self.waited = 0.0, 0.0, 0
        self.dropped: list[float] = []

    def work(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        self.now += 1e-6
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark <= self.reached

    def wait(self, mark: float) -> None:
        self.waited += 1
        self.reached = max(self.reached, mark)

    def seconds(self, first: float, last: float) -> float:
        assert last <= self.reached
        return last - first

    def drop(self, mark: float) -> None:
        self.dropped.append(mark)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def ops(device):
    names = SimpleNamespace(passes=SimpleNamespace(enabled=True), device="cpu", family="cpu")
    names.linear = lambda seconds: device.work(seconds)
    names.experts = lambda seconds: names.linear(seconds)
    names.prepare_linear = lambda seconds: device.work(seconds)
    return names


@pytest.fixture
def profile(device, ops):
    profile = OpProfile(device)
    profile.wrap(ops)
    return profile


def counted(profile):
    """{phase: (rounds, rows, seconds, {op: (calls, seconds)})}, seconds in tenths."""
    return {
        name: (p.rounds, p.rows, round(10 * p.seconds), {o: (s.calls, round(10 * s.seconds)) for o, s in p.ops.items()})
        for name, p in profile.phases().items()
    }


def test_ops_are_counted_by_phase_and_only_in_rounds(device, ops, profile):
    assert ops.passes.enabled is False
    ops.linear(5.0)
    profile.end()
    for phase, rows in (("prompt", 3), ("decode", 1), ("decode", 2)):
        profile.begin(phase)
        profile.count_rows(rows)
        ops.linear(0.1)
        device.work(0.2)
        ops.experts(0.3)
        ops.prepare_linear(0.1)
        profile.end()
        ops.linear(5.0)
    assert counted(profile) == {
        "prompt": (1, 3, 7, {"linear": (1, 1), "experts": (1, 3)}),
        "decode": (2, 3, 14, {"linear": (2, 2), "experts": (2, 6)}),
    }


def test_nothing_waits_for_the_device_before_the_profile_is_read(device, ops, profile):
    for _ in range(4):
        profile.begin("decode")
        ops.linear(0.1)
        profile.end()
        device.reached = device.now - 0.05
    assert device.waited == 0
    assert device.dropped
    profile.phases()
    assert device.waited == 1
    assert len(device.dropped) == 4 * 4
    assert counted(profile)["decode"] == (4, 0, 4, {"linear": (4, 4)})


def test_rounds_before_a_new_start_are_forgotten(ops, profile):
    profile.begin("warm")
    ops.linear(1.0)
    profile.start_over()
    ops.linear(1.0)
    profile.end()
    assert profile.phases() == {}
    profile.begin("decode")
    ops.linear(0.1)
    profile.end()
    assert counted(profile) == {"decode": (1, 0, 1, {"linear": (1, 1)})}


def test_an_op_that_fails_and_another_threads_ops_leave_the_count_right(ops, profile):
    profile.begin("decode")
    with pytest.raises(TypeError):
        ops.linear("x")
    other = threading.Thread(target=ops.linear, args=(1.0,))
    other.start()
    other.join()
    ops.linear(0.1)
    profile.end()
    assert counted(profile)["decode"][3] == {"linear": (2, 11 - 10)}


class FakeEvent:
    made = 0

    def __init__(self):
        FakeEvent.made += 1
        self.records = 0

    def record(self):
        self.records += 1
        self.at = FakeEvent.made + self.records

    def query(self):
        return True

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_events_are_marks_in_seconds_and_used_again(monkeypatch):
    pytest.importorskip("torch")
    from isobit.cuda.events import EventClock

    clock = EventClock(FakeEvent)
    profile = OpProfile(clock)
    ops = SimpleNamespace(passes=SimpleNamespace(enabled=True), norm=lambda: None)
    profile.wrap(ops)
    for _ in range(50):
        profile.begin("decode")
        ops.norm()
        profile.end()
    assert profile.phases()["decode"].ops["norm"].calls == 50
    assert FakeEvent.made <= 6
    one, other = FakeEvent(), FakeEvent()
    one.at, other.at = 3, 5
    assert clock.seconds(one, other) == 2.0


def clock_kind(device_name: str) -> type:
    """A GPU's events, or the host's time for the CPU and the emulator."""
    if device_name == "cpu":
        return HostClock
    from isobit.cuda import memory
    from isobit.cuda.events import EventClock

    return HostClock if memory.is_emulated() else EventClock


@pytest.mark.parametrize("device_name", ["cpu", "cuda"])
def test_timed_forwards_give_the_same_bytes(device_name, test_checkpoint, request):
    if device_name == "cuda":
        request.getfixturevalue("emulated_cuda")
    tokens = np.random.default_rng(5).integers(0, 300, 12).tolist()
    digests, phases = [], {}
    for timed in (False, True):
        model = load_model(Checkpoint(test_checkpoint), load_ops(device_name), context=64)
        profile = OpProfile(clock_of(model.ops))
        assert isinstance(profile.clock, clock_kind(device_name))
        if timed:
            profile.wrap(model.ops)
        state = model.new_state(slots=1, pages=2)
        stream = state.open()
        for start, end in ((0, 10), (10, 11), (11, 12)):
            profile.begin("forward")
            logits = model.forward(state, Plan((Segment(stream, tuple(tokens[start:end])),)))
            profile.end()
        digests.append((model.ops.to_host(logits).tobytes(), state.digest(stream)))
        phases = profile.phases()
    assert digests[1] == digests[0]
    forward = phases["forward"]
    assert forward.rounds == 3
    calls = {op: spent.calls for op, spent in forward.ops.items()}
    assert (calls["experts"], calls["delta_rule"], calls["attention_read"], calls["embed"]) == (12, 9, 3, 3)
    assert 0 < sum(spent.seconds for spent in forward.ops.values()) <= forward.seconds
