"""Computing recorded replies again, to compare them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from isobit.engine.lane import token_hash
from isobit.engine.origin import Origin
from isobit.engine.request import Event, Finished, PrefillMode, Request, TokenEvent
from isobit.errors import IsobitError
from isobit.serve.errors import ApiError, from_validation
from isobit.serve.receipts import Receipt
from isobit.serve.schema import Common, parse_chat, parse_completion
from isobit.serve.text import ReplyText

if TYPE_CHECKING:
    from isobit.checkpoint.tokenizer import Tokenizer

SHOWN = 64
STREAMING = ("stream", "stream_options")
EXPECTED = 'expected an output of `isobit generate --json`, or {"request": ..., "response": ...} of a server'
ORIGIN_NAMES = {"checkpoint": "checkpoint", "arithmetic": "arithmetic version", "device": "device kind"}


@dataclass(frozen=True)
class Recorded:
    """A reply from a file, and the request that it answers.

    where: its place, for people. tokens, text, finish_reason: None where the record does not hold them. folder: the
    checkpoint's, if it says so.
    """

    where: str
    request: dict[str, Any]
    receipt: Receipt
    token_hash: str
    logits_hash: str
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    finish_reason: str | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Reply:
    """A reply computed anew."""

    tokens: tuple[int, ...]
    logits_hash: str
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Difference:
    """The first thing in which a reply differs. what: in words; position: of the reply's token, or None."""

    what: str
    recorded: Any
    computed: Any
    position: int | None = None

    def __str__(self) -> str:
        recorded, computed = _from_first_difference(str(self.recorded), str(self.computed))
        return f"{self.what}: {recorded} in the record, {computed} computed"


@dataclass(frozen=True)
class Task:
    """A request that is ready to be computed again."""

    recorded: Recorded
    request: Request
    text: ReplyText

    @property
    def rows(self) -> int:
        """The context that it needs."""
        return len(self.request.tokens) + (self.request.max_tokens or 0)


def read_records(path: Path) -> list[Recorded]:
    """The replies of a file: a JSON object, a list of them, or one a line. IsobitError when it holds anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise IsobitError(f"{path} is not UTF-8 text (byte {error.start}): {EXPECTED}") from None
    records = [_record(value, where) for where, value in list(_values(text, path))]
    if not records:
        raise IsobitError(f"{path} is empty: {EXPECTED}")
    return records


def check_origin(records: Iterable[Recorded], here: Origin) -> None:
    """IsobitError that names both when a record comes from another checkpoint, arithmetic or device kind."""
    for record in records:
        for field, name in ORIGIN_NAMES.items():
            theirs, ours = getattr(record.receipt, field), getattr(here, field)
            if theirs != ours:
                raise IsobitError(
                    f"{record.where}: its {name} is {theirs}, but here it is {ours}: replies can only be compared with "
                    f"the same {name}"
                )


def task_of(record: Recorded, tokenizer: "Tokenizer", prefill: PrefillMode) -> Task:
    """The recorded request for the engine, without drafts or kept states. IsobitError when it is not the reply's."""
    parsed = _parsed(record)
    try:
        prompt = parsed.prompt_of(tokenizer)
    except (ApiError, IsobitError) as error:
        raise IsobitError(f"{record.where}: its request cannot be used: {error}") from None
    found = token_hash(prompt.tokens)
    if found != record.receipt.prompt_hash:
        raise IsobitError(
            f"{record.where}: its prompt has hash {record.receipt.prompt_hash}, but its request gives {found} here: "
            "the request, the tokenizer or the chat template is another"
        )
    if parsed.sampling() != record.receipt.sampling:
        raise IsobitError(f"{record.where}: its request and its receipt name different sampling: it is not its reply's")
    # A reply of more tokens than the record has already shows the difference.
    limit = min(record.receipt.max_tokens, record.receipt.reply_tokens + 1)
    request = dataclasses.replace(
        parsed.for_engine(prompt, tokenizer.stop_ids, max(limit, 1)),
        prefill=prefill,
        segment_rows=None,
        logprobs=None,
        priority="normal",
        draft=False,
        keep_rows=(),
        reuse=False,
    )
    return Task(record, request, ReplyText(tokenizer.detokenizer(), request.stop_tokens, parsed.stop))


