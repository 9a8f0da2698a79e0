"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_CLOSED = 499  # the status of an answer that nobody is left to read
SHOWN = 60  # characters of a request's names and values that a message repeats


class ApiError(Exception):
    """An answer other than a reply. status: the HTTP status; param: the request field at fault, or None."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = INVALID if self.status < 500 else SERVER
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def from_validation(error: ValidationError) -> ApiError:
    """A 400 that names the first field at fault, in one line."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    field = _path(first["loc"])[:SHOWN]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {field!r}: remove it", field, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"field {field!r} is missing", field, "missing_required_parameter")
    expected = first["msg"].removeprefix("Value error, ")
    expected = expected[:1].lower() + expected[1:]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = f"field {field!r}: " if field else ""
    return ApiError(400, f"{where}{expected}, got {short(first['input'])}{more}", field or None, "invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def short(value: Any) -> str:
    """A value of a request as a message repeats it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
