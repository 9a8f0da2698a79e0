"""Drawing the next token from logits, float32 [R, V] (docs/arithmetic.md, section sample).

`sample` draws one token a row, keyed by (seed, position) alone: tokens int32 [R], -1 where a logit is not finite;
logprob float64 [R], of the unmodified logits, NaN where a logit is not finite; finite bool [R]. `samples_to_host` gives
them as NumPy arrays, once the device has drawn them.
`top_logprobs` gives the most likely ids and their logprobs, int32 and float64 [R, min(count, V)], best first.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DRAW_FIELDS = 6
DRAW_WORDS = struct.Struct("=dddqQQ")
LOW_64_BITS = (1 << 64) - 1
MOST_KEPT = 1 << 62  # of any vocabulary


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
    """The drawn tokens, int32 [R], their logprobs, float64 [R], and which rows had finite logits only, bool [R].

    packed: on a device, the array that the three are parts of.
    """

    tokens: Any
    logprob: Any
    finite: Any
    packed: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What `Samples(*arrays)` makes the same of."""
        three = self.tokens, self.logprob, self.finite
        return three if self.packed is None else (*three, self.packed)


def packed_draws(draws: Sequence[Draw]) -> np.ndarray:
    """int64 [R, 6]: the bits of temperature, top_p and min_p (float64), then top_k, seed and position."""
    packed = bytearray(len(draws) * DRAW_WORDS.size)
    for row, draw in enumerate(draws):
        top_k, key = min(max(draw.top_k, 0), MOST_KEPT), draw.seed & LOW_64_BITS
        words = draw.temperature, draw.top_p, draw.min_p, top_k, key, draw.position & LOW_64_BITS
        DRAW_WORDS.pack_into(packed, row * DRAW_WORDS.size, *words)
    return np.frombuffer(packed, np.int64).reshape(len(draws), DRAW_FIELDS)
