"""Copies beside the forwards: what waits for what and what stays alive, on streams that only take notes."""

import contextlib
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isobit.cuda import copies as copies_module  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.cuda.copies import StreamCopies  # noqa: E402


class Stream:
    """Writes down what it is told to."""

    def __init__(self, course, name):
        self.course, self.name = course, name

    def wait_stream(self, other):
        self.course.append(f"{self.name} after {other.name}")

    def wait_event(self, event):
        self.course.append(f"{self.name} after an event of {event.stream.name}")

    def synchronize(self):
        self.course.append(f"host after {self.name}")


class Event:
    """Done when it is told to be, or when it is waited for."""

    def __init__(self):
        self.done = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.done

    def synchronize(self):
        self.stream.synchronize()
        self.done = True


class Course(list):
    """What happens on the streams, in order."""

    def working(self) -> None:
        """An upload's work."""
        self.append(f"work on {torch.cuda.current_stream().name}")


@pytest.fixture
def course(monkeypatch):
    course, made = Course(), iter(("first", "second"))
    current = [Stream(course, "forwards")]

    @contextlib.contextmanager
    def within(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(memory, "is_emulated", lambda: False)
    monkeypatch.setattr(memory, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(course, next(made)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: course.append(f"kept for {stream.name}"))
    return course


def test_an_upload_comes_after_forwards_and_downloads_and_keeps_its_sources(course):
    copies = StreamCopies()
    place = np.zeros(3, np.float32)
    before = copies.download({"x": torch.arange(3.0)}, {"x": place})
    sources = np.zeros(5)
    alive = weakref.ref(sources)
    arrival = copies.upload(course.working, before, [sources])
    del sources
    assert course == [
        "first after forwards",
        "kept for first",
        "second after forwards",
        "second after an event of first",
        "work on second",
    ]
    assert place.tolist() == [0, 1, 2]
    assert not arrival.arrived()
    assert alive() is not None
    arrival.precede()
    assert course[-1] == "forwards after an event of second"
    arrival._event.done = True
    assert arrival.arrived()
    assert alive() is None


def test_an_upload_that_is_done_lets_the_sources_of_earlier_ones_go(course):
    copies = StreamCopies()
    sources = np.zeros(5)
    alive = weakref.ref(sources)
    first, second = copies.upload(course.working, sources=[sources]), copies.upload(course.working)
    del sources
    first._event.done = True
    assert alive() is not None
    second._event.done = True
    assert second.arrived()
    assert alive() is None


def test_a_later_upload_lets_the_sources_of_earlier_ones_go(course):
    copies = StreamCopies()
    sources = np.zeros(5)
    alive = weakref.ref(sources)
    copies.upload(course.working, sources=[sources])._event.done = True
    del sources
    copies.upload(course.working)
    assert alive() is None


def test_an_upload_that_fails_is_over_before_its_error_is_known(course):
    def fail():
        raise MemoryError

    with pytest.raises(MemoryError):
        StreamCopies().upload(fail)
    assert course == ["first after forwards", "host after first"]


def test_whole_numbers_are_copied_at_once_and_few_bytes_lie_on_the_device(course, monkeypatch):
    monkeypatch.setattr(copies_module, "MOST_LEAVING", 30)
    copies = StreamCopies()
    arrivals = []
    for number in range(4):
        places = {"x": np.zeros(3, np.float32), "history": np.zeros(2, np.int32)}
        arrays = {"x": torch.full((3,), float(number)), "history": np.array([number, 9], np.int32)}
        arrivals.append(copies.download(arrays, places))
        assert (places["x"].tolist(), places["history"].tolist()) == ([number] * 3, [number, 9])
    assert [arrival.arrived() for arrival in arrivals] == [True, True, False, False]
    assert course.count("host after first") == 2
