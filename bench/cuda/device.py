"""Everything that is checked and measured on a GPU, in one call: `python bench/cuda/device.py --out FOLDER`.

First the checks run beside each other, as far as memory allows, then what is timed runs alone. Every step has a time
limit, and the whole has one (--seconds), after which what has been found stands. FOLDER gets a log of each step
(steps/NAME.log), all of them in one file (all.log) and a line for each step (summary.txt), which is printed too. Steps
are chosen by name, by pattern (contract-*) or by the group's name: checks, timed. --list names them. Checkpoints that
steps need are written below --work first. Exit code 1 if a step failed, 2 without a GPU.
"""

import argparse
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable,)
CLI = (*PYTHON, "-m", "isobit")
PYTEST = (*PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
MANY_ROWS_WORDS = 6  # pairs of words, which are more than 64 tokens
CHECKING = {"racecheck": {"ISOBIT_RACECHECK": "1"}}  # variables of a tool's own build of the kernels
# Of the scripts here: those that are no step of their name, that read a checkpoint, and what shortens some.
NOT_BY_THEMSELVES = ("device", "timing", "model", "promise")
ON_A_CHECKPOINT = ("load", "short_memory")
REAL_GIB, WHOLE_GIB = 14, 75  # of GPU memory, of the model at real widths with LAYERS layers and with all
SHORTENED = {"tiers": ("--layers", "8")}
MARKS_OF_GPU_TESTS = ("emulated_cuda", "real_gpu", "ISOBIT_TEST_GPU")
HEAVY_OPS = ("linear", "experts", "sparse_attention", "attention_read", "delta_rule")
CONTRACT_LIMITS = {"quick": (170, 2), "normal": (500, 3), "full": (580, 5)}  # seconds, GiB of GPU memory
LAYERS = 8  # of the checkpoints of real widths
EXPERT_GIB = 3 * 2560 * 640 * 4 / 2**30  # of float32 weights of one expert
OTHERS_GIB = 24  # of the other float32 weights at real widths, isobit's own and what is at work
USABLE = 0.94  # of the GPU's memory
LONGEST_LINE = 140
LONGEST_LOG = 200_000  # characters of a step in all.log


@dataclass(frozen=True)
class Step:
    """One command. seconds: its limit. alone: it is timed. needs: names of steps that write what it reads.

    gpu_gib: the most GPU memory that it takes. waits: it loads at once, but measures when the file exists that
    --after names. makes: what it writes; it is not run again where that is there. environment: variables beside those
    of this process.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    alone: bool = False
    needs: tuple[str, ...] = ()
    gpu_gib: float = 2.0
    waits: bool = False
    makes: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return "timed" if self.alone else "checks"

    @property
    def script(self) -> Path | None:
        """The file that it runs, if it is one of the repository."""
        return next((ROOT / part for part in self.command if part.endswith(".py")), None)


def all_steps(work: Path, contract: str, experts: int, thorough: bool) -> list[Step]:
    """In the order in which they begin. contract: quick, normal or full. experts: of the fidelity checkpoint."""
    promise = (*PYTHON, "bench/cuda/promise.py", "--layers", str(LAYERS), "--tokens", "3001", "6144")
    exact = (*CLI, "exact", str(work / "test"), "--minutes", "0", "--device", "cuda")
    return [
        *checkpoint_steps(work, experts),
        *fidelity_steps(work, experts),
        Step("promise", promise, 400, gpu_gib=REAL_GIB),
        *contract_steps(contract),
        Step("exact", exact, 240, needs=("synth-test",)),
        *sanitizer_steps(work),
        *test_steps(),
        *timed_steps(work, thorough),
    ]


def checkpoint_steps(work: Path, experts: int) -> Iterator[Step]:
    """real: for speed. narrow: for fidelity, with an indexer that has to choose within a short text."""
    full = ("--preset", "full", "--layers", str(LAYERS), "--no-mtp")
    chosen = ("--experts", str(experts), "--indexer-budget", "256", "--ngram-rows", "100000")
    for name, options in (("test", ("--preset", "test")), ("narrow", (*full, *chosen)), ("real", full)):
        folder = work / name
        yield Step(f"synth-{name}", (*CLI, "synth", str(folder), *options), 200, gpu_gib=0, makes=folder)


def fidelity_steps(work: Path, experts: int) -> Iterator[Step]:
    test, narrow = str(work / "test"), str(work / "narrow")
    most = LAYERS * experts * EXPERT_GIB + OTHERS_GIB
    yield Step("fidelity-small", (*CLI, "fidelity", test, "--device", "cuda"), 240, needs=("synth-test",))
    for name, command in (
        ("fidelity-real", (*CLI, "fidelity", narrow, "--device", "cuda", "--tokens", "700")),
        ("fidelity-peers", (*PYTHON, "bench/fidelity_peers.py", narrow, "--tokens", "700")),
    ):
        yield Step(name, command, 400, needs=("synth-narrow",), gpu_gib=most)


def contract_steps(extent: str) -> Iterator[Step]:
    """One an op, the longest first."""
    from isobit.ops.contract import registered

    chosen = () if extent == "normal" else (f"--{extent}",)
    for op in sorted(registered("cuda"), key=lambda op: op not in HEAVY_OPS):
        command = (*CLI, "contract", "--device", "cuda", *chosen, "--filter", op)
        seconds, gpu_gib = CONTRACT_LIMITS[extent]
        yield Step(f"contract-{op}", command, seconds, gpu_gib=gpu_gib)


def sanitizer_steps(work: Path) -> Iterator[Step]:
    """Each tool on a short reply, and racecheck on a prompt of many rows."""
    sizes = [(tool, tool, 8 if tool == "memcheck" else 2, 3) for tool in SANITIZERS]
    for name, tool, words, tokens in (*sizes, ("racecheck-prompt", "racecheck", MANY_ROWS_WORDS, 1)):
        checked = ("compute-sanitizer", "--report-api-errors", "no", "--tool", tool, "--error-exitcode", "9")
        prompt = " ".join(["hello world"] * words)
        reply = ("generate", str(work / "test"), prompt, "--max-tokens", str(tokens), "--device", "cuda")
        own_build = CHECKING.get(tool, {})
        yield Step(name, (*checked, *CLI, *reply), 300, needs=("synth-test",), environment=own_build)


def test_steps() -> Iterator[Step]:
    """The tests of CUDA code, each file by itself, on the GPU instead of the emulator."""
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        text = path.read_text(encoding="utf-8")
        if any(mark in text for mark in MARKS_OF_GPU_TESTS):
            name = f"tests-{path.parent.name}-{path.stem.removeprefix('test_')}"
            command = (*PYTEST, str(path.relative_to(ROOT)))
            yield Step(name, command, 240, environment={"ISOBIT_TEST_GPU": "1"})


def timed_steps(work: Path, thorough: bool) -> Iterator[Step]:
    quick = () if thorough else ("--quick",)
    model = (*PYTHON, "bench/cuda/model.py", "--layers", "48", "--profile", "--early", *quick)
    yield Step("model", model, 240, alone=True, gpu_gib=WHOLE_GIB, waits=True)
    real = str(work / "real")
    yield Step("peers", (*PYTHON, "bench/peers.py", real), 400, True, needs=("synth-real",), gpu_gib=REAL_GIB)
    for path in sorted((ROOT / "bench/cuda").glob("*.py")):
        if path.stem not in NOT_BY_THEMSELVES:
            shorter = SHORTENED.get(path.stem, quick if "--quick" in path.read_text(encoding="utf-8") else ())
            reads = (real,) if path.stem in ON_A_CHECKPOINT else ()
            command = (*PYTHON, str(path.relative_to(ROOT)), *reads, *(() if thorough else shorter))
            needs = ("synth-real",) if reads else ()
            limits = {"seconds": 400 if thorough else 120, "gpu_gib": gpu_gib_of(path.stem, thorough)}
            yield Step(path.stem, command, alone=True, needs=needs, **limits)


def gpu_gib_of(bench: str, thorough: bool) -> float:
    """The most GPU memory that a script of this folder takes."""
    if bench in SHORTENED and thorough:
        return WHOLE_GIB
    return REAL_GIB if bench in (*SHORTENED, *ON_A_CHECKPOINT) else Step.gpu_gib


def chosen_steps(steps: list[Step], only: list[str], skip: list[str]) -> list[Step]:
    """Those asked for and what they need. Raises ValueError for a name that matches none."""
    for pattern in (*only, *skip):
        if not any(matches(step, pattern) for step in steps):
            raise ValueError(f"{pattern} matches no step; --list names them")
    wanted = {step.name for step in steps if not only or any(matches(step, pattern) for pattern in only)}
    wanted -= {step.name for step in steps if any(matches(step, pattern) for pattern in skip)}
    if not only:
        needed = {name for step in steps if step.name in wanted for name in step.needs}
        wanted = {name for name in wanted if not name.startswith("synth-") or name in needed}
    wanted |= {name for step in steps if step.name in wanted for name in step.needs}
    return [step for step in steps if step.name in wanted]


def matches(step: Step, pattern: str) -> bool:
    return step.group == pattern or fnmatch.fnmatchcase(step.name, pattern)


class Running:
    """A step's process, in a group of its own, with its output in a file."""

    def __init__(self, step: Step, folder: Path, go: Path):
        self.step, self.go = step, go
        self.log_path = folder / f"{step.name}.log"
        self.log: IO[bytes] = self.log_path.open("wb")
        command = (*step.command, "--after", str(go)) if step.waits else step.command
        sources = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": sources, "PYTHONUNBUFFERED": "1", **step.environment}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    @property
    def over(self) -> bool:
        waiting = self.step.waits and not self.go.exists()
        return not waiting and time.monotonic() - self.began > self.step.seconds

    def release(self) -> None:
        """Let a waiting step measure; its limit counts from here."""
        self.go.touch()
        self.began = time.monotonic()

    def stop(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sent)
            except ProcessLookupError:
                break
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                continue

    def outcome(self, verdict: str = "") -> "Outcome":
        self.log.close()
        code = self.process.poll()
        verdict = verdict or ("passed" if code == 0 else f"FAILED {code}")
        return Outcome(self.step.name, verdict, time.monotonic() - self.began, last_line(self.log_path))


@dataclass(frozen=True)
class Outcome:
    name: str
    verdict: str
    seconds: float = 0.0
    said: str = ""

    @property
    def good(self) -> bool:
        return self.verdict == "passed"

    def __str__(self) -> str:
        return f"{self.name:28} {self.verdict:14} {self.seconds:6.0f} s  {self.said}"


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LONGEST_LINE] if lines else ""


