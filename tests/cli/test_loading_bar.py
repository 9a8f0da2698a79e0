"""The progress bar of loading: bytes and the time left on a terminal, nothing elsewhere."""

import io
from contextlib import redirect_stderr

import pytest

from isobit.cli.common import Bar, open_engine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def test_bytes_and_time_left_are_shown_on_a_terminal():
    with redirect_stderr(Terminal()) as shown, Bar("loading") as bar:
        bar(300_000_000, 1_200_000_000)
        bar._bar.refresh()
    assert "loading" in shown.getvalue()
    assert "0.3/1.2 GB" in shown.getvalue()
    assert "-:--:--" in shown.getvalue()


def test_an_engine_shows_it_while_it_loads(test_checkpoint):
    with redirect_stderr(Terminal()) as shown:
        open_engine(test_checkpoint, context=64).close()
    assert "loading" in shown.getvalue()


def test_nothing_is_shown_where_there_is_no_terminal(test_checkpoint):
    with redirect_stderr(io.StringIO()) as shown:
        open_engine(test_checkpoint, context=64).close()
    assert shown.getvalue() == ""
