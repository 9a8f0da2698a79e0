"""What any device checks of the experts' stored layers."""

from collections.abc import Sequence

from isobit.checkpoint.weights import Linear
from isobit.errors import CheckpointError

Expert = tuple[Linear, Linear, Linear]  # gate, up and down


def checked_experts(
    gate: Sequence[Linear], up: Sequence[Linear], down: Sequence[Linear], shared: Expert, shared_gate: Linear
) -> list[Expert]:
    """The routed experts in ascending id, then the shared one. Raises CheckpointError when layers do not fit."""
    if not len(gate) == len(up) == len(down) > 0:
        raise CheckpointError(f"experts: {len(gate)} gate, {len(up)} up and {len(down)} down projections")
    hidden = gate[0].in_features
    experts: list[Expert] = [*zip(gate, up, down, strict=True), shared]
    for gate_layer, up_layer, down_layer in experts:
        inner = gate_layer.out_features
        _check_size(gate_layer, hidden, inner)
        _check_size(up_layer, hidden, inner)
        _check_size(down_layer, inner, hidden)
    _check_size(shared_gate, hidden, 1)
    return experts


def _check_size(weights: Linear, inputs: int, outputs: int) -> None:
    if (weights.in_features, weights.out_features) != (inputs, outputs):
        raise CheckpointError(
            f"{weights.name}: {weights.in_features} inputs and {weights.out_features} outputs, "
            f"expected {inputs} and {outputs}"
        )
