"""What makes a synthetic checkpoint predictable: each token has one likely successor, and the MTP head knows it too.

The head's row of a token is the embedding of the token that it follows, so that it peaks where that token was last.
Blocks add little to the streams. The MTP head gets the token's embedding unchanged, and collapses its streams with the
trunk's mixer, so that it reads what the trunk reads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from isobit.checkpoint.names import published_name
from isobit.checkpoint.synth_text import END_OF_TEXT, END_OF_TURN
from isobit.checkpoint.synth_values import PIECE_VALUES, Fill, Tensor, Values, bell, diagonal

GAINS = {"out_proj": 0.1, "o_proj": 0.15, "down_proj": 0.15, "value_proj": 0.1, "fc_hidden": 0.05}
VECTORS: dict[str, tuple[str, Fill]] = {"ple.conv1d": ("F16", bell(0.04))}

PLAIN = ("lm_head", "mtp.fc_embedding")  # linears that cannot be random trellises

CERTAINTY = 6.0  # natural logarithm of how much likelier the successor is than all other tokens together
MIX = 0.5  # what the mean over gated streams leaves of a normed stream
NEVER_LIKELY = (END_OF_TEXT, END_OF_TURN)  # so that replies are as long as they are asked for


@dataclass(frozen=True)
class SuccessorHead(Tensor):
    """The output head [vocabulary, hidden]: row (t + step) mod vocabulary from the numbers of the embedding's row t."""

    embedding: str = ""

    def pieces(self, seed: int, name: str) -> Iterator[np.ndarray]:
        vocabulary, hidden = self.shape
        spread = (math.log(vocabulary) + CERTAINTY) / (MIX * hidden)
        step, rows = successor_step(vocabulary), 2 * max(1, PIECE_VALUES // (2 * hidden))
        for first, last, begin in ((vocabulary - step, vocabulary, 0), (0, vocabulary - step, step)):
            values = Values(seed, self.embedding)
            values.skip(first * hidden)
            for row in range(first, last, rows):
                count = min(rows, last - row)
                piece = values.bell(count * hidden, spread).reshape(count, hidden)
                ids = begin + row - first + np.arange(count)
                piece[np.isin(ids, NEVER_LIKELY)] = 0
                yield piece.ravel().astype("<f2")


def successor_step(vocabulary: int) -> int:
    """How far a token's successor is from it: a step that leads through the whole vocabulary."""
    step = round(0.382 * vocabulary)
    while math.gcd(step, vocabulary) != 1:
        step += 1
    return step


def predictable_tensor(name: str, tensor: Tensor) -> Tensor:
    """The tensor of that canonical name as a predictable checkpoint has it."""
    if name == "lm_head.weight":
        embedding = published_name("embed_tokens.weight")
        return SuccessorHead("F16", tensor.shape, tensor.fill, whole=True, embedding=embedding)
    if name == "mtp.fc_embedding.weight":
        hidden = tensor.shape[0]
        return Tensor("F16", tensor.shape, diagonal(hidden, 1.0), hidden + 1)
    if name == "mtp.pre_fc_norm_embedding.weight":
        return replace(tensor, fill=bell(0.0))
    if name.startswith("mtp.hyper_connection_mixer."):
        return replace(tensor, drawn_as=published_name(name.removeprefix("mtp.")), whole=True)
    if name == "embed_tokens.weight" or name.startswith("hyper_connection_mixer."):
        return replace(tensor, whole=True)
    return tensor
