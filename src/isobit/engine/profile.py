"""Rounds whose ops are timed: what prompts and replies spend their time on."""

from collections.abc import Sequence
from typing import Any

from isobit.engine.lane import Lane
from isobit.engine.rounds import Rounds, Turn
from isobit.errors import counted
from isobit.model.flash_next import FlashNext
from isobit.ops.profile import OpProfile, clock_of


class ProfiledRounds(Rounds):
    """Rounds that time each op of the model's, run step by step; no byte changes. The model is theirs alone."""

    def __init__(self, model: FlashNext, *arguments: Any):
        super().__init__(model, *arguments)
        self.profile = OpProfile(clock_of(model.ops))
        self.profile.wrap(model.ops)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.profile.end()

    def _turns(self, lanes: list[Lane]) -> list[Turn]:
        self.profile.begin(phase_of(lanes))
        turns = super()._turns(lanes)
        self.profile.count_rows(sum(len(turn.tokens) for turn in turns))
        return turns


def phase_of(lanes: Sequence[Lane]) -> str:
    """What a round of these lanes is counted as."""
    prompts = [lane for lane in lanes if lane.prompt_left]
    if not prompts:
        return f"decode, {counted(len(lanes), 'lane')}"
    beside = "" if len(prompts) == len(lanes) else ", beside replies"
    return f"prompt, {prompts[0].request.prefill}{beside}"
