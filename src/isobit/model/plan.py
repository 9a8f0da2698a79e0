"""What one forward computes: segments of consecutive tokens of some streams."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from isobit.model.state import Stream


@dataclass(frozen=True)
class Segment:
    """The next `tokens` of a stream, from its position on. `logits`: for its "last" row, "all" rows or "none".

    `journal`: whether only its first rows may be kept afterwards (`StatePool.settle`, before the next forward).
    """

    stream: Stream
    tokens: tuple[int, ...]
    logits: str = "last"
    journal: bool = False

    def logit_rows(self, start: int) -> range:
        """The rows of the plan that this segment wants logits for, when it begins at row `start`."""
        end = start + len(self.tokens)
        if self.logits == "none":
            return range(0)
        return range(end - 1 if self.logits == "last" else start, end)


@dataclass(frozen=True)
class Plan:
    """The segments of one forward, each of another stream, laid end to end.

    recurring: whether forwards of these sizes are likely to come again.
    """

    segments: tuple[Segment, ...]
    recurring: bool = True

    def __post_init__(self) -> None:
        streams = {segment.stream.slot for segment in self.segments}
        if len(streams) != len(self.segments) or not self.segments:
            raise ValueError("a plan needs at least one segment, each of another stream")
        if any(not segment.tokens for segment in self.segments):
            raise ValueError("a segment needs at least one token")

    @cached_property
    def starts(self) -> np.ndarray:
        """int32 [S+1], where each segment begins among the rows."""
        return np.array([0, *accumulate(len(segment.tokens) for segment in self.segments)], np.int32)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [R], all rows' token ids."""
        return np.array([token for segment in self.segments for token in segment.tokens], dtype=np.int32)

    @cached_property
    def logit_rows(self) -> np.ndarray:
        """int64 [L], the rows that logits are wanted for, ascending."""
        starts = self.starts.tolist()
        rows = [row for i, segment in enumerate(self.segments) for row in segment.logit_rows(starts[i])]
        return np.array(rows, dtype=np.int64)
