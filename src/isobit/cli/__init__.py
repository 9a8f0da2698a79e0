"""The command line."""


def main() -> None:
    raise SystemExit("isobit: no commands yet")
