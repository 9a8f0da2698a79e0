"""The command line: one thin module a command."""

import signal


def main() -> None:
    """Run the `isobit` command; ends the process with its exit code."""
    code = 130
    try:
        from isobit.cli.app import run

        code = run()
    except KeyboardInterrupt:
        # A second Ctrl-C, while the first one was being dealt with.
        pass
    # What Python does at its end is no place for an exception either.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(code)
