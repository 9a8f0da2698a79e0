"""Receipts: what a reply carries, so that it can be computed again and compared."""

from dataclasses import asdict
from typing import Any

from isobit.engine.lane import token_hash
from isobit.engine.origin import Origin
from isobit.engine.request import Request


def receipt(origin: Origin, request: Request, reply_tokens: int) -> dict[str, Any]:
    """The receipt of a reply of so many tokens to a request whose reply limit is named."""
    return {
        **asdict(origin),
        "prompt_hash": token_hash(request.tokens),
        "sampling": asdict(request.sampling),
        "max_tokens": request.max_tokens,
        "reply_tokens": reply_tokens,
    }
