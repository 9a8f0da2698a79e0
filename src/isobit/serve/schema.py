"""The requests that the routes take, and what they become for the engine."""

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from isobit import settings
from isobit.engine.request import Request, Sampling
from isobit.serve.errors import ApiError, from_validation, short

if TYPE_CHECKING:
    from isobit.checkpoint.tokenizer import Tokenizer

MOST_TOKEN_ID = 2**31 - 1  # of any vocabulary

Neutral = dict[str, tuple[Any, ...]]
T = TypeVar("T", bound="Common")

# Fields that have no meaning here, whatever they hold.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
# Fields that isobit does not support, with the values that ask for nothing; null always asks for nothing.
NEUTRAL: Neutral = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
}
CHAT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_effort": (),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "moderation": (),
}
COMPLETION_NEUTRAL: Neutral = {**NEUTRAL, "best_of": (1,), "echo": (False,), "suffix": ("",)}


# Template variables that the server sets.
TEMPLATE_OWN = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and the rows at which its messages end."""

    tokens: tuple[int, ...]
    borders: tuple[int, ...] = ()


def _bounded(setting: settings.Setting) -> Any:
    return Field(ge=setting.minimum, le=setting.maximum, description=setting.help)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    limit, longest = settings.MAX_STOPS, settings.MAX_STOP_CHARACTERS
    fits = isinstance(stops, list) and len(stops) <= limit
    if not fits or not all(isinstance(stop, str) and 0 < len(stop) <= longest for stop in stops):
        raise ValueError(f"must be a string or a list of up to {limit} strings, of 1 to {longest} characters each")
    return tuple(stops)


def _content(value: Any, given: ValidationInfo) -> Any:
    """None where a message may do without: an assistant's, which may be tool calls alone."""
    if isinstance(value, str) or (value is None and given.data.get("role", "assistant") == "assistant"):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return value
    raise ValueError('must be a string or a list of {"type": "text"} parts')


def _arguments(value: Any) -> Any:
    if value is None:
        return "{}"
    if isinstance(value, str | dict):
        return value
    raise ValueError("must be a JSON object or its text")


def _prompt(value: Any) -> Any:
    """One text, or one list of token ids, also as the only item of a list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or any(isinstance(item, str | list) for item in value):
        raise ValueError("must be one text or one list of token ids (several prompts in one request are not supported)")
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MOST_TOKEN_ID:
            message = f"field 'prompt[{place}]': expected a token id, a whole number of 0 or more, got {short(item)}"
            raise ApiError(400, message, "prompt", "invalid_value")
    return tuple(value)


def _tool(value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function" or not isinstance(function.get("name"), str):
        raise ValueError('must be {"type": "function", "function": {"name": ...}}')
    return value


def _top_k(value: Any) -> Any:
    return 0 if type(value) is int and value == -1 else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(_Strict):
    """The fields of both routes. A field that is null counts as left out."""

    model: str | None = None
    max_tokens: Annotated[int | None, _bounded(settings.MAX_TOKENS)] = None
    temperature: Annotated[float, _bounded(settings.TEMPERATURE)] = settings.TEMPERATURE.default
    top_k: Annotated[int, BeforeValidator(_top_k), _bounded(settings.TOP_K)] = settings.TOP_K.default
    top_p: Annotated[float, _bounded(settings.TOP_P)] = settings.TOP_P.default
    min_p: Annotated[float, _bounded(settings.MIN_P)] = settings.MIN_P.default
    seed: Annotated[int | None, _bounded(settings.SEED)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    prefill: Literal["deep", "batched", "serial"] = settings.PREFILL.default
    segment_rows: Annotated[int | None, _bounded(settings.REQUEST_SEGMENT_ROWS)] = None
    priority: Literal["normal", "background"] = settings.PRIORITY.default
    draft: bool = settings.DRAFT.default
    reuse: bool | None = settings.REUSE.default

    @property
    def may_reuse(self) -> bool:
        """Whether kept states may serve; a request that says how to compute its prompt must compute it."""
        return not self.model_fields_set & {"prefill", "segment_rows"} if self.reuse is None else self.reuse

    @property
    def reply_limit(self) -> int | None:
        """The reply limit that the request names."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token reports; None for no logprobs."""
        raise NotImplementedError

    @property
    def route_limit(self) -> int | None:
        """The reply limit of requests that name none, on a server that names none; None = the context's."""
        return None

    def prompt_of(self, tokenizer: "Tokenizer") -> Prompt:
        """The prompt; RequestError or ApiError when it cannot be made."""
        raise NotImplementedError

    def for_engine(self, prompt: Prompt, stop_ids: frozenset[int], max_tokens: int) -> Request:
        """The request as the engine takes it."""
        return Request(
            tokens=prompt.tokens,
            max_tokens=max_tokens,
            sampling=self.sampling(),
            stop_tokens=frozenset() if self.ignore_eos else stop_ids,
            prefill=self.prefill,
            segment_rows=self.segment_rows,
            logprobs=self.alternatives,
            priority=self.priority,
            draft=self.draft,
            keep_rows=prompt.borders,
            reuse=self.may_reuse,
        )

    def sampling(self) -> Sampling:
        """How tokens are drawn; a request without a seed gets a random one that JavaScript's numbers hold exactly."""
        seed = secrets.randbits(53) if self.seed is None else self.seed % settings.SEED_LIMIT
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, seed)


