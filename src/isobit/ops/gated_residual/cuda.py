"""Gated residual streams on CUDA."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.ops.linear import cuda as linear_layer
from isobit.ops.norm.cuda import MANY_ROWS_WARPS, MOST_FEW_ROWS, WARP, group_norm, held_values

__all__ = ["add_streams", "expand_streams", "gated_read", "gated_write", "prepare_gated_residual"]

STREAMS, LAYERS = "ops/gated_residual/streams.cu", "ops/gated_residual/layers.cu"
THREADS = 256


@dataclass(frozen=True)
class GatedResidual:
    """One read site: norm_weight float32 [S*H] on the device, and its linear layers."""

    norm_weight: torch.Tensor
    down: linear_layer.LinearHandle
    up: linear_layer.LinearHandle
    inject: linear_layer.LinearHandle | None
    streams: int
    eps: float


def prepare_gated_residual(
    norm_weight: np.ndarray,
    down: linear_layer.LinearHandle,
    up: linear_layer.LinearHandle,
    inject: linear_layer.LinearHandle | None,
    streams: int,
    eps: float,
) -> GatedResidual:
    """A read site from its norm weight [S*H] and linear handles; `inject` is None where nothing is written back."""
    weight = memory.to_device(np.asarray(norm_weight, np.float32))
    return GatedResidual(weight, down, up, inject, streams, float(eps))


def expand_streams(x: torch.Tensor, streams: int) -> torch.Tensor:
    """x in every stream: float32 [R, H] -> [R, S, H]."""
    rows, hidden = x.shape
    out = memory.empty((rows, streams, hidden))
    if out.numel():
        kernel = kernels.load(STREAMS, "expand_streams")
        kernel((-(-hidden // THREADS), rows), THREADS, x, out, streams, hidden)
    return out


def gated_read(streams: torch.Tensor, site: GatedResidual) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a block reads and how it writes back: [R, S, H] -> input [R, H], injection [R, S] or None."""
    return _read_layer_by_layer(streams, site)


def _read_layer_by_layer(streams: torch.Tensor, site: GatedResidual) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, count, hidden = streams.shape
    mixed = memory.empty((rows, hidden))
    injection = None if site.inject is None else memory.empty((rows, count))
    if not rows:
        return mixed, injection
    normed = group_norm(streams, site.norm_weight, count, site.eps)
    wide = normed.view(rows, count * hidden)
    low = linear_layer.linear(wide, site.down)
    grid = -(-low.numel() // THREADS)
    kernels.load(LAYERS, "activate")(grid, THREADS, low, kernels.Long(low.numel()), float(count))
    up = linear_layer.linear(low, site.up)
    written = None if site.inject is None else linear_layer.linear(wide, site.inject)
    grid = -(-max(hidden, count) // THREADS), rows
    kernels.load(LAYERS, "mix")(grid, THREADS, normed, up, written, mixed, injection, count, hidden)
    return mixed, injection


def gated_write(streams: torch.Tensor, injection: torch.Tensor, y: torch.Tensor) -> None:
    """streams_s += injection_s * y, in place: [R, S, H], [R, S], [R, H]."""
    _write(streams, injection, y, None, 0.0)


def add_streams(streams: torch.Tensor, x: torch.Tensor) -> None:
    """x added to every stream, in place: [R, S, H], [R, H]."""
    _write(streams, None, x, None, 0.0)


def gated_write_normed(streams: torch.Tensor, injection: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    """`gated_write`, and the factors that norm each stream as it then is: float32 [R, S], for the next `gated_read`."""
    inverse = memory.empty(streams.shape[:2])
    _write(streams, injection, y, inverse, eps)
    return inverse


def _write(
    streams: torch.Tensor, injection: torch.Tensor | None, y: torch.Tensor, inverse: torch.Tensor | None, eps: float
) -> None:
    rows, count, width = streams.shape
    if streams.numel():
        kernel, grid, threads = _for_streams("write_streams", rows, count, width)
        kernel(grid, threads, streams, injection, y, inverse, rows * count, count, width, float(eps))


def inverse_norms(streams: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean of squares + eps) of each stream: [R, S, H] -> float32 [R, S]."""
    rows, count, width = streams.shape
    inverse = memory.empty((rows, count))
    kernel, grid, threads = _for_streams("inverse_norms", rows, count, width)
    kernel(grid, threads, streams, inverse, rows * count, width, float(eps))
    return inverse


def _for_streams(name: str, rows: int, count: int, width: int) -> tuple[kernels.Kernel, int, int]:
    """A kernel of one warp a stream, with its grid and block."""
    warps = 1 if rows <= MOST_FEW_ROWS else MANY_ROWS_WARPS
    return kernels.load(STREAMS, name, HELD=held_values(width)), -(-rows * count // warps), warps * WARP
