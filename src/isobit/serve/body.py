"""Reading a request body within a limit, and as JSON."""

import time
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from isobit.serve.errors import CLIENT_CLOSED, ApiError, short

DISCARD_SECONDS = 10.0
DISCARD_BYTES = 1 << 30


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes; ApiError 413, 400 or CLIENT_CLOSED otherwise."""
    try:
        body = await _read(request, limit)
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED, "the client closed the connection before its request was whole") from None
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 at byte {error.start}: send JSON in UTF-8") from None
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {short(value)}")
    return value


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isascii() and declared.isdigit() and int(declared) > limit
    if too_large and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    deadline = time.monotonic() + DISCARD_SECONDS
    async for chunk in request.stream():
        size += len(chunk)
        too_large = too_large or size > limit
        if not too_large:
            chunks.append(chunk)
            continue
        chunks.clear()
        # A client that is still sending does not read: take the rest, so that it gets to see the answer.
        if size > DISCARD_BYTES or time.monotonic() > deadline:
            break
    if too_large:
        raise _too_large(limit)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit / 2**20:g} MiB: send less, or start the server with a larger --body-mib"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
