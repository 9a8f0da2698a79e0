"""Processor time of each call of an op, for the measurements of whole forwards beside it."""

import time
from collections.abc import Callable
from typing import Any

Calls = list[tuple[str, float]]


def timed(name: str, function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    """The function, with its name and processor time (seconds) noted in `calls`."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        begin = time.thread_time()
        result = function(*arguments, **keywords)
        calls.append((name, time.thread_time() - begin))
        return result

    return call
