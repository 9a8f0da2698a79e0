"""Gated residual streams on the CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from isobit.ops.buffers import empty
from isobit.ops.linear.cpu import linear
from isobit.ops.norm.cpu import group_norm
from isobit.ops.scalar import fma32, sigmoid32, silu32
from isobit.ops.work import run_split

__all__ = ["add_streams", "expand_streams", "gated_read", "gated_write", "prepare_gated_residual"]

TWO = np.float32(2.0)


@dataclass(frozen=True)
class GatedResidual:
    """One read site: norm_weight float32 [S*H], and the handles of its linear layers."""

    norm_weight: np.ndarray
    down: Any
    up: Any
    inject: Any
    streams: int
    eps: float


def prepare_gated_residual(norm_weight: np.ndarray, down, up, inject, streams: int, eps: float) -> GatedResidual:
    """A read site from its norm weight [S*H] and linear handles; `inject` is None where nothing is written back."""
    return GatedResidual(np.array(norm_weight, np.float32), down, up, inject, streams, eps)


def expand_streams(x: np.ndarray, streams: int) -> np.ndarray:
    """x in every stream: float32 [R, H] -> [R, S, H]."""
    out = empty((len(x), streams, x.shape[1]))
    out[...] = x[:, None, :]
    return out


def gated_read(streams: np.ndarray, site: GatedResidual) -> tuple[np.ndarray, np.ndarray | None]:
    """What a block reads and how it writes back: [R, S, H] -> input [R, H], injection [R, S] or None."""
    rows, count, hidden = streams.shape
    normed = group_norm(streams, site.norm_weight, count, site.eps)
    flat = normed.reshape(rows, count * hidden)
    low = linear(flat, site.down)
    run_split(low_rows, low.size, rows, low, np.float32(count))
    up = linear(low, site.up)
    mixed = empty((rows, hidden))
    injection = empty((rows, 0)) if site.inject is None else linear(flat, site.inject)
    run_split(mix_rows, streams.size, rows, normed, up, mixed, injection)
    return mixed, None if site.inject is None else injection


def gated_write(streams: np.ndarray, injection: np.ndarray, y: np.ndarray) -> None:
    """streams_s += injection_s * y, in place: [R, S, H], [R, S], [R, H]."""
    run_split(write_rows, streams.size, len(y), streams, injection, y)


def add_streams(streams: np.ndarray, x: np.ndarray) -> None:
    """x added to every stream, in place: [R, S, H], [R, H]."""
    gated_write(streams, np.ones(streams.shape[:2], np.float32), x)


@njit(nogil=True, cache=True, error_model="numpy")
def low_rows(low, streams, first, last):
    """silu(low / streams) in place, rows first to last - 1 of [R, rank]."""
    for row in range(first, last):
        for i in range(low.shape[1]):
            low[row, i] = silu32(low[row, i] / streams)


@njit(nogil=True, cache=True, error_model="numpy")
def mix_rows(normed, up, mixed, injection, first, last):
    """mixed [R, H] from normed [R, S, H] and up [R, S*H]; 2 * sigmoid(injection / S) in place, [R, S] or [R, 0]."""
    streams, hidden = normed.shape[1], normed.shape[2]
    divisor = np.float32(streams)
    for row in range(first, last):
        for i in range(hidden):
            mixed[row, i] = sigmoid32(up[row, i]) * normed[row, 0, i]
        for stream in range(1, streams):
            for i in range(hidden):
                mixed[row, i] += sigmoid32(up[row, stream * hidden + i]) * normed[row, stream, i]
        for i in range(hidden):
            mixed[row, i] = mixed[row, i] / divisor
        for stream in range(injection.shape[1]):
            injection[row, stream] = TWO * sigmoid32(injection[row, stream] / divisor)


@njit(nogil=True, cache=True, error_model="numpy")
def write_rows(streams, injection, y, first, last):
    """streams [R, S, H] += injection [R, S] * y [R, H], fused, rows first to last - 1."""
    for row in range(first, last):
        for stream in range(streams.shape[1]):
            weight = injection[row, stream]
            for i in range(y.shape[1]):
                streams[row, stream, i] = fma32(weight, y[row, i], streams[row, stream, i])