class Session:
    """Runs steps within a time limit and the GPU's memory, and keeps what they say."""

    def __init__(self, folder: Path, gpu_gib: float, seconds: float, most: int):
        self.folder, self.gpu_gib, self.most = folder, gpu_gib, most
        self.deadline = time.monotonic() + seconds
        self.logs = folder / "steps"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.gates = Path(tempfile.mkdtemp(prefix="isobit-device-"))
        self.running: list[Running] = []
        self.outcomes: dict[str, Outcome] = {}

    def run(self, steps: list[Step]) -> None:
        """The checks beside each other, then what is timed, one after the other."""
        checks, timed = ([step for step in steps if step.alone is alone] for alone in (False, True))
        waiting = [step for step in timed if step.waits]
        try:
            while (checks or any(not one.step.waits for one in self.running)) and not self._late():
                self._start_what_can(checks)
                if not checks:
                    self._start_what_can(waiting)
                self._collect()
                time.sleep(0.1)
            for step in timed:
                self._run_alone(step)
        finally:
            for one in list(self.running):
                self._end(one, "CUT OFF")
            for step in steps:
                if step.name not in self.outcomes:
                    self._note(Outcome(step.name, "not started"))
            shutil.rmtree(self.gates, ignore_errors=True)
            self._summarise()

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _start_what_can(self, pending: list[Step]) -> None:
        """In order; a step that is ready but finds no room holds back those behind it."""
        for step in list(pending):
            settled = self._settled(step)
            if settled:
                pending.remove(step)
                self._note(settled)
            elif all(name in self.outcomes for name in step.needs):
                taken = sum(one.step.gpu_gib for one in self.running)
                if len(self.running) >= self.most or (self.running and taken + step.gpu_gib > self.gpu_gib):
                    return
                pending.remove(step)
                self._start(step)

    def _settled(self, step: Step) -> Outcome | None:
        """The outcome of a step that need not run, or never can."""
        if step.makes and step.makes.exists():
            return Outcome(step.name, "passed", said=f"{step.makes} is there")
        if step.script and not step.script.exists():
            return Outcome(step.name, "no such script")
        if step.gpu_gib > self.gpu_gib:
            return Outcome(step.name, "no room", said=f"it takes {step.gpu_gib:.0f} of {self.gpu_gib:.0f} GiB")
        lacking = [name for name in step.needs if name in self.outcomes and not self.outcomes[name].good]
        return Outcome(step.name, f"no {lacking[0]}") if lacking else None

    def _start(self, step: Step) -> Running | None:
        try:
            one = Running(step, self.logs, self.gates / step.name)
        except OSError as error:
            self._note(Outcome(step.name, "FAILED", said=f"{step.command[0]}: {error.strerror}"))
            return None
        self.running.append(one)
        return one

    def _collect(self) -> None:
        for one in list(self.running):
            if one.process.poll() is not None:
                self._end(one)
            elif one.over:
                self._end(one, "OUT OF TIME")

    def _run_alone(self, step: Step) -> None:
        if step.name in self.outcomes or self._late():
            return
        one = next((one for one in self.running if one.step is step), None)
        if one is None:
            settled = self._settled(step)
            if settled:
                self._note(settled)
                return
            one = self._start(step)
        if one is not None:
            one.release()
        while one in self.running and not self._late():
            self._collect()
            time.sleep(0.05)

    def _end(self, one: Running, verdict: str = "") -> None:
        if one.process.poll() is None:
            one.stop()
        self.running.remove(one)
        self._note(one.outcome(verdict))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        print(outcome, flush=True)

    def _summarise(self) -> None:
        self.folder.joinpath("summary.txt").write_text("".join(f"{one}\n" for one in self.outcomes.values()))
        with self.folder.joinpath("all.log").open("w") as joined:
            for name, outcome in self.outcomes.items():
                joined.write(f"##### {outcome}\n")
                log = self.logs / f"{name}.log"
                if log.exists():
                    joined.write(log.read_text(errors="replace")[-LONGEST_LOG:] + "\n")