def recompute(task: Task, follow: Callable[[Request], Iterator[Event]]) -> Reply:
    """Compute a reply as the server would. IsobitError when it cannot be computed. follow: gives a request's events."""
    tokens: list[int] = []
    pieces: list[str] = []
    logits_hash, reason = "", "stop"
    events = follow(task.request)
    for event in events:
        if isinstance(event, TokenEvent) and not task.text.stopped:
            tokens.append(event.token)
            pieces.append(task.text.push(event.token))
        elif isinstance(event, Finished):
            if event.error is not None:
                raise IsobitError(f"{task.recorded.where}: the reply could not be computed: {event.error}")
            logits_hash, reason = event.logits_hash, event.reason
    pieces.append(task.text.finish())
    if task.text.stopped:
        reason = "stop"
    return Reply(tuple(tokens), logits_hash, "".join(pieces), reason)


def difference(record: Recorded, reply: Reply) -> Difference | None:
    """The first thing in which a record differs from the reply computed anew; None when they are equal."""
    if record.tokens is not None and record.tokens != reply.tokens:
        position = _first_differing(record.tokens, reply.tokens)
        recorded, computed = _token_at(record.tokens, position), _token_at(reply.tokens, position)
        return Difference(f"reply token {position} differs", recorded, computed, position)
    sides = {
        "the number of tokens differs": (record.receipt.reply_tokens, len(reply.tokens)),
        "the token hash differs": (record.token_hash, token_hash(reply.tokens)),
        "the logits hash differs": (record.logits_hash, reply.logits_hash),
        "the text differs": (record.text, reply.text),
        "the finish reason differs": (record.finish_reason, reply.finish_reason),
    }
    differing = ((what, *pair) for what, pair in sides.items() if pair[0] is not None and pair[0] != pair[1])
    return next((Difference(*parts) for parts in differing), None)


def _values(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The JSON values of a file, each with its place."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path} line {number}", _json(line, f"{path} line {number}")
        return
    if isinstance(value, list):
        yield from ((f"{path} item {number}", item) for number, item in enumerate(value, 1))
    else:
        yield str(path), value


def _json(line: str, where: str) -> Any:
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise IsobitError(f"{where} is not valid JSON ({error}): {EXPECTED}") from None


@dataclass(frozen=True)
class _Hashes:
    """What the `isobit` object of a response must hold."""

    token_hash: str
    logits_hash: str
    receipt: Receipt
    tokens: tuple[int, ...] | None = None


_HASHES = TypeAdapter(_Hashes)


def _record(value: Any, where: str) -> Recorded:
    if not isinstance(value, dict) or not isinstance(value.get("request"), dict):
        raise IsobitError(f"{where} holds no request and reply: {EXPECTED}")
    response = value.get("response", value)
    held = response.get("isobit", response) if isinstance(response, dict) else None
    try:
        hashes = _HASHES.validate_python(held)
    except ValidationError as error:
        raise IsobitError(f"{where}: the reply is no receipt: {from_validation(error)}; {EXPECTED}") from None
    text, reason = _text_and_reason(response)
    folder = value.get("folder")
    return Recorded(
        where,
        value["request"],
        hashes.receipt,
        hashes.token_hash,
        hashes.logits_hash,
        hashes.tokens,
        text,
        reason,
        folder if isinstance(folder, str) else None,
    )


def _text_and_reason(response: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """A reply's text, None in the chunks of a stream, and why it ended."""
    choices = response.get("choices", [response])
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if response.get("object") == "text_completion" and "usage" not in response:
        text = None
    reason = choice.get("finish_reason")
    return text if isinstance(text, str) else None, reason if isinstance(reason, str) else None


def _parsed(record: Recorded) -> Common:
    """The request with the sampling of its receipt where it names none."""
    body = {name: value for name, value in record.request.items() if name not in STREAMING}
    for name, value in dataclasses.asdict(record.receipt.sampling).items():
        body[name] = value if body.get(name) is None else body[name]
    try:
        return parse_chat(body) if "messages" in body else parse_completion(body)
    except ApiError as error:
        raise IsobitError(f"{record.where}: its request cannot be used: {error}") from None


def _from_first_difference(one: str, other: str) -> tuple[str, str]:
    """Long texts from just before the first character in which they differ, SHOWN characters of each."""
    if max(len(one), len(other)) <= SHOWN:
        return one, other
    begin = max(0, _first_differing(one, other) - SHOWN // 2)
    return repr(one[begin : begin + SHOWN]), repr(other[begin : begin + SHOWN])


def _first_differing(one: Any, other: Any) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _token_at(tokens: tuple[int, ...], position: int) -> int | str:
    return tokens[position] if position < len(tokens) else "the end"
