"""Real text that every Python has: the source of its standard library."""

import importlib.util
from importlib.abc import InspectLoader

from isobit.errors import IsobitError

MODULES = ("bisect", "keyword", "textwrap", "heapq", "string", "shlex", "fnmatch", "argparse", "datetime", "typing")


def standard_library_text(characters: int) -> str:
    """The first `characters` characters of a fixed list of modules' source files, laid end to end."""
    text = ""
    for name in MODULES:
        text += f"# {name}.py\n{_source(name)}\n"
        if len(text) >= characters:
            return text[:characters]
    raise IsobitError(f"the standard library's sources hold {len(text):,} characters here: expected {characters:,}")


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    source = spec.loader.get_source(name) if spec and isinstance(spec.loader, InspectLoader) else None
    if source is None:
        raise IsobitError(f"this Python has no source file of its module {name!r}: use one that ships its sources")
    return source
