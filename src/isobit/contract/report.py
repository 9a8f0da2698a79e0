"""What a run of the contract found."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One gate of one implementation over all cases; `problem` is None when it is green."""

    implementation: str
    gate: str
    cases: int
    problem: str | None

    @property
    def green(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class ControlResult:
    """One planted defect; `seen` is what the gate said of it, None when it stayed green, which fails the run."""

    gate: str
    defect: str
    seen: str | None

    @property
    def red(self) -> bool:
        return self.seen is not None


@dataclass
class OpReport:
    """Everything about one op."""

    name: str
    implementations: list[str]
    functions: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.cases) and not self.problems()

    def problems(self) -> list[str]:
        """Every red gate and every control that stayed green, a line each."""
        red = [
            f"{self.name}, {check.implementation}, gate {check.gate}: {check.problem}"
            for check in self.checks
            if not check.green
        ]
        green = [
            f"{self.name}, gate {control.gate} stays green with a defect planted: {control.defect}"
            for control in self.controls
            if not control.red
        ]
        return red + green

    def verdict(self, implementation: str, gate: str) -> Check | None:
        """The check of that gate, or None where there is none."""
        chosen = [check for check in self.checks if (check.implementation, check.gate) == (implementation, gate)]
        return chosen[0] if chosen else None


@dataclass
class Report:
    """A whole run. `uncovered`: op functions that no op of the contract calls; only a run over all ops can tell."""

    device: str
    threads: int
    sizes: list[int]
    ops: list[OpReport] = field(default_factory=list)
    uncovered: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.ops) and all(op.passed for op in self.ops) and not self.uncovered

    def problems(self) -> list[str]:
        """Everything that makes the run fail, a line each."""
        uncovered = [f"{name} is called by no op of the contract" for name in self.uncovered]
        return [problem for op in self.ops for problem in op.problems()] + uncovered

    def limits(self) -> list[str]:
        """What no op's cases cover."""
        limits = [f"batches of other sizes than {spans(self.sizes)} rows, and the sizes around each kernel's own edges"]
        if self.threads < 2:
            limits.append("two threads: this machine, or NUMBA_NUM_THREADS, allows one")
        return limits

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"passed": self.passed, "problems": self.problems(), "limits": self.limits(), **asdict(self)}


def spans(numbers: list[int]) -> str:
    """Ascending whole numbers in words: 1-17, 31-33."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