class Function(_Strict):
    """A call that the model made before."""

    name: str
    arguments: Annotated[Any, BeforeValidator(_arguments)] = "{}"


class ToolCall(_Strict):
    """One tool call of an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: Function


class Message(_Strict):
    """One message of a chat, with what OpenAI's clients send back of an earlier reply."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, BeforeValidator(_content), Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as the tokenizer takes it."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = "" if self.content is None else self.content
        for field in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, field) is not None:
                message[field] = getattr(self, field)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        return message


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, _bounded(settings.MAX_TOKENS)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=settings.MAX_LOGPROBS)] = None
    tools: list[Annotated[Any, BeforeValidator(_tool)]] | None = None
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def reply_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_of(self, tokenizer: "Tokenizer") -> Prompt:
        own = TEMPLATE_OWN & self.chat_template_kwargs.keys()
        if own:
            field = f"chat_template_kwargs.{min(own)}"
            raise ApiError(400, f"field {field!r} cannot be set: the server sets it", field, "invalid_value")
        messages = [message.for_template() for message in self.messages]
        tools = self.tools if self.tool_choice == "auto" else None
        tokens, borders = tokenizer.chat_with_borders(messages, tools or None, **self.chat_template_kwargs)
        return Prompt(tuple(tokens), borders)


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompt)]
    logprobs: Annotated[int | None, Field(ge=0, le=settings.MAX_LOGPROBS)] = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def route_limit(self) -> int | None:
        return settings.COMPLETION_TOKENS

    def prompt_of(self, tokenizer: "Tokenizer") -> Prompt:
        tokens = tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        return Prompt(tuple(tokens))


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """The body of a chat request; ApiError 400 names the first field that is wrong."""
    request = _parse(ChatRequest, body, CHAT_NEUTRAL)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "field 'top_logprobs' needs 'logprobs': true beside it", "top_logprobs", "invalid_value")
    return request


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """The body of a completions request; ApiError 400 names the first field that is wrong."""
    return _parse(CompletionRequest, body, COMPLETION_NEUTRAL)


def _parse(kind: type[T], body: dict[str, Any], neutral: Neutral) -> T:
    asked = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name in neutral.keys() & asked.keys():
        _check_neutral(name, asked.pop(name), neutral[name])
    try:
        request = kind.model_validate(asked)
    except ValidationError as error:
        raise from_validation(error) from None
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "field 'stream_options' needs 'stream': true beside it", "stream_options", "invalid_value")
    return request


def _check_neutral(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in allowed):
        return
    expected = " or ".join(json.dumps(item) for item in allowed) + " or left out" if allowed else "left out"
    raise ApiError(400, f"field {name!r} is not supported: it must be {expected}", name, "unsupported_value")
