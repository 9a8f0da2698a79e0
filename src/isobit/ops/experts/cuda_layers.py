"""The layers of all experts in one block of device memory, and their description for the kernels (layers.cuh)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isobit.checkpoint.weights import CODEBOOKS, Exl3Linear, Linear, PlainLinear
from isobit.cuda import memory
from isobit.cuda.staging import upload
from isobit.errors import CheckpointError
from isobit.ops.linear.stored import check_plain, check_trellis, padded_bias

BLOCK = 128
TILE = 16
LONG_INPUTS = 4096
PLAIN = -1
ALIGNMENT = 256

LAYER = np.dtype(
    [
        ("weights", np.int64),
        ("input_scales", np.int64),
        ("output_scales", np.int64),
        ("bias", np.int64),
        ("format", np.int32),
        ("inputs", np.int32),
        ("outputs", np.int32),
        ("real_outputs", np.int32),
    ]
)
POINTERS = ("weights", "input_scales", "output_scales", "bias")
NOWHERE = -1


@dataclass(frozen=True)
class PlacedLayers:
    """Layers on the device. table: `struct Layer` of each as bytes, pointing into `arena`. macros: of the kernels."""

    table: torch.Tensor
    arena: torch.Tensor
    macros: dict[str, int]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.arena.nbytes


def place_layers(layers: Sequence[Linear]) -> PlacedLayers:
    """Put the layers on the device. Raises CheckpointError when the tensors of one do not fit each other."""
    pieces, nbytes, rows = [], 0, []
    for layer in layers:
        offsets = dict.fromkeys(POINTERS, NOWHERE)
        for name, array in _arrays(layer).items():
            pieces.append((nbytes, array))
            offsets[name] = nbytes
            nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        number = PLAIN if isinstance(layer, PlainLinear) else format_number(layer)
        rows.append((*offsets.values(), number, *stored_sizes(layer), layer.out_features))
    arena, table = upload(pieces, nbytes), np.array(rows, LAYER)
    for name in POINTERS:
        table[name] = np.where(table[name] == NOWHERE, 0, table[name] + arena.data_ptr())
    return PlacedLayers(memory.to_device(table.view(np.uint8)), arena, macros_of(layers))


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
    inputs, outputs = stored_sizes(layer)
    if isinstance(layer, PlainLinear):
        check_plain(layer)
        weights = np.zeros((inputs, outputs), np.float32)
        weights[: layer.in_features] = layer.weight.T
        arrays: dict[str, Any] = {"weights": weights}
    else:
        check_trellis(layer)
        if (inputs, outputs) != (whole_blocks(layer.in_features), whole_blocks(layer.out_features)):
            raise CheckpointError(
                f"{layer.name}: stored sizes {inputs} x {outputs}, expected those of {layer.in_features} x "
                f"{layer.out_features} in whole blocks of {BLOCK}"
            )
        arrays = {"weights": layer.trellis, "input_scales": layer.suh, "output_scales": layer.svh}
    if layer.bias is not None:
        arrays["bias"] = padded_bias(layer, outputs)
    return arrays
