"""How defects are planted: around an op's calls, as one more implementation, never as a switch inside a kernel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isobit.contract.gates import rows_of
from isobit.contract.plans import together
from isobit.ops import buffers, cases
from isobit.ops.cases import stream_of_row
from isobit.ops.contract import Case, Control, Op, Outputs, Span

PLANTED = "planted"


@dataclass
class Call:
    """One call of a planted op, for a defect to change. `number` counts the op's calls over all runs, from 1."""

    op: Op
    case: Case
    state: Any
    plan: Sequence[Span]
    number: int
    replays: dict[Any, Outputs]
    _sound: Outputs | None = None

    @property
    def rows(self) -> int:
        """How many rows the call computes."""
        return sum(span.count for span in self.plan)

    @property
    def streams(self) -> np.ndarray:
        """int [R], the stream of each row."""
        return stream_of_row(self.plan)

    @property
    def positions(self) -> np.ndarray:
        """int [R], each row's number in its stream."""
        return np.concatenate([np.arange(span.first, span.first + span.count) for span in self.plan])

    def run(self) -> Outputs:
        """What the sound implementation gives, as arrays that may be changed; the state moves on, once a call."""
        if self._sound is None:
            self._sound = self.op.call(self.op.implementations[0], self.case, self.state, self.plan)
        return {name: np.array(values) for name, values in self._sound.items()}

    def replay(self, variant: str = "", **inputs: Any) -> Outputs:
        """The plan's rows as the sound implementation computes them from other inputs; the state moves on as usual.

        Other inputs for the same names need another `variant`: a case is replayed once.
        """
        self.run()
        key = (id(self.case), variant, *sorted(inputs))
        if key not in self.replays:
            changed = replace(self.case, inputs={**self.case.inputs, **inputs})
            self.replays[key] = self._all_rows(changed)
        rows = rows_of(self.case, self.plan)
        return {name: values[rows] for name, values in self.replays[key].items()}

    def instead(self, **inputs: Any) -> Outputs:
        """What this call gives from other inputs, for ops without state."""
        changed = replace(self.case, inputs={**self.case.inputs, **inputs})
        outputs = self.op.call(self.op.implementations[0], changed, self.state, self.plan)
        return {name: np.array(values) for name, values in outputs.items()}

    def state_arrays(self) -> Outputs:
        """The arrays of the state: live, or copies where they lie on a device."""
        return self.op.final_state(self.case, self.state)

    @contextmanager
    def changed_state(self) -> Iterator[Outputs]:
        """The arrays of the state, to be changed in place; copies go back to the device they are from."""
        arrays = self.state_arrays()
        yield arrays
        put_back = getattr(self.op, "put_state", None)
        if put_back is not None:
            put_back(self.case, self.state, arrays)

    def live_state(self) -> dict[str, Any]:
        """The state where it lies: arrays, or tensors of a device."""
        lying = getattr(self.op, "device_state", self.op.final_state)
        return dict(lying(self.case, self.state))

    @contextmanager
    def attributes_of_state(self, **changed: Any) -> Iterator[None]:
        """Attributes of the state object are others within; those of a call that was run already do not matter."""
        before = {name: getattr(self.state, name) for name in changed}
        for name, value in changed.items():
            setattr(self.state, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.state, name, value)

    def _all_rows(self, case: Case) -> Outputs:
        (plan,) = together(case)
        with np.errstate(all="ignore"):
            outputs = self.op.call(self.op.implementations[0], case, self.op.begin(case), plan)
        return {name: np.array(values) for name, values in outputs.items()}


Defect = Callable[[Call], Outputs]


