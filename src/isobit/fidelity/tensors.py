"""A checkpoint's weights as PyTorch tensors: read on the host, decoded and dequantized on the reference's device."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from isobit.checkpoint.trellis import (
    BLOCK,
    STATES,
    TILE,
    TILE_VALUES,
    butterfly,
    codebook_values,
    dequantize_inner,
    state_ends,
    tile_to_matrix,
)
from isobit.checkpoint.weights import Exl3Linear, Linear

PIECE_VALUES = 1 << 24


@dataclass(frozen=True)
class DeviceArrays:
    """Where `parameters` gets its arrays: tensors on a device, with the values that NumPy's would have."""

    device: torch.device

    def dense(self, linear: Linear) -> torch.Tensor:
        """The weight as PyTorch has it: float32 [out_features, in_features]."""
        if isinstance(linear, Exl3Linear):
            return dequantized(linear, self.device)
        return torch.from_numpy(np.array(linear.weight, np.float32)).to(self.device)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """float32, uninitialised."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)


def dequantized(linear: Exl3Linear, device: torch.device) -> torch.Tensor:
    """The bits of `trellis.dequantize` in float32, transposed: float32 [out_features, in_features]."""
    weight = torch.empty((linear.out_features, linear.in_features), dtype=torch.float32, device=device)
    suh, svh = (torch.from_numpy(scale.astype(np.float64)).to(device) for scale in (linear.suh, linear.svh))
    for rows in _pieces(linear):
        block = _inner_rows(linear, rows, device).double()
        block = butterfly(butterfly(block.T.contiguous(), BLOCK).T.contiguous(), BLOCK) / BLOCK
        block = block * suh[rows, None] * svh
        stop = min(rows.stop, linear.in_features)
        weight[:, rows.start : stop] = block[: stop - rows.start, : linear.out_features].T
    return weight


def inner_values(linear: Exl3Linear, device: torch.device) -> torch.Tensor:
    """The codebook values between the rotations: float32 [K, N], as stored (padded)."""
    if device.type == "cpu":
        return torch.from_numpy(dequantize_inner(linear).astype(np.float32))
    values = torch.empty((linear.k, linear.n), dtype=torch.float32, device=device)
    for rows in _pieces(linear):
        values[rows] = _inner_rows(linear, rows, device)
    return values


def _pieces(linear: Exl3Linear) -> Iterator[slice]:
    """Rows that are decoded together, so that a wide layer's states need little memory."""
    step = max(PIECE_VALUES // linear.n // BLOCK, 1) * BLOCK
    for start in range(0, linear.k, step):
        yield slice(start, min(start + step, linear.k))


def _inner_rows(linear: Exl3Linear, rows: slice, device: torch.device) -> torch.Tensor:
    tiles = np.ascontiguousarray(linear.trellis[rows.start // TILE : rows.stop // TILE])
    states = unpacked_states(torch.from_numpy(tiles).to(device), linear.bits)
    return tile_to_matrix(_codebook(linear.codebook, device)[states])


def unpacked_states(trellis: torch.Tensor, bits: float) -> torch.Tensor:
    """`trellis.unpack_states` on a tensor: int16 [..., 16*bits] -> int64 [..., 256]."""
    words = trellis.view(torch.int32).long() & 0xFFFFFFFF
    starts = (state_ends(bits) - 16) % int(TILE_VALUES * bits)
    first, shifts = (torch.from_numpy(part).to(trellis.device) for part in (starts // 32, 48 - starts % 32))
    window = (words[..., first] << 32) | words[..., (first + 1) % words.shape[-1]]
    return (window >> shifts) & (STATES - 1)


@cache
def _codebook(codebook: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(codebook_values(codebook).astype(np.float32)).to(device)
