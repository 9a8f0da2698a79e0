"""isobit behind the calls that `peers.py` makes of every engine: forwards and greedy sampling, no server."""

from collections.abc import Sequence
from pathlib import Path

import isobit
from isobit.checkpoint.opening import open_checkpoint
from isobit.engine.placement import Placement
from isobit.model.load import load_model
from isobit.model.plan import Plan, Segment
from isobit.model.state import Stream, pages_for
from isobit.ops import load_ops
from isobit.ops.sample import Draw

GREEDY = Draw(temperature=0.0)
Tokens = Sequence[int]


class Isobit:
    """A checkpoint loaded whole onto a device: prompts in the segments that the engine takes there, no drafts."""

    def __init__(self, folder: Path, rows: int, lanes: int, device: str = "cuda"):
        """rows: the most that all streams together have; lanes: the most streams."""
        self.model = load_model(open_checkpoint(folder), load_ops(device), rows)
        self.state = self.model.new_state(slots=lanes, pages=pages_for(rows) + lanes)
        self.segment_rows = Placement(device).segment_rows
        self.streams: list[Stream] = []
        self.version = isobit.__version__

    def open(self, prompts: Sequence[Tokens], room: int = 1) -> list[int]:
        """Streams of these prompts; the first token of each, greedy."""
        self.close()
        self.streams = [self.state.open() for _ in prompts]
        return [self._prefill(stream, prompt) for stream, prompt in zip(self.streams, prompts, strict=True)]

    def step(self, tokens: Tokens) -> list[int]:
        """Feed one token to each stream; the next of each, greedy."""
        segments = [Segment(stream, (token,)) for stream, token in zip(self.streams, tokens, strict=True)]
        return self._greedy(Plan(tuple(segments)))

    def close(self) -> None:
        """Drop the streams."""
        for stream in self.streams:
            self.state.close(stream)
        self.streams = []

    def _prefill(self, stream: Stream, prompt: Tokens) -> int:
        for first in range(0, len(prompt), self.segment_rows):
            tokens = tuple(prompt[first : first + self.segment_rows])
            wanted = "last" if first + len(tokens) == len(prompt) else "none"
            drawn = self._greedy(Plan((Segment(stream, tokens, wanted),)))
        return drawn[0]

    def _greedy(self, plan: Plan) -> list[int]:
        """Run a plan; the tokens of the rows it wants logits of."""
        _, samples = self.model.draw(self.state, plan, [GREEDY] * len(plan.logit_rows))
        return self.model.ops.samples_to_host(samples).tokens.tolist()
