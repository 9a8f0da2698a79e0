"""A request as the engine sees it, and the events that answer it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

PrefillMode = Literal["deep", "batched", "serial"]
Priority = Literal["normal", "background"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 and min_p 0 filter nothing; seed: 64 bits."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One reply to compute.

    tokens: the prompt's ids, at least one. max_tokens: the reply's limit; None = up to the context's end.
    stop_tokens: ids that end the reply (the id itself is in the reply's tokens and hash, not in its text).
    logprobs: how many alternatives a token reports; None = no logprobs at all. segment_rows: None = the engine's.
    priority: a background request runs only while no other does. draft: whether drafts may speed it up. keep_rows:
    prompt rows whose state is worth keeping, ascending (the ends of a chat's messages). reuse: whether to go on from
    a kept state; without it, every prompt row is computed.
    """

    tokens: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    prefill: PrefillMode = "deep"
    segment_rows: int | None = None
    logprobs: int | None = None
    priority: Priority = "normal"
    draft: bool = True
    keep_rows: tuple[int, ...] = ()
    reuse: bool = True


@dataclass(frozen=True)
class PromptProgress:
    """`done` of `total` prompt rows are in the stream's state."""

    done: int
    total: int


@dataclass(frozen=True)
class TokenEvent:
    """One reply token. logprob: natural log, of the unmodified logits; alternatives: (id, logprob), best first."""

    token: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was submitted, and speeds in tokens a second. Informative; never part of a reply."""

    queued: float
    first_token: float
    total: float
    prompt_rate: float
    reply_rate: float


@dataclass(frozen=True)
class Finished:
    """The end of a request. Its tokens are those of the events before it.

    prefill: what was asked; segment_rows: the largest segment really run (smaller than asked when memory was short,
    which `notice` then says). logits_hash: SHA-256 of the last prompt row's float32 logits, little-endian.
    rows_reused came from kept states. drafted and accepted count draft tokens. error: the message when reason is
    "error"; error_code: "out_of_memory" when it may go well at another time, else None.
    """

    reason: FinishReason
    tokens: tuple[int, ...]
    token_hash: str
    logits_hash: str
    prefill: PrefillMode
    segment_rows: int
    rows_computed: int
    rows_reused: int
    timings: Timings
    drafted: int = 0
    accepted: int = 0
    notice: str | None = None
    error: str | None = None
    error_code: str | None = None


Event = PromptProgress | TokenEvent | Finished
EventHandler = Callable[[Event], None]
