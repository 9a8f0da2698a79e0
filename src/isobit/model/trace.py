"""A record of the discrete choices of a forward, for tracing where two implementations part."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LayerTrace:
    """One forward's choices in one layer, a row each.

    router_logits: float32 [R, E]; router_ids: int32 [R, chosen], ascending. In sparse attention layers also
    blocks: int32 [R, B] (ascending, the first block_counts[r] valid); block_scores: float32 [finished blocks] a row.
    """

    router_logits: Any = None
    router_ids: Any = None
    blocks: Any = None
    block_counts: Any = None
    block_scores: Any = None


@dataclass
class Trace:
    """The choices of every layer that a traced forward ran, by layer name (`layers.0`, ..., `mtp`)."""

    layers: dict[str, LayerTrace] = field(default_factory=dict)

    def layer(self, name: str) -> LayerTrace:
        """The record of a layer, made when it is first asked for."""
        return self.layers.setdefault(name, LayerTrace())
