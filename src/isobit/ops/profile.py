"""Time per op: a device's op functions, each timed where the model calls it, counted by the phase of the work."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Protocol

from isobit.ops import Ops

UNTIMED = ("prepare_", "attention_cache")  # of loading, by the beginnings of their names


class Clock(Protocol):
    """Marks in a device's time, in the order of its work."""

    def mark(self) -> Any:
        """A mark after all work that was given to the device before."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has come to a mark; does not wait for it."""

    def wait(self, mark: Any) -> None:
        """Wait until the device has come to a mark."""

    def seconds(self, first: Any, last: Any) -> float:
        """The time between two marks that have passed."""

    def drop(self, mark: Any) -> None:
        """Give a mark up, to be used again."""


class HostClock:
    """Wall time, for devices whose ops return when they are done."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def drop(self, mark: float) -> None:
        """Nothing to use again."""


@dataclass
class Spent:
    """Calls of one op and their seconds."""

    calls: int = 0
    seconds: float = 0.0


@dataclass
class Phase:
    """What the rounds of one phase took: their seconds from begin to end, and those of each op in them."""

    rounds: int = 0
    rows: int = 0
    seconds: float = 0.0
    ops: dict[str, Spent] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """A call of `op`, or a whole round (None), between two marks."""

    phase: str
    op: str | None
    first: Any
    last: Any


class OpProfile:
    """Times the ops of rounds. Whoever runs the rounds tells when one begins and ends; ops outside are not counted.

    Nothing waits for the device before `phases`. Rounds and their ops belong to one thread; other threads' ops are not
    counted.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self._phases: dict[str, Phase] = {}
        self._spans: deque[Span] = deque()
        self._phase: str | None = None
        self._round: Any = None
        self._thread = 0
        self._inside = self._forget = False

    def wrap(self, ops: Ops) -> None:
        """Have the functions of `ops` timed from now on, and forwards run step by step instead of being replayed."""
        ops.passes.enabled = False
        for name, function in list(vars(ops).items()):
            if callable(function) and not name.startswith(UNTIMED):
                setattr(ops, name, self._timed(name, function))

    def begin(self, phase: str) -> None:
        """A round of a phase begins."""
        if self._forget:
            self._forget = False
            self._phases = {}
            self._drop_spans()
        self._count_passed()
        self._thread, self._phase, self._round = get_ident(), phase, self.clock.mark()

    def count_rows(self, rows: int) -> None:
        """Rows that the round computes."""
        if self._phase is not None:
            self._phases.setdefault(self._phase, Phase()).rows += rows

    def end(self) -> None:
        """The round that has begun, if one has, is over."""
        if self._phase is not None:
            self._spans.append(Span(self._phase, None, self._round, self.clock.mark()))
            self._phase = None

    def start_over(self) -> None:
        """Forget all rounds before the next one; safe from any thread."""
        self._forget = True

    def phases(self) -> dict[str, Phase]:
        """What was counted, by phase in the order of their first rounds; waits for the device. No round may be on."""
        if self._spans:
            self.clock.wait(self._spans[-1].last)
        self._count_passed()
        return {} if self._forget else self._phases

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            phase = self._phase
            if phase is None or self._inside or get_ident() != self._thread:
                return function(*arguments, **named)
            self._inside = True
            first = self.clock.mark()
            try:
                return function(*arguments, **named)
            finally:
                self._inside = False
                self._spans.append(Span(phase, name, first, self.clock.mark()))

        return timed

    def _count_passed(self) -> None:
        """Count the spans that the device is through with."""
        while self._spans and self.clock.has_passed(self._spans[0].last):
            span = self._spans.popleft()
            phase = self._phases.setdefault(span.phase, Phase())
            seconds = self.clock.seconds(span.first, span.last)
            if span.op is None:
                phase.rounds += 1
                phase.seconds += seconds
            else:
                spent = phase.ops.setdefault(span.op, Spent())
                spent.calls += 1
                spent.seconds += seconds
            self.clock.drop(span.first)
            self.clock.drop(span.last)

    def _drop_spans(self) -> None:
        for span in self._spans:
            self.clock.drop(span.first)
            self.clock.drop(span.last)
        self._spans.clear()


def clock_of(ops: Ops) -> Clock:
    """The clock that times the ops of a device."""
    if ops.family == "cuda":
        from isobit.cuda import memory

        if not memory.is_emulated():
            from isobit.cuda.events import EventClock

            return EventClock()
    return HostClock()
