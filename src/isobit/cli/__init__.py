"""The command line: one thin module a command."""


def main() -> None:
    """Run the `isobit` command; ends the process with its exit code."""
    from isobit.cli.app import run

    raise SystemExit(run())
