"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_CLOSED = 499  # the status of an answer that nobody is left to read
SHOWN = 60  # characters of a request's names and values that a message repeats


# What pydantic's kinds of problems expect, in words; their context fills the braces.
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "{ge:,} or more",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "{le:,} or less",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
    "too_short": "at least {min_length}",
}


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
    problems = error.errors(include_url=False)
    first = problems[0]
    field = _path(first["loc"])[:SHOWN]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {field!r}: remove it", field, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"field {field!r} is missing", field, "missing_required_parameter")
    expected = _expected(first)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    where = f"field {field!r}: " if field else ""
    return ApiError(400, f"{where}{expected}, got {short(first['input'])}{more}", field or None, "invalid_value")


def _expected(problem: ErrorDetails) -> str:
    """What a field should have been."""
    if problem["type"] in EXPECTED:
        return "expected " + EXPECTED[problem["type"]].format(
            **{k: _whole(v) for k, v in problem.get("ctx", {}).items()}
        )
    said = problem["msg"].removeprefix("Value error, ")
    return said[:1].lower() + said[1:]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
