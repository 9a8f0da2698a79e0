"""Text to token ids and back, as the checkpoint's own tokenizer.json and chat template say."""

import codecs
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isobit.checkpoint.config import load_config, load_stop_tokens
from isobit.errors import CheckpointError, RequestError

Message = Mapping[str, Any]

AGAIN = "download the checkpoint again"
FIRST_BORDERS, LAST_BORDERS = 8, 24
PROBE = ({"role": "user", "content": ""},)  # follows messages that a template refuses to end with, such as a system's
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # of tokenizer_config.json, known to templates


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell a byte: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


BYTE_OF_CHARACTER = _byte_alphabet()


class Tokenizer:
    """The tokenizer of a checkpoint folder: byte-level BPE with added tokens, as Qwen's.

    Reads tokenizer.json, and where they are there tokenizer_config.json and chat_template.jinja. Raises CheckpointError
    for what is missing, malformed, or no byte-level tokenizer.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._tokenizer = _load(self.folder / "tokenizer.json")
        self._settings = _optional_json(self.folder / "tokenizer_config.json")
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._templates = _templates(self.folder, self._settings)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that have no text, such as <|im_end|>."""
        return frozenset(token for token, added in self._added.items() if added.special)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply: those of generation_config.json (or config.json), and the tokenizer's own."""
        stop_tokens = load_stop_tokens(self.folder, load_config(self.folder))
        own = self._tokenizer.token_to_id(self._named_tokens.get("eos_token", ""))
        return stop_tokens if own is None else stop_tokens | {own}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Special tokens that are spelled out in it become these tokens, as in Hugging Face."""
        return self._encode(text, add_special_tokens=True).ids

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation in the checkpoint's chat template; arguments as in `render`."""
        text = self.render(messages, tools, add_generation_prompt, **kwargs)
        return self._encode(text, add_special_tokens=False).ids

    def chat_with_borders(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> tuple[list[int], tuple[int, ...]]:
        """The ids of a conversation that asks for a reply, and how many of them there are at the end of each message.

        Of a long conversation, those of the FIRST_BORDERS first and LAST_BORDERS last messages. Left out is the end of
        a message that is rendered in another way when no others follow, or that lies within a token.
        """
        text = self.render(messages, tools, **kwargs)
        encoding = self._encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        counts = range(0 if tools else 1, len(messages) + 1)
        wanted = sorted({*counts[:FIRST_BORDERS], *counts[-LAST_BORDERS:]})
        ends = [self._rendered_length(text, messages[:count], tools, kwargs) for count in wanted]
        borders = {_tokens_before(end, offsets) for end in ends}
        return encoding.ids, tuple(sorted(borders - {0, len(encoding.ids)}))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """A conversation as text. messages, tools: as in OpenAI's chat API; kwargs: further template variables.

        A message's content is a string, None, or a list of {"type": "text"} parts. Raises RequestError for other parts,
        and when the template refuses the conversation or there is none.
        """
        template = self._templates.get("tool_use" if tools else "default") or self._templates.get("default")
        if template is None:
            raise RequestError(
                "this checkpoint has no chat template; send a plain prompt (--raw, /v1/completions)",
                "messages",
            )
        variables = {
            **self._named_tokens,
            **kwargs,
            "messages": [_plain_message(message, place) for place, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except Exception as error:  # a template is a program: on odd messages it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template refuses these messages: {reason}", "messages") from None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character; b"" for special and unknown ids."""
        added = self._added.get(token)
        if added is not None:
            return b"" if added.special else added.content.encode()
        spelled = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if spelled is None:
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in spelled)
        except KeyError:
            return spelled.encode()

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def detokenizer(self) -> "Detokenizer":
        """A decoder for one reply, token by token."""
        return Detokenizer(self)

    def _rendered_length(
        self, text: str, first: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> int:
        """How many characters of a rendered conversation its first messages take; 0 if that cannot be told."""
        try:
            part = self.render(first, tools, add_generation_prompt=False, **kwargs)
            return len(part) if text.startswith(part) else 0
        except RequestError:
            pass
        try:
            part = self.render([*first, *PROBE], tools, add_generation_prompt=False, **kwargs)
        except RequestError:
            return 0
        differing = (place for place, (one, other) in enumerate(zip(text, part, strict=False)) if one != other)
        return next(differing, min(len(text), len(part)))

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"half of a surrogate pair at character {error.start}, which no UTF-8 text can hold"
            raise RequestError(f"the text has {problem}; remove it or send the whole character") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _named_tokens(self) -> dict[str, str]:
        named = {}
        for name in NAMED_TOKENS:
            token = self._settings.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                named[name] = content
        return named


class Detokenizer:
    """The text of one reply as its tokens arrive: whole characters only, together what `Tokenizer.decode` gives."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)


def _tokens_before(end: int, offsets: Sequence[tuple[int, int]]) -> int:
    """How many tokens lie before a character, 0 if one covers it; offsets: of each token's first and last character."""
    count = bisect_left(offsets, (end, end))
    return count if count and offsets[count - 1][1] <= end else 0


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise CheckpointError(f"{path.parent} holds no {path.name}; a checkpoint needs its tokenizer, {AGAIN}")
    if not path.is_file():
        raise CheckpointError(f"{path}: is no regular file; {AGAIN}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises plain Exception for whatever its parser finds
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: is no tokenizer that can be read ({reason}); {AGAIN}") from None
    # A tokenizer.json may carry the padding and truncation of whatever made it; a prompt gets neither.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    decoder = tokenizer.decoder
    if decoder is None or b'"ByteLevel"' not in decoder.__getstate__():
        raise CheckpointError(f"{path}: has no ByteLevel decoder; isobit reads byte-level tokenizers such as Qwen's")
    return tokenizer


def _optional_json(path: Path) -> dict[str, Any]:
    text = _optional_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); {AGAIN}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, expected a JSON object; {AGAIN}")
    return value


def _optional_text(path: Path) -> str | None:
    if not path.exists():
        return None
    if not path.is_file():
        raise CheckpointError(f"{path}: is no regular file; {AGAIN}")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); {AGAIN}") from None


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, jinja2.Template]:
    """The chat templates by name, compiled: "default", and "tool_use" if there is another one for tools."""
    path = folder / "chat_template.jinja"
    text = _optional_text(path)
    source: Any = text
    if text is None:
        path = folder / "tokenizer_config.json"
        source = settings.get("chat_template")
    if source is None:
        return {}
    if isinstance(source, str):
        named = {"default": source}
    else:
        try:
            named = {entry["name"]: entry["template"] for entry in source}
        except (TypeError, KeyError):
            expected = "a string or a list of objects with name and template"
            raise CheckpointError(f"{path}: chat_template has another form, expected {expected}; {AGAIN}") from None
    if any(isinstance(template, str) and not template.strip() for template in named.values()):
        raise CheckpointError(f"{path}: the chat template is empty; {AGAIN}")
    environment = _environment()
    try:
        return {name: environment.from_string(template) for name, template in named.items()}
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{path}: line {error.lineno} of the chat template: {error.message}; {AGAIN}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its content is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, this does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain_message(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: content as one string, the arguments of tool calls as objects."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        plain["content"] = "".join(
            _part_text(part, f"messages[{place}].content[{i}]") for i, part in enumerate(content)
        )
    elif content is not None and not isinstance(content, str):
        kind = type(content).__name__
        raise RequestError(
            f"messages[{place}].content is {kind}, expected a string or a list of text parts", "messages"
        )
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, f"messages[{place}].tool_calls") for call in plain["tool_calls"]]
    return plain


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(f"{where} is of type {kind!r}; isobit takes text parts only", "messages")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has no string in its field text", "messages")
    return part["text"]


def _plain_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} holds a call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where} holds arguments that are not valid JSON", "messages") from None
        if not isinstance(arguments, dict):
            raise RequestError(f"{where} holds arguments that are no JSON object", "messages")
    return {**call, "function": {**function, "arguments": arguments}}
