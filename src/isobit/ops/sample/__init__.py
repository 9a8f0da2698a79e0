"""Drawing the next token from logits, float32 [R, V] (docs/arithmetic.md, section sample).

`sample` draws one token a row, keyed by (seed, position) alone: tokens int32 [R], -1 where a logit is not finite;
logprob float64 [R], of the unmodified logits, NaN where a logit is not finite; finite bool [R].
`top_logprobs` gives the most likely ids and their logprobs, int32 and float64 [R, min(count, V)], best first.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Draw:
    """How one row's token is drawn.

    temperature 0 takes the largest logit; top_k 0, top_p 1 and min_p 0 filter nothing. seed: the low 64 bits count;
    position: the absolute position of the token that is drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


@dataclass(frozen=True)
class Samples:
    """The drawn tokens, int32 [R], their logprobs, float64 [R], and which rows had finite logits only, bool [R]."""

    tokens: Any
    logprob: Any
    finite: Any