class Planted:
    """An op whose second implementation, "planted", is the first with a defect around it."""

    def __init__(self, op: Op, defect: Defect):
        self._op = op
        self._defect = defect
        self._calls = 0
        self._replays: dict[Any, Outputs] = {}
        self.name = op.name
        self.implementations: tuple[str, ...] = (op.implementations[0], PLANTED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation != PLANTED:
            return self._op.call(implementation, case, state, plan)
        self._calls += 1
        return self._defect(Call(self._op, case, state, plan, self._calls, self._replays))


@dataclass(frozen=True)
class Planting:
    """A defect for one op, and the gate that must turn red for it. of_order: it changes the order of a sum alone."""

    op: str
    gate: str
    defect: str
    change: Defect
    of_order: bool = False

    def control(self, op: Op) -> Control:
        return Control(op.name, self.gate, self.defect, lambda: Planted(op, self.change))


_plantings: list[Planting] = []


def plant(op: str, gate: str, defect: str, of_order: bool = False) -> Callable[[Defect], Defect]:
    """Register the decorated function as a defect of the op named `op`, in the words of `defect`.

    of_order: it changes the order of a sum alone, which an exact sum does not show.
    """

    def register(change: Defect) -> Defect:
        _plantings.append(Planting(op, gate, defect, change, of_order))
        return change

    return register


def plantings_of(op: Op) -> list[Planting]:
    """The defects made for the op; without those that change an order, where its sums have none (`sums_are_exact`)."""
    exact = getattr(op, "sums_are_exact", False)
    return [planting for planting in _plantings if planting.op == op.name and not (exact and planting.of_order)]


def last_bits_flipped(values: np.ndarray) -> np.ndarray:
    """A copy in which the lowest bit of each element is flipped."""
    flipped = np.array(values)
    flipped.view(np.uint8).reshape(-1, values.dtype.itemsize)[:, 0] ^= 1
    return flipped


def as_halves(values: np.ndarray) -> np.ndarray:
    """Floats rounded to half and back; other arrays as they are."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(values.dtype) if values.dtype.kind == "f" else values


def as_singles(values: np.ndarray) -> np.ndarray:
    """float64 values rounded to float32 and back."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(values.dtype)


def with_weightless_neighbours(rows: np.ndarray) -> np.ndarray:
    """Rows [R, N] after each one had the row before added to it, times zero: NaN below what is not finite."""
    above_is_finite = np.isfinite(np.roll(rows, 1, axis=0))
    above_is_finite[:1] = True
    return np.where(above_is_finite, rows, np.float32(np.nan))


def evens_first(width: int) -> tuple[np.ndarray, np.ndarray]:
    """An order of `width` elements that pairs them otherwise in a lane sum, and the way back."""
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
    return order, np.argsort(order)


def rebuffered(values: np.ndarray) -> np.ndarray:
    """The values in a new output buffer."""
    buffer = buffers.empty(values.shape, values.dtype)
    buffer[...] = values
    return buffer


def unwritten(values: np.ndarray, *index: Any) -> np.ndarray:
    """The values in a new output buffer, except at the index, which keeps what the buffer held."""
    buffer = buffers.empty(values.shape, values.dtype)
    written = np.ones(values.shape, bool)
    written[index] = False
    buffer[written] = values[written]
    return buffer


def overrun(array: Any, nbytes: int) -> None:
    """Change `nbytes` bytes behind the array (before it, if negative), where the memory it lies in goes so far."""
    if not isinstance(array, np.ndarray):
        from isobit.ops import device_cases

        return device_cases.overrun(array, nbytes)
    raw = array
    while isinstance(raw.base, np.ndarray):
        raw = raw.base
    if raw is array:
        return
    start = array.__array_interface__["data"][0] - raw.__array_interface__["data"][0]
    first, last = (start + array.nbytes, start + array.nbytes + nbytes) if nbytes > 0 else (start + nbytes, start)
    raw.reshape(-1).view(np.uint8)[first:last] ^= 0xFF


def run_and_lend(call: Call) -> tuple[Outputs, list[np.ndarray]]:
    """Run the call; also the inputs that it was lent, in order."""
    lent: list[np.ndarray] = []

    def lend(array: np.ndarray) -> np.ndarray:
        lent.append(previous(array))
        return lent[-1]

    previous = cases.set_lender(lend)
    try:
        return call.run(), lent
    finally:
        cases.set_lender(previous)
