"""Submitting requests to an engine and waiting for what comes back."""

import queue
import threading

import numpy as np

from isobit.engine.engine import Engine
from isobit.engine.request import Event, Finished, Request


class Listener:
    """Collects a request's events; `result` waits for the end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.started = threading.Event()
        self._end: queue.Queue[Finished] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.started.set()
        if isinstance(event, Finished):
            self._end.put(event)

    def result(self) -> Finished:
        return self._end.get(timeout=180)


def prompt(engine: Engine, length: int, seed: int = 5) -> tuple[int, ...]:
    """Random ids."""
    return tuple(np.random.default_rng(seed).integers(0, engine.config.vocab_size, length).tolist())


def reply(engine: Engine, request: Request) -> tuple[Finished, list[Event]]:
    """One request, alone."""
    listener = Listener()
    engine.submit(request, listener)
    return listener.result(), listener.events


def together(engine: Engine, requests: list[Request]) -> list[Finished]:
    """All requests at once."""
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    return [listener.result() for listener in listeners]


def wait_until(condition) -> bool:
    """Whether the condition came true within half a minute."""
    for _ in range(600):
        if condition():
            return True
        threading.Event().wait(0.05)
    return False
