"""Receipts: what a reply carries, so that it can be computed again and compared."""

from dataclasses import asdict, dataclass
from typing import Any

from isobit.engine.lane import token_hash
from isobit.engine.origin import Origin
from isobit.engine.request import Request, Sampling


@dataclass(frozen=True)
class Receipt:
    """What a reply came from.

    checkpoint, arithmetic, device: its Origin. prompt_hash: as the token hash, of the prompt. max_tokens: the reply
    limit that counted; reply_tokens: how many there are. context: the rows that prompt and reply could have together;
    None in receipts of versions that did not say.
    """

    checkpoint: str
    arithmetic: str
    device: str
    prompt_hash: str
    sampling: Sampling
    max_tokens: int
    reply_tokens: int
    context: int | None = None

    @property
    def origin(self) -> Origin:
        return Origin(self.checkpoint, self.arithmetic, self.device)

    def as_dict(self) -> dict[str, Any]:
        """The form in responses."""
        return asdict(self)


def receipt_of(origin: Origin, request: Request, reply_tokens: int, context: int) -> Receipt:
    """The receipt of a reply of so many tokens; the request names its reply limit, `context` the engine's rows."""
    assert request.max_tokens is not None
    prompt_hash = token_hash(request.tokens)
    return Receipt(
        **asdict(origin),
        prompt_hash=prompt_hash,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        reply_tokens=reply_tokens,
        context=context,
    )
