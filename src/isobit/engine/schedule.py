"""Which rows a round computes: one window for each replying lane, and one prompt segment."""

from collections.abc import Sequence

from isobit.engine.lane import Lane


def running(lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes that take part in the next round: background lanes only while no other runs."""
    foreground = [lane for lane in lanes if not lane.background]
    return foreground or list(lanes)


def choose(lanes: Sequence[Lane]) -> list[Lane]:
    """The replying lanes, and of those with prompt left the one that has had the fewest prompt rows; lane order kept.

    So a short prompt passes a long one, and two long ones take turns.
    """
    prompts = [lane for lane in lanes if lane.prompt_left]
    served = min(prompts, key=lambda lane: (lane.rows_computed, lane.started), default=None)
    return [lane for lane in lanes if not lane.prompt_left or lane is served]


def segment_rows(lane: Lane, lanes: Sequence[Lane], decode_share: int) -> int:
    """The most prompt rows of this lane's next segment, fewer while other lanes reply."""
    replying = any(not other.prompt_left for other in lanes)
    return min(lane.segment_rows, decode_share) if replying else lane.segment_rows
