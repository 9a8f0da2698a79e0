"""Gated residual streams on the CPU."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from isobit.ops.buffers import empty, flat
from isobit.ops.gated_residual import blockwise
from isobit.ops.linear.blocks import BLOCK, ROW_BYTES
from isobit.ops.linear.cpu import LinearHandle, linear, work_of
from isobit.ops.linear.parallel import LONG_WORK
from isobit.ops.linear.product import BIAS, INPUT_SCALES
from isobit.ops.norm.cpu import group_norm
from isobit.ops.scalar import fma32
from isobit.ops.tape import do
from isobit.ops.work import run_split

__all__ = ["add_streams", "expand_streams", "gated_read", "gated_write", "gated_write_read", "prepare_gated_residual"]

BY_ROW_COUNT, LAYER_BY_LAYER, BLOCKWISE = 0, 1, 2  # how to read; the first is what the model uses
MANY_ROWS = 16  # from which on rows are shared out among threads
NEAR_BYTES = 1 << 18  # of normed streams that stay in a core's cache
LEAST_NEAR_ROWS, MOST_NEAR_ROWS = 24, 48


@dataclass(frozen=True)
class GatedResidual:
    """One read site: norm_weight float32 [S*H], and its linear layers.

    plain: whether all layers are plain and without bias. row_work: weights of the largest of them.
    """

    norm_weight: np.ndarray
    down: LinearHandle
    up: LinearHandle
    inject: LinearHandle | None
    streams: int
    eps: float
    plain: bool
    row_work: int
    near_rows: int


def prepare_gated_residual(
    norm_weight: np.ndarray, down: LinearHandle, up: LinearHandle, inject: LinearHandle | None, streams: int, eps: float
) -> GatedResidual:
    """A read site from its norm weight [S*H] and linear handles; `inject` is None where nothing is written back."""
    layers = [layer for layer in (down, up, inject) if layer is not None]
    return GatedResidual(
        norm_weight=np.array(norm_weight, np.float32),
        down=down,
        up=up,
        inject=inject,
        streams=streams,
        eps=eps,
        plain=streams <= BLOCK and not any(layer.record[INPUT_SCALES] or layer.record[BIAS] for layer in layers),
        row_work=max(layer.in_features * layer.out_features for layer in layers),
        near_rows=min(max(NEAR_BYTES // (-(-norm_weight.size // BLOCK) * ROW_BYTES), LEAST_NEAR_ROWS), MOST_NEAR_ROWS),
    )


def expand_streams(x: np.ndarray, streams: int) -> np.ndarray:
    """x in every stream: float32 [R, H] -> [R, S, H]."""
    out = empty((len(x), streams, x.shape[1]))
    do(np.copyto, out, x[:, None, :])
    return out


def gated_read(
    streams: np.ndarray, site: GatedResidual, how: int = BY_ROW_COUNT
) -> tuple[np.ndarray, np.ndarray | None]:
    """What a block reads and how it writes back: [R, S, H] -> input [R, H], injection [R, S] or None.

    `how` is for the contract and changes no byte. Raises KeyError when the site's layers rule it out.
    """
    if how == BLOCKWISE and not site.plain:
        raise KeyError("blockwise reading needs plain linear layers")
    rows, count, hidden = streams.shape
    mixed = empty((rows, hidden))
    injection = empty((rows, 0 if site.inject is None else count))
    if how == BLOCKWISE or (how == BY_ROW_COUNT and _is_blockwise(rows, site)):
        records = [layer.record for layer in (site.down, site.up, site.inject or site.down)]
        inputs = flat(streams), site.norm_weight, np.float32(site.eps), count, *records, site.near_rows
        outputs = flat(mixed), injection.shape[1], flat(injection)
        work = rows * site.row_work if rows >= MANY_ROWS else 0
        run_split(blockwise.read_rows, work, rows, *inputs, *outputs)
    else:
        _read_layer_by_layer(streams, site, mixed, injection)
    return mixed, None if site.inject is None else injection


def _is_blockwise(rows: int, site: GatedResidual) -> bool:
    """Whether to share the work out by rows, and not each layer's by columns."""
    return site.plain and (rows >= MANY_ROWS or work_of(rows, site.row_work) < LONG_WORK)


def _read_layer_by_layer(streams: np.ndarray, site: GatedResidual, mixed: np.ndarray, injection: np.ndarray) -> None:
    rows, count, hidden = streams.shape
    normed = group_norm(streams, site.norm_weight, count, site.eps)
    wide = normed.reshape(rows, count * hidden)
    low = linear(wide, site.down)
    run_split(low_rows, low.size, rows, flat(low), site.down.out_features, count)
    up = linear(low, site.up)
    written = injection if site.inject is None else linear(wide, site.inject)
    sizes = count, hidden, injection.shape[1]
    arrays = (flat(array) for array in (normed, up, written, mixed, injection))
    run_split(mix_rows, streams.size, rows, *sizes, *arrays)


def gated_write(streams: np.ndarray, injection: np.ndarray, y: np.ndarray) -> None:
    """streams_s += injection_s * y, in place: [R, S, H], [R, S], [R, H]."""
    run_split(write_rows, streams.size, len(y), streams, injection, y)


def gated_write_read(
    streams: np.ndarray, injection: np.ndarray, y: np.ndarray, site: GatedResidual
) -> tuple[np.ndarray, np.ndarray | None]:
    """`gated_write`, then `gated_read` at the next site."""
    gated_write(streams, injection, y)
    return gated_read(streams, site)


def add_streams(streams: np.ndarray, x: np.ndarray) -> None:
    """x added to every stream, in place: [R, S, H], [R, H]."""
    gated_write(streams, np.ones(streams.shape[:2], np.float32), x)


@njit(nogil=True, cache=True, error_model="numpy")
def low_rows(low, rank, streams, first, last):
    """silu(low / streams) in place, rows first to last - 1 of [R, rank], given flat."""
    for row in range(first, last):
        blockwise.activate(low, row * rank, rank, streams)


@njit(nogil=True, cache=True, error_model="numpy")
def mix_rows(streams, hidden, count, normed, up, written, mixed, injection, first, last):
    """mixed [R, H] from normed and up [R, S*H]; injection [R, count] from `written`. All arrays are given flat."""
    for row in range(first, last):
        for stream in range(streams):
            at = (row * streams + stream) * hidden
            blockwise.mix(up, at, normed, at, hidden, stream, streams, mixed, row * hidden)
        blockwise.write_injection(written, row * count, count, streams, injection, row * count)


@njit(nogil=True, cache=True, error_model="numpy")
def write_rows(streams, injection, y, first, last):
    """streams [R, S, H] += injection [R, S] * y [R, H], fused, rows first to last - 1."""
    for row in range(first, last):
        for stream in range(streams.shape[1]):
            weight = injection[row, stream]
            for i in range(y.shape[1]):
                streams[row, stream, i] = fma32(weight, y[row, i], streams[row, stream, i])
