"""What `--profile` prints: time per op, of prompt rounds and of decode rounds apart."""

from typing import TYPE_CHECKING, Any

from isobit.errors import counted

if TYPE_CHECKING:
    from isobit.engine.engine import Engine
    from isobit.ops.profile import Phase

BETWEEN = "between ops"
CAPTION = (
    "forwards ran step by step to be timed; without --profile those of few rows are replayed, in less time between ops"
)


def start_over(engine: "Engine") -> None:
    """Count nothing of what was computed so far, such as the first calls, which have kernels compiled."""
    from isobit.engine.profile import ProfiledRounds

    if isinstance(engine.rounds, ProfiledRounds):
        engine.rounds.profile.start_over()


def profile_of(engine: "Engine") -> list[dict[str, Any]] | None:
    """The profile of a closed engine as JSON, times in milliseconds; None if it was not profiled."""
    from isobit.engine.profile import ProfiledRounds

    if not isinstance(engine.rounds, ProfiledRounds):
        return None
    return [_described(name, phase) for name, phase in engine.rounds.profile.phases().items()]


def print_profile(profile: list[dict[str, Any]] | None, to_stderr: bool = False) -> None:
    """A table a phase, the costliest op first; nothing for None."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, stderr=to_stderr)
    for phase in profile or ():
        total, rounds = phase["milliseconds"], phase["rounds"]
        counts = f"{counted(rounds, 'round')}, {counted(phase['rows'], 'row')}"
        console.print(f"{phase['phase']}: {counts}, {total:,.1f} ms, {total / rounds:,.2f} a round", soft_wrap=True)
        table = Table()
        table.add_column("op")
        for column in ("calls", "ms", "ms a round", "share"):
            table.add_column(column, justify="right")
        for op in phase["ops"]:
            ms = op["milliseconds"]
            calls = f"{op['calls']:,}" if op["calls"] else ""
            table.add_row(op["op"], calls, f"{ms:,.2f}", f"{ms / rounds:,.3f}", f"{100 * op['share']:.1f}%")
        console.print(table)
    if profile:
        console.print(CAPTION, soft_wrap=True)


def _described(name: str, phase: "Phase") -> dict[str, Any]:
    """A phase as JSON: its ops, and what passed between them."""
    spent = {op: (spent.calls, spent.seconds) for op, spent in phase.ops.items()}
    spent[BETWEEN] = 0, max(0.0, phase.seconds - sum(seconds for _, seconds in spent.values()))
    return {
        "phase": name,
        "rounds": phase.rounds,
        "rows": phase.rows,
        "milliseconds": 1e3 * phase.seconds,
        "ops": [
            {"op": op, "calls": calls, "milliseconds": 1e3 * seconds, "share": seconds / max(phase.seconds, 1e-12)}
            for op, (calls, seconds) in sorted(spent.items(), key=lambda item: -item[1][1])
        ],
    }