def gpu_memory() -> float | None:
    """GiB of the first GPU that steps may take together, or None without a GPU."""
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return USABLE * float(told.splitlines()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def failed(outcomes: Iterable[Outcome]) -> list[str]:
    return [one.name for one in outcomes if not one.good]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device-out"), help="where logs go (default device-out)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "isobit-device-work")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="these steps and what they need")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STEP", help="not these")
    parser.add_argument("--seconds", type=float, default=3600, help="the limit of the whole (default 3600)")
    parser.add_argument("--contract", choices=("quick", "normal", "full"), default="quick")
    parser.add_argument("--experts", type=int, default=512, help="of the fidelity checkpoint's layers (default 512)")
    parser.add_argument("--thorough", action="store_true", help="all shapes of the benches, not only the main ones")
    parser.add_argument("--most", type=int, default=(os.cpu_count() or 1) + 8, help="processes beside each other")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    sys.path.insert(0, str(ROOT / "src"))
    steps = all_steps(options.work, options.contract, options.experts, options.thorough)
    try:
        steps = chosen_steps(steps, options.only, options.skip)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{step.name:28} {step.group:7} {' '.join(step.command[1:])}" for step in steps))
        return 0
    gpu_gib = gpu_memory()
    if gpu_gib is None:
        print("no NVIDIA GPU: nvidia-smi names none; this runs on a machine that has one", file=sys.stderr)
        return 2
    options.work.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    session = Session(options.out, gpu_gib, options.seconds, options.most)
    session.run(steps)
    bad = failed(session.outcomes.values())
    print(f"not passed: {', '.join(bad)}" if bad else "all steps passed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
