"""Marks in a GPU's time: events in the stream of the kernels, which nothing waits for until they are read."""

from collections.abc import Callable
from typing import Any

import torch

Event = Any  # torch.cuda.Event


def timing_event() -> Event:
    """An event that takes the time when the stream comes to it."""
    return torch.cuda.Event(enable_timing=True)


class EventClock:
    """A clock (`isobit.ops.profile.Clock`) of the current stream. make: gives a new event."""

    def __init__(self, make: Callable[[], Event] = timing_event):
        self._make = make
        self._unused: list[Event] = []

    def mark(self) -> Event:
        event = self._unused.pop() if self._unused else self._make()
        event.record()
        return event

    def has_passed(self, mark: Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: Event) -> None:
        mark.synchronize()

    def seconds(self, first: Event, last: Event) -> float:
        return float(first.elapsed_time(last)) / 1e3

    def drop(self, mark: Event) -> None:
        self._unused.append(mark)
