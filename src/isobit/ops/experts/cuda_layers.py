"""The layers of all experts in one block of device memory, and their description for the kernels (layers.cuh)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isobit.checkpoint.weights import CODEBOOKS, Exl3Linear, Linear, PlainLinear
from isobit.cuda import memory
from isobit.errors import CheckpointError

BLOCK = 128
TILE = 16
LONG_INPUTS = 4096
PLAIN = -1
ALIGNMENT = 256

LAYER = np.dtype(
    [
        ("weights", np.uint64),
        ("input_scales", np.uint64),
        ("output_scales", np.uint64),
        ("bias", np.uint64),
        ("format", np.int32),
        ("inputs", np.int32),
        ("outputs", np.int32),
        ("real_outputs", np.int32),
    ]
)
POINTERS = ("weights", "input_scales", "output_scales", "bias")


@dataclass(frozen=True)
class PlacedLayers:
    """Layers on the device. table: `struct Layer` of each as bytes, pointing into `arena`. macros: of the kernels."""

    table: torch.Tensor
    arena: torch.Tensor
    macros: dict[str, int]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.arena.nbytes


@dataclass
class _Arena:
    """What is to be put in one block of device memory."""

    pieces: list[tuple[int, np.ndarray]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, array: np.ndarray) -> int:
        """Where the array will lie, in bytes from the start."""
        place = self.nbytes
        self.pieces.append((place, array))
        self.nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def place(self) -> torch.Tensor:
        """The block, uint8 on the device."""
        block = memory.zeros((self.nbytes,), torch.uint8)
        for place, array in self.pieces:
            source = memory.to_device(array).view(-1).view(torch.uint8)
            block[place : place + source.numel()].copy_(source)
        return block


def place_layers(layers: Sequence[Linear]) -> PlacedLayers:
    """Put the layers on the device. Raises CheckpointError when the tensors of one do not fit each other."""
    arena, table = _Arena(), np.zeros(len(layers), LAYER)
    places = {name: np.zeros(len(layers), np.uint64) for name in POINTERS}
    present = {name: np.zeros(len(layers), bool) for name in POINTERS}
    for i, layer in enumerate(layers):
        for name, array in _arrays(layer).items():
            places[name][i], present[name][i] = arena.add(array), True
        table[i]["format"] = PLAIN if isinstance(layer, PlainLinear) else format_number(layer)
        table[i]["inputs"], table[i]["outputs"] = stored_sizes(layer)
        table[i]["real_outputs"] = layer.out_features
    block = arena.place()
    for name in POINTERS:
        table[name] = np.where(present[name], places[name] + np.uint64(block.data_ptr()), np.uint64(0))
    return PlacedLayers(memory.to_device(table.view(np.uint8)), block, macros_of(layers))


def format_number(layer: Exl3Linear) -> int:
    """What layers.cuh calls a codebook with a width."""
    return 32 * CODEBOOKS.index(layer.codebook) + int(2 * layer.bits)


def macros_of(layers: Sequence[Linear]) -> dict[str, int]:
    """Which formats and lengths the kernels of these layers are compiled for."""
    widths = dict.fromkeys(CODEBOOKS, 0)
    for layer in layers:
        if isinstance(layer, Exl3Linear):
            widths[layer.codebook] |= 1 << int(2 * layer.bits)
    return {
        "THREE_INST_WIDTHS": widths["3inst"],
        "MCG_WIDTHS": widths["mcg"],
        "MUL1_WIDTHS": widths["mul1"],
        "PLAIN_LAYERS": int(any(isinstance(layer, PlainLinear) for layer in layers)),
        "LONG_LAYERS": int(any(stored_sizes(layer)[0] >= LONG_INPUTS for layer in layers)),
    }


def stored_sizes(layer: Linear) -> tuple[int, int]:
    """(inputs, outputs) as the kernels see them: a plain layer's inputs are rounded up to whole steps of 16."""
    if isinstance(layer, Exl3Linear):
        return layer.k, layer.n
    return -(-layer.in_features // TILE) * TILE, layer.out_features


def whole_blocks(count: int) -> int:
    """`count` rounded up to whole blocks of 128."""
    return -(-count // BLOCK) * BLOCK


def _arrays(layer: Linear) -> dict[str, np.ndarray]:
    if isinstance(layer, PlainLinear):
        _check(layer, "weight", layer.weight, np.float32, (layer.out_features, layer.in_features))
        _check_finite(layer, "weight", layer.weight)
        inputs, outputs = stored_sizes(layer)
        weights = np.zeros((inputs, outputs), np.float32)
        weights[: layer.in_features] = layer.weight.T
        arrays: dict[str, Any] = {"weights": weights}
    else:
        _check_trellis(layer)
        arrays = {"weights": layer.trellis, "input_scales": layer.suh, "output_scales": layer.svh}
    if layer.bias is not None:
        _check_finite(layer, "bias", layer.bias)
        arrays["bias"] = layer.bias[: layer.out_features].astype(np.float32)
    return arrays


def _check_trellis(layer: Exl3Linear) -> None:
    k, n = whole_blocks(layer.in_features), whole_blocks(layer.out_features)
    _check(layer, "trellis", layer.trellis, np.int16, (k // TILE, n // TILE, int(TILE * layer.bits)))
    for name, scales, size in (("suh", layer.suh, k), ("svh", layer.svh, n)):
        _check(layer, name, scales, np.float16, (size,))
        _check_finite(layer, name, scales)


def _check(layer: Linear, what: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise CheckpointError(
            f"{layer.name}: {what} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"
        )


def _check_finite(layer: Linear, what: str, array: np.ndarray) -> None:
    if not np.isfinite(array).all():
        raise CheckpointError(
            f"{layer.name}: {what} holds NaN or infinite values, expected finite ones; download the checkpoint again"
        )
