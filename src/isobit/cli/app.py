"""The `isobit` command: what all commands share, and where they are put together."""

import faulthandler
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

import isobit
from isobit.cli import bench_lanes as _bench_lanes  # noqa: F401
from isobit.cli.bench import bench
from isobit.cli.common import printable
from isobit.cli.contract import contract
from isobit.cli.convert import convert
from isobit.cli.demo import demo
from isobit.cli.exact import exact
from isobit.cli.fidelity import fidelity
from isobit.cli.generate import generate
from isobit.cli.inspect import inspect
from isobit.cli.serve import serve
from isobit.cli.synth import synth
from isobit.cli.verify import verify
from isobit.errors import IsobitError

FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
INSIST_SECONDS = 0.3  # after which a termination that did not take effect is tried again

app = typer.Typer(
    name="isobit",
    help="Serve EXL3 checkpoints of Qwen3.8 Flash Next: a reply never depends on how it was computed.",
    epilog="Begin with: isobit demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(f"isobit {isobit.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(demo)
app.command()(generate)
app.command()(serve)
app.command()(verify)
app.command()(inspect)
app.command()(synth)
app.command()(convert)
app.command()(fidelity)
app.command()(contract)
app.command()(exact)
app.add_typer(bench)


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit code: 2 after one line on stderr when the user has to mend something."""
    _mend_streams()
    _print_warnings()
    _print_faults()
    try:
        with _ended_by_sigterm():
            code = app(arguments, prog_name="isobit", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except SystemExit as leaving:
        # Typer ends a command whose reader has left as one that failed.
        if isinstance(leaving.__context__, BrokenPipeError):
            return BROKEN_PIPE
        raise
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except IsobitError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except MemoryError as error:
        return _fail(f"memory ran out ({error}): close other programs, or lower --context or --memory-gib")
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _fail(_usage(error))


def _mend_streams() -> None:
    """Let no stream that is closed, or cannot spell a character, end a command with a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _print_faults() -> None:
    """Let no signal of the processor, such as that of a file cut off while it is read, end a command without a word."""
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError):
            faulthandler.enable()


class WarningPrinter(logging.Handler):
    """Prints what isobit logs as the CLI's other messages: on whatever standard error then is."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            print(f"isobit: {printable(self.format(record))}", file=sys.stderr, flush=True)


def _print_warnings() -> None:
    log = logging.getLogger(isobit.__name__)
    if not any(isinstance(handler, WarningPrinter) for handler in log.handlers):
        log.addHandler(WarningPrinter(logging.WARNING))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Leave by an exception on SIGTERM, so that nothing half-written and no server process is left behind."""
    leaving = SystemExit(128 + signal.SIGTERM)

    def leave(*_: object) -> None:
        # Where C code calls Python, an exception may be swallowed; where it is on its way, tidying up goes on.
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, INSIST_SECONDS)
        if not _handling(leaving):
            raise leaving

    before, alarm = signal.signal(signal.SIGTERM, leave), signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if signal.getsignal(signal.SIGALRM) is leave:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)


def _handling(error: BaseException) -> bool:
    """Whether this thread is about to leave by `error`: in what tidies up on the way."""
    handled = sys.exc_info()[1]
    while handled is not None and handled is not error:
        handled = handled.__context__
    return handled is error


def _fail(message: str) -> int:
    print(f"isobit: {printable(' '.join(message.split()))}", file=sys.stderr)
    return FAILED


def _usage(error: Exception) -> str:
    """A usage error of Typer in one line; its class has no public name in all versions."""
    message = _wrong_value(error) or error.format_message().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    return f"{message} (see {context.command_path} --help)" if context is not None else message


def _wrong_value(error: Exception) -> str | None:
    """What an option's value should have been, where Typer leaves it in the words of its validator."""
    parameter, cause = getattr(error, "param", None), error.__cause__ or error.__context__
    problems = getattr(cause, "errors", None)
    if parameter is None or problems is None:
        return None
    problem = problems()[0]
    bounds = problem.get("ctx", {})
    expected = {
        "int_parsing": "a whole number",
        "int_from_float": "a whole number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "greater_than_equal": f"{bounds.get('ge', 0):g} or more",
        "less_than_equal": f"{bounds.get('le', 0):g} or less",
    }.get(problem["type"])
    if expected is None:
        return None
    name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.human_readable_name
    return f"{name} is {problem['input']!r}: expected {expected}"


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
