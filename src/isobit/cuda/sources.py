"""The kernel sources: finding one, what it includes, and a digest that changes with any of it."""

import hashlib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # includes and kernel names are relative to the package
INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
ALIASES = {"device.cuh": "cuda/device.cuh"}


@cache
def text(name: str) -> str:
    """The source text of a file, by its path below the package."""
    return (ROOT / ALIASES.get(name, name)).read_text(encoding="utf-8")


@cache
def included(name: str) -> tuple[str, ...]:
    """Every file that a source includes, directly or not, itself first; paths below the package."""
    found: list[str] = []
    waiting = [ALIASES.get(name, name)]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        for target in INCLUDE.findall(text(file)):
            near = (Path(file).parent / target).as_posix()
            waiting.append(near if (ROOT / near).is_file() else ALIASES.get(target, target))
    return tuple(found)


def digest(name: str, *facts: object) -> str:
    """Hexadecimal digest of a source, all that it includes, and whatever else its binary depends on."""
    state = hashlib.sha256(repr(facts).encode())
    for file in sorted(included(name)):
        state.update(file.encode() + b"\0" + text(file).encode() + b"\0")
    return state.hexdigest()[:32]
