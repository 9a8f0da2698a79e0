"""The floating-point environment that arithmetic is defined in: round to nearest, subnormals as they are.

A thread begins with the one of the thread that starts it, and loading a library that was built with -ffast-math makes
the loading thread flush subnormals. So threads of isobit's own begin with `set_default`, and what runs on a caller's
thread runs within `default`.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENVIRONMENT_BYTES = 256  # more than any system's fenv_t


def _function(name: str) -> Callable[[Any], int] | None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_void_p]
    return function


def _default_environment() -> Any:
    """What C calls FE_DFL_ENV: an address that means it, or that of an object."""
    try:
        return ctypes.byref(ctypes.c_char.in_dll(ctypes.CDLL(None), "_FE_DFL_ENV"))
    except (ValueError, OSError, TypeError):
        return ctypes.c_void_p(-1)


_get, _set = _function("fegetenv"), _function("fesetenv")
_default = _default_environment()


def set_default() -> None:
    """Give the calling thread the default environment for good."""
    if _set is not None:
        _set(_default)


@contextmanager
def default() -> Iterator[None]:
    """The default environment for a while; the calling thread gets its own back."""
    if _get is None or _set is None:
        yield
        return
    own = ctypes.create_string_buffer(ENVIRONMENT_BYTES)
    _get(own)
    _set(_default)
    try:
        yield
    finally:
        _set(own)
