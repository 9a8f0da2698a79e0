"""SIGTERM ends a command, whatever swallows the exception at first, and leaves it time to tidy up."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from isobit.cli import app


@pytest.fixture(autouse=True)
def restored_alarm():
    """The runner's own alarm, if it has one, is not for these tests."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def ended(command: Callable[[], None]) -> int | str | None:
    """The exit code that a command ends with."""
    with pytest.raises(SystemExit) as left, app._ended_by_sigterm():
        command()
    return left.value.code


def test_a_termination_that_is_swallowed_is_tried_again():
    swallowed = []

    def command() -> None:
        for _ in range(3):
            with contextlib.suppress(SystemExit):
                terminate()
            swallowed.append(1)
        time.sleep(5)
        pytest.fail("the termination was forgotten")

    assert ended(command) == 128 + signal.SIGTERM
    assert len(swallowed) == 3


def test_tidying_up_is_not_disturbed():
    tidy = []

    def command() -> None:
        try:
            terminate()
        finally:
            try:
                time.sleep(2 * app.INSIST_SECONDS)
                raise OSError("busy")
            except OSError:
                time.sleep(2 * app.INSIST_SECONDS)
            tidy.append("done")

    assert ended(command) == 128 + signal.SIGTERM
    assert tidy == ["done"]
    assert signal.setitimer(signal.ITIMER_REAL, 0)[0] == 0


def test_an_alarm_of_others_is_left_alone():
    calls = []
    signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with app._ended_by_sigterm():
        time.sleep(0.2)
    assert calls == [1]


def test_a_fault_of_the_processor_is_told():
    command = "import os; from isobit.cli.app import run; run(['--version']); os.kill(os.getpid(), int(os.sys.argv[1]))"
    arguments = [sys.executable, "-c", command, str(int(signal.SIGBUS))]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
