"""What replies look like on the wire: OpenAI's objects of the two routes, whole and in chunks."""

import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from isobit.engine.origin import Origin
from isobit.engine.request import Request, TokenEvent
from isobit.serve.receipts import receipt_of
from isobit.serve.replies import Delta, End


class TokenBytes(Protocol):
    """The part of the tokenizer that names tokens."""

    def token_bytes(self, token: int) -> bytes: ...


@dataclass
class Shape:
    """One reply's objects.

    request: with the reply limit that counts; context: the engine's rows; tokenizer: names the tokens of logprobs.
    """

    model: str
    request: Request
    origin: Origin
    context: int
    with_token_ids: bool
    tokenizer: TokenBytes
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token reports; None leaves logprobs out."""
        return self.request.logprobs

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first text, if the route has one."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """More text."""
        raise NotImplementedError

    def last_chunk(self, end: End) -> dict[str, Any]:
        """The chunk that says why the reply ended."""
        raise NotImplementedError

    def choice(self, deltas: list[Delta], end: End) -> dict[str, Any]:
        """The whole reply's only choice."""
        raise NotImplementedError

    def usage_chunk(self, end: End) -> dict[str, Any]:
        """The chunk after the last, for who asked for usage."""
        return {**self._head(self.chunk_object, []), "usage": self.usage(end), "isobit": self.isobit(end)}

    def whole(self, deltas: list[Delta], end: End) -> dict[str, Any]:
        """The reply in one object."""
        head = self._head(self.whole_object, [self.choice(deltas, end)])
        return {**head, "usage": self.usage(end), "isobit": self.isobit(end)}

    def usage(self, end: End) -> dict[str, Any]:
        """Token counts."""
        prompt_tokens = len(self.request.tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(end.tokens),
            "total_tokens": prompt_tokens + len(end.tokens),
            "prompt_tokens_details": {"cached_tokens": end.finished.rows_reused},
        }

    def isobit(self, end: End) -> dict[str, Any]:
        """How the reply was computed, and what to compare it by."""
        finished = end.finished
        described = {
            "token_hash": end.token_hash,
            "logits_hash": finished.logits_hash,
            "seed": self.request.sampling.seed,
            "prefill": finished.prefill,
            "segment_rows": finished.segment_rows,
            "rows_computed": finished.rows_computed,
            "rows_reused": finished.rows_reused,
            "drafted": finished.drafted,
            "accepted": finished.accepted,
            "timings": asdict(finished.timings),
            "notice": finished.notice,
            "receipt": receipt_of(self.origin, self.request, len(end.tokens), self.context).as_dict(),
        }
        return {**described, "tokens": list(end.tokens)} if self.with_token_ids else described

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _one_choice(self, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        return self._head(self.chunk_object, [choice])


class ChatShape(Shape):
    """POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        return self._one_choice({"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._one_choice({"delta": {"content": delta.text}}, self._logprobs([delta]), None)

    def last_chunk(self, end: End) -> dict[str, Any]:
        return {**self._one_choice({"delta": {}}, None, end.reason), "isobit": self.isobit(end)}

    def choice(self, deltas: list[Delta], end: End) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        return {"index": 0, "message": message, "logprobs": self._logprobs(deltas), "finish_reason": end.reason}

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        return {"content": [self._entry(event) for delta in deltas for event in delta.tokens], "refusal": None}

    def _entry(self, event: TokenEvent) -> dict[str, Any]:
        alternatives = [self._named(token, logprob) for token, logprob in event.alternatives]
        return {**self._named(event.token, event.logprob), "top_logprobs": alternatives}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": token_name(token, data), "logprob": logprob, "bytes": list(data)}


class CompletionShape(Shape):
    """POST /v1/completions."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._one_choice({"text": delta.text}, self._logprobs([delta]), None)

    def last_chunk(self, end: End) -> dict[str, Any]:
        return {**self._one_choice({"text": ""}, None, end.reason), "isobit": self.isobit(end)}

    def choice(self, deltas: list[Delta], end: End) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        return {"index": 0, "text": text, "logprobs": self._logprobs(deltas), "finish_reason": end.reason}

    def _logprobs(self, deltas: list[Delta]) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        events = [event for delta in deltas for event in delta.tokens]
        return {
            "tokens": [self._name(event.token) for event in events],
            "token_logprobs": [event.logprob for event in events],
            "top_logprobs": [{self._name(token): logprob for token, logprob in event.alternatives} for event in events],
            "text_offset": [offset for delta in deltas for offset in delta.offsets],
        }

    def _name(self, token: int) -> str:
        return token_name(token, self.tokenizer.token_bytes(token))


def token_name(token: int, data: bytes) -> str:
    r"""A token as a string: its text, or bytes:\x.. when it is part of a character, or token_id:N when it has none."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text or f"token_id:{token}"
