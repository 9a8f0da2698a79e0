"""The registry of the row contract: every op states its cases, its float64 reference, its error limit, how to run it.

A case holds the inputs of some streams, a few rows each. A plan says which rows one call computes. The gates
(`isobit.contract`) run every implementation over many plans and compare bytes; an op only describes itself here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Span:
    """`count` consecutive rows of case stream `stream`, from row `first` of that stream."""

    stream: int
    first: int
    count: int


@dataclass
class Case:
    """Inputs of one check. `rows[i]` is the number of rows of stream i; `inputs` and `computed` belong to the op.

    A stateless op gives every row its own stream (rows all 1), so that any order and any subset may be asked for, a
    row more than once too. The gates keep here what they know of the case: `known`, the reference and its limits;
    `oracle_runs`, by schedule; `leaves_state`, whether calls leave anything behind; if not, `prepared`, what `begin`
    gave.
    """

    label: str
    rows: tuple[int, ...]
    inputs: dict[str, Any] = field(repr=False)
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    known: tuple[Outputs, Outputs] | None = field(default=None, init=False, repr=False, compare=False)
    oracle_runs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    leaves_state: bool | None = field(default=None, init=False, repr=False, compare=False)
    prepared: Any = field(default=None, init=False, repr=False, compare=False)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` gives for the case, computed once under that name: for what references and limits share."""
        if name not in self.computed:
            self.computed[name] = compute()
        return self.computed[name]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int [streams], where each stream begins among all rows."""
        return np.cumsum([0, *self.rows[:-1]])


class Op(Protocol):
    """What an op registers. `implementations` are in order of trust: the first is the oracle the others replace.

    An op whose kernels change at some numbers of rows also has `row_edges: tuple[int, ...]`, which gate 2 then checks.
    """

    name: str
    implementations: tuple[str, ...]

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        """Random and adversarial cases (large, tiny, subnormal, cancelling, equal, zero); `full` adds real widths."""

    def begin(self, case: Case) -> Any:
        """Fresh state for all streams of the case, prepared weights included; kept if `final_state` gives nothing."""

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        """Run one forward over the spans in order; arrays [rows of the plan, ...]. Raises KeyError if it can't."""

    def final_state(self, case: Case, state: Any) -> Outputs:
        """What the calls left behind, as arrays to compare by bytes; {} for a stateless op."""

    def reference(self, case: Case) -> Outputs:
        """The float64 value of every output, rows stream after stream."""

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """The largest allowed |output - reference|, broadcastable to each output."""

    def limits(self) -> list[str]:
        """Shapes that the cases do not cover, and why."""


_registry: dict[str, dict[str, Op]] = {}


def register(op: Op, device: str = "cpu") -> Op:
    """Add an op to the contract of a device; raises ValueError if the name is taken."""
    ops = _registry.setdefault(device, {})
    if op.name in ops:
        raise ValueError(f"op {op.name} is registered twice for {device}")
    ops[op.name] = op
    return op


def registered(device: str = "cpu") -> dict[str, Op]:
    """All ops of a device by name, after importing every op folder."""
    from isobit.ops import import_contracts

    import_contracts(device)
    return dict(_registry.get(device, {}))


@dataclass(frozen=True)
class Control:
    """A planted defect: `plant()` gives an Op whose named gate must turn red. Made in `isobit.contract.controls`."""

    op: str
    gate: str
    defect: str
    plant: Callable[[], Op]
