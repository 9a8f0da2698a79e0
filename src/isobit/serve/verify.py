"""Computing recorded replies again, to compare them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from isobit.engine.lane import token_hash
from isobit.engine.origin import Origin
from isobit.engine.request import Event, Finished, PrefillMode, Request, TokenEvent
from isobit.errors import IsobitError, counted
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


class UnusableError(IsobitError):
    """A record cannot be compared here. where: its place; why: what is wrong with it."""

    def __init__(self, where: str, why: str):
        super().__init__(f"{where}{why}")
        self.where = where


class ForgedError(IsobitError):
    """A record's request is not the one that its receipt is of."""


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
class Verdict:
    """What became of one record: equal, different, or a problem in words.

    where, token_hash, reply_tokens: as recorded. comparable: False when the problem leaves nothing to be compared.
    """

    where: str
    token_hash: str | None
    reply_tokens: int
    difference: Difference | None = None
    problem: str | None = None
    comparable: bool = True

    @property
    def equal(self) -> bool:
        return self.difference is None and self.problem is None

    def __str__(self) -> str:
        if self.problem is not None:
            return self.problem
        tokens = counted(self.reply_tokens, "token")
        return f"{self.where}: {self.difference or f'equal ({tokens}, token hash {self.token_hash})'}"


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


def read_records(path: Path) -> list[Recorded | UnusableError]:
    """The replies of a file: a JSON object, a list of them, or one a line; for anything else, what is wrong with it.

    Raises IsobitError when the file is no text or holds nothing.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise IsobitError(f"{path} is not UTF-8 text (byte {error.start}): {EXPECTED}") from None
    records = [
        value if isinstance(value, UnusableError) else _record(value, where) for where, value in _values(text, path)
    ]
    if not records:
        raise IsobitError(f"{path} is empty: {EXPECTED}")
    return records


def prepare(
    record: Recorded | UnusableError, here: Origin, tokenizer: "Tokenizer", prefill: PrefillMode
) -> Task | Verdict:
    """What is to be computed for a record, or the verdict where that is known already. here: this machine's."""
    if isinstance(record, UnusableError):
        return Verdict(record.where, None, 0, problem=str(record), comparable=False)
    try:
        check_origin(record, here)
        return task_of(record, tokenizer, prefill)
    except (UnusableError, ForgedError) as error:
        return _problem(record, error)


def judge(task: Task, follow: Callable[[Request], Iterator[Event]]) -> Verdict:
    """Compute a reply again and compare it. follow: gives a request's events."""
    record = task.recorded
    try:
        found = difference(record, recompute(task, follow))
    except UnusableError as error:
        return _problem(record, error)
    return Verdict(record.where, record.token_hash, record.receipt.reply_tokens, found)


def _problem(record: Recorded, error: IsobitError) -> Verdict:
    comparable = not isinstance(error, UnusableError)
    return Verdict(record.where, record.token_hash, record.receipt.reply_tokens, None, str(error), comparable)


def check_origin(record: Recorded, here: Origin) -> None:
    """UnusableError that names both when a record comes from another checkpoint, arithmetic or device kind."""
    for field, name in ORIGIN_NAMES.items():
        theirs, ours = getattr(record.receipt, field), getattr(here, field)
        if theirs != ours:
            raise UnusableError(
                record.where,
                f": its {name} is {theirs}, but here it is {ours}: replies can only be compared with the same {name}",
            )


def task_of(record: Recorded, tokenizer: "Tokenizer", prefill: PrefillMode) -> Task:
    """The recorded request for the engine, without drafts or kept states.

    Raises UnusableError when it is no request, ForgedError when it is not the one that the receipt is of.
    """
    parsed = _parsed(record)
    try:
        prompt = parsed.prompt_of(tokenizer)
    except (ApiError, IsobitError) as error:
        raise UnusableError(record.where, f": its request cannot be used: {error}") from None
    _check_receipt(record, parsed, len(prompt.tokens), token_hash(prompt.tokens))
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


def _check_receipt(record: Recorded, parsed: Common, prompt_tokens: int, prompt_hash: str) -> None:
    """ForgedError when the request differs from its receipt in anything that a receipt holds."""
    receipt = record.receipt
    if prompt_hash != receipt.prompt_hash:
        raise ForgedError(
            f"{record.where}: its prompt has hash {receipt.prompt_hash}, but its request gives {prompt_hash} here: "
            "the request, the tokenizer or the chat template is another"
        )
    if parsed.sampling() != receipt.sampling:
        raise ForgedError(f"{record.where}: its request and its receipt name different sampling: it is not its reply's")
    asked, limit = parsed.reply_limit, receipt.max_tokens
    # A receipt without a context may come of one that was shorter than what the request asked for.
    room = limit if receipt.context is None else max(1, receipt.context - prompt_tokens)
    if asked is not None and min(asked, room) != limit:
        raise ForgedError(
            f"{record.where}: its request asks for at most {asked} tokens, but its receipt is of at most {limit}: "
            "it is not its reply's"
        )


def recompute(task: Task, follow: Callable[[Request], Iterator[Event]]) -> Reply:
    """Compute a reply as the server would. UnusableError when it cannot be. follow: gives a request's events."""
    tokens: list[int] = []
    pieces: list[str] = []
    logits_hash, reason = "", "stop"
    try:
        for event in follow(task.request):
            if isinstance(event, TokenEvent) and not task.text.stopped:
                tokens.append(event.token)
                pieces.append(task.text.push(event.token))
            elif isinstance(event, Finished):
                if event.error is not None:
                    raise IsobitError(event.error)
                logits_hash, reason = event.logits_hash, event.reason
    except IsobitError as error:
        raise UnusableError(task.recorded.where, f": the reply could not be computed: {error}") from None
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
        return UnusableError(where, f" is not valid JSON ({error}): {EXPECTED}")


@dataclass(frozen=True)
class _Hashes:
    """What the `isobit` object of a response must hold."""

    token_hash: str
    logits_hash: str
    receipt: Receipt
    tokens: tuple[int, ...] | None = None


_HASHES = TypeAdapter(_Hashes)


def _record(value: Any, where: str) -> Recorded | UnusableError:
    if not isinstance(value, dict) or not isinstance(value.get("request"), dict):
        return UnusableError(where, f" holds no request and reply: {EXPECTED}")
    response = value.get("response", value)
    held = response.get("isobit", response) if isinstance(response, dict) else None
    try:
        hashes = _HASHES.validate_python(held)
    except ValidationError as error:
        return UnusableError(where, f": the reply is no receipt: {from_validation(error)}; {EXPECTED}")
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
        raise UnusableError(record.where, f": its request cannot be used: {error}") from None


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
