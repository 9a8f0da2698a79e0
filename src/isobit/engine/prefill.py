"""How a prompt is cut into the segments of successive forwards. The cut never changes a byte of the reply."""

from isobit.engine.request import PrefillMode
from isobit.settings import BATCHED_ROWS


def segment_limit(mode: PrefillMode, asked: int | None, default: int) -> int:
    """The most prompt rows of one forward: 1 in serial, 64 in batched, `default` in deep, unless a size is asked."""
    return asked if asked is not None else {"serial": 1, "batched": BATCHED_ROWS, "deep": default}[mode]
