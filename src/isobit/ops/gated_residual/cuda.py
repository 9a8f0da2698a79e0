"""Gated residual streams on CUDA."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant
from isobit.ops.linear import cuda as linear_layer
from isobit.ops.linear.cuda import ALONE_BYTES, MOST_FEEDERS, PlainShape
from isobit.ops.linear.cuda_layers import TILE, HalfLayer, LinearHandle
from isobit.ops.norm.cuda import (
    FLOAT_BYTES,
    MANY_ROWS_WARPS,
    MOST_FEW_ROWS,
    STAGED_THREADS,
    WARP,
    group_norm,
    held_values,
)

__all__ = ["add_streams", "expand_streams", "gated_read", "gated_write", "gated_write_read", "prepare_gated_residual"]

BY_ROW_COUNT, LAYER_BY_LAYER, FEW_ROWS, MANY_ROWS = 0, 1, 2, 3  # how to read; the first is what the model uses
STREAMS, LAYERS = "ops/gated_residual/streams.cu", "ops/gated_residual/layers.cu"
DOWN_FEW, DOWN, MIX = (f"ops/gated_residual/{name}.cu" for name in ("down_few", "down", "mix"))
THREADS = 256
ADD_THREADS = 128
FETCH_BLOCKS = 16  # that ask for a site's weights
ROW_TILE, MOST_OWN_ROWS = 8, 8  # rows of a product's operand; up to how many rows each block activates them itself
DOWN_WARPS = 12  # of a block of down.cu
DOWN_STAGES, STAGE_INPUTS = 3, 64  # whose halves of rows, weights and norm weights down.cu shares, beside inverse norms
WARPGROUP_ARCHITECTURES = ((9, 0),)  # whose tensor cores take rows from shared memory, to more speed and the same bits
MIX_COLUMNS, MIX_ROW_TILES, MIX_THREADS = 4, 16, 512  # tiles of a unit of mix.cu; of a block
MOST_STEPS = 24  # of 16 inputs of `up`, whose weights a lane holds
MOST_STREAMS = 8
EMULATED_SHARED = 256 << 10
MOST_NORMED_ROWS, CHUNK_TILES = 8, 16  # that down_few.cu takes; tiles of each of its feeders
OWN_BYTES = 1 << 10  # at most, that a block of down_few.cu shares beside its chunks
MOST_OWN_TERMS = 32  # of an output of all these rows, that each block of mix_few adds itself

Written = tuple[torch.Tensor, torch.Tensor]  # an injection [R, S] and y [R, H]


@dataclass(frozen=True)
class DownShape:
    """A block of down.cu: its rows, and the tiles of 16 outputs of a warp."""

    rows: int
    warp_tiles: int

    @property
    def outputs(self) -> int:
        return TILE * DOWN_WARPS * self.warp_tiles

    def shared(self, streams: int) -> int:
        """Bytes that it shares."""
        stages = DOWN_STAGES * STAGE_INPUTS * (2 * 2 * self.rows + 2 * self.outputs + FLOAT_BYTES)
        return stages + self.rows * streams * FLOAT_BYTES

    def grid(self, rows: int, shards: int, outputs: int) -> tuple[int, int, int]:
        return -(-rows // self.rows), shards, -(-outputs // self.outputs)


DOWN_SHAPES = (DownShape(32, 1), DownShape(64, 1), DownShape(64, 2))  # ever more work a block


def down_shape(rows: int, shards: int, outputs: int) -> DownShape:
    """The smallest blocks of which each has a multiprocessor, since one works through its inputs at a fixed pace."""
    fitting = (shape for shape in DOWN_SHAPES if prod(shape.grid(rows, shards, outputs)) <= memory.multiprocessors())
    return next(fitting, DOWN_SHAPES[-1])


@dataclass(frozen=True)
class GatedResidual:
    """One read site: norm_weight float32 [S*H] on the device, and its linear layers.

    inject_at: where `down` gives inject's outputs after its own, both in one layer that the kernels of whole reads
    take; None where the layers stay apart.
    """

    norm_weight: torch.Tensor
    down: LinearHandle
    up: LinearHandle
    inject: LinearHandle | None
    streams: int
    eps: float
    rank: int
    writes: bool
    inject_at: int | None

    @property
    def hidden(self) -> int:
        return self.norm_weight.numel() // self.streams

    @property
    def defines(self) -> dict[str, int]:
        """The macros that make the kernels of whole reads those of this site."""
        down = _half_layer(self.down)
        terms = down.shards * down.parts
        return {"STREAMS": self.streams, "HIDDEN": self.hidden, "STEPS": -(-self.rank // TILE), "TERMS": terms}

    @property
    def norm_shared(self) -> int:
        """Bytes that a block of norm_streams shares."""
        return 3 * self.hidden * FLOAT_BYTES

    @property
    def down_shared(self) -> int:
        """The most bytes that a block of down_many shares."""
        return DOWN_SHAPES[-1].shared(self.streams)

    @property
    def mix_shared(self) -> int:
        """Bytes that a block of mix_many shares."""
        steps = self.defines["STEPS"]
        return steps * WARP * MIX_COLUMNS * self.streams * 16


def prepare_gated_residual(
    norm_weight: np.ndarray,
    down: LinearHandle,
    up: LinearHandle,
    inject: LinearHandle | None,
    streams: int,
    eps: float,
) -> GatedResidual:
    """A read site from its norm weight [S*H] and linear handles; `inject` is None where nothing is written back."""
    weight = memory.to_device(np.asarray(norm_weight, np.float32))
    rank, writes = down.out_features, inject is not None
    inject_at = None
    if isinstance(down, HalfLayer) and _are_read_whole(down, up, inject, streams, weight.numel()):
        inject_at = down.stored_outputs
        down, inject = _joined(down, inject, streams), None
    return GatedResidual(weight, down, up, inject, streams, float(eps), rank, writes, inject_at)


def _are_read_whole(down: HalfLayer, up: LinearHandle, inject: LinearHandle | None, streams: int, width: int) -> bool:
    """Whether the kernels of whole reads take a site's layers."""
    layers = [down, up] if inject is None else [down, up, inject]
    if any(not isinstance(layer, HalfLayer) or layer.bias is not None for layer in layers):
        return False
    parts = [layer.parts for layer in layers if isinstance(layer, HalfLayer)]
    whole = width % (streams * TILE) == 0 and up.stored_inputs <= MOST_STEPS * TILE and streams <= MOST_STREAMS
    return whole and parts == [2, 1, 2][: len(parts)]


def _joined(down: HalfLayer, inject: LinearHandle | None, streams: int) -> HalfLayer:
    """One layer of down's outputs, zeros up to whole tiles, and inject's: an output's bytes depend on no other."""
    fragments, outputs = down.fragments, down.stored_outputs
    if isinstance(inject, HalfLayer):
        fragments = torch.cat([fragments, inject.fragments])
        outputs += streams
    return replace(
        down,
        out_features=outputs,
        stored_outputs=TILE * len(fragments),
        fragments=fragments,
        counters=memory.zeros((2 * len(fragments),), torch.int32),
    )


def expand_streams(x: torch.Tensor, streams: int) -> torch.Tensor:
    """x in every stream: float32 [R, H] -> [R, S, H]."""
    rows, hidden = x.shape
    out = memory.empty((rows, streams, hidden))
    if out.numel():
        kernel = kernels.load(STREAMS, "expand_streams")
        kernel((-(-hidden // THREADS), rows), THREADS, x, out, streams, hidden, early=True)
    return out


def gated_write_read(
    streams: torch.Tensor, injection: torch.Tensor, y: torch.Tensor, site: GatedResidual
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gated_write`, then `gated_read` at the next site: the same bytes, with fewer passes over the streams."""
    rows = len(streams)
    if rows and _can_read(site, _whole(rows)):
        mixed, next_injection = _results(rows, site)
        if rows <= MOST_FEW_ROWS:
            _read_few_rows(streams, site, mixed, next_injection, (injection, y))
        else:
            inverse = gated_write_normed(streams, injection, y, site.eps)
            _read_many_rows(streams, site, inverse, mixed, next_injection)
        return mixed, next_injection
    gated_write(streams, injection, y)
    return gated_read(streams, site)


def gated_read(
    streams: torch.Tensor, site: GatedResidual, inverse: torch.Tensor | None = None, how: int = BY_ROW_COUNT
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a block reads and how it writes back: [R, S, H] -> input [R, H], injection [R, S] or None.

    inverse: what `gated_write_normed` returned when it wrote the streams, float32 [R, S]; spares their norms. `how` is
    for the contract and changes no byte; raises KeyError when the site's layers or the device rule it out.
    """
    mixed, injection = _results(len(streams), site)
    if not len(streams):
        return mixed, injection
    if how == BY_ROW_COUNT:
        how = _whole(len(streams))
        how = how if _can_read(site, how) else LAYER_BY_LAYER
    if not _can_read(site, how):
        raise KeyError("the site's layers are read one by one on this device")
    if how == MANY_ROWS:
        _read_many_rows(streams, site, inverse, mixed, injection)
    else:
        (_read_few_rows if how == FEW_ROWS else _read_layer_by_layer)(streams, site, mixed, injection)
    return mixed, injection


def _results(rows: int, site: GatedResidual) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Room for what a read gives."""
    return memory.empty((rows, site.hidden)), memory.empty((rows, site.streams)) if site.writes else None


def _whole(rows: int) -> int:
    """How the kernels of whole reads read so many rows."""
    return FEW_ROWS if rows <= MOST_FEW_ROWS else MANY_ROWS


def _can_read(site: GatedResidual, how: int) -> bool:
    """Whether a site can be read so: many rows need much shared memory."""
    if how == LAYER_BY_LAYER or site.inject_at is None:
        return how == LAYER_BY_LAYER
    needed = max(site.down_shared, site.mix_shared) if how == MANY_ROWS else site.norm_shared
    return needed <= _shared_memory()


def _shared_memory() -> int:
    """The most bytes that a block can share."""
    if memory.is_emulated():
        return EMULATED_SHARED
    return int(memory.properties().shared_memory_per_block_optin)


def _read_few_rows(
    streams: torch.Tensor,
    site: GatedResidual,
    mixed: torch.Tensor,
    injection: torch.Tensor | None,
    written: Written | None = None,
) -> None:
    """Up to 64 rows in two to four launches: for some rows norm; down with inject; for some silu; up with the mix.

    written: an injection and y that are written to the streams first.
    """
    rows, count, hidden = streams.shape
    shape = down_few_shape(site, rows)
    normed = inverse = added = y = None
    if shape is None:
        normed = norm_streams(streams, site, written)
        sums = linear_layer.plain_sums(normed.view(rows, count * hidden), _half_layer(site.down))
    else:
        sums, inverse = down_few(streams, site, written, shape)
        added, y = written or (None, None)
    own = rows <= MOST_OWN_ROWS and rows * len(sums) <= MOST_OWN_TERMS
    low = None if own else finish_down(sums, site, injection)
    mix = kernels.load(MIX, "mix_few", **site.defines)
    read = normed, streams, added, y, inverse, Constant(site.norm_weight)
    arrays = Constant(_fragments(site.up)), sums, low, *read, mixed, injection if low is None else None
    mix(hidden // TILE + own, WARP * count, *arrays, rows, sums.shape[2], site.inject_at, early=True)


def down_few(
    streams: torch.Tensor, site: GatedResidual, written: Written | None, shape: PlainShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chains of down and inject over the streams as a write leaves them, normed, and the streams' factors.

    float32 [2 * shards, R, stored outputs] and [R, S], of few rows, by blocks of a `down_few_shape`. The streams stay.
    """
    rows, count, _ = streams.shape
    down = _half_layer(site.down)
    columns = down.stored_outputs
    sums, inverse = memory.empty((down.shards * down.parts, rows, columns)), memory.empty((rows, count))
    most_rows = 1 << (rows - 1).bit_length()
    defines = {"STREAMS": count, "HIDDEN": site.hidden, "ROWS": most_rows, "FEEDERS": shape.feeders, **shape.defines}
    injection, y = written or (None, None)
    kernels.load(DOWN_FEW, "down_few", **defines)(
        (columns // TILE, down.shards),
        (shape.chain_warps + shape.feeders) * WARP,
        Constant(down.fragments),
        Constant(site.norm_weight),
        streams,
        injection,
        y,
        sums,
        inverse,
        rows,
        site.eps,
        shared=shape.feeders * shape.chunk_bytes(down.parts),
        early=True,
    )
    return sums, inverse


def down_few_shape(site: GatedResidual, rows: int) -> PlainShape | None:
    """A block of down_few, which holds a whole shard of a few rows; None where it cannot, or shards divide streams."""
    down = _half_layer(site.down)
    if rows > MOST_NORMED_ROWS or any(first % site.hidden for first, _ in down.shard_bounds):
        return None
    inputs = max(last - first for first, last in down.shard_bounds)
    row_tiles = 1 if rows * down.parts <= ROW_TILE else 2
    feeders = -(-inputs // (TILE * CHUNK_TILES))
    shape = PlainShape(rows, row_tiles, 1, CHUNK_TILES, feeders)
    fits = feeders * shape.chunk_bytes(down.parts) <= min(ALONE_BYTES, _shared_memory() - OWN_BYTES)
    return shape if feeders <= MOST_FEEDERS and fits else None


def norm_streams(streams: torch.Tensor, site: GatedResidual, written: Written | None) -> torch.Tensor:
    """The normed streams [R, S, H] of few rows, after a write to them, if any; the site's weights come nearer."""
    rows, count, hidden = streams.shape
    normed = memory.empty(streams.shape)
    kernel = kernels.load(STREAMS, "norm_streams", HELD=0)
    injection, y = written or (None, None)
    weights = [(Constant(_fragments(layer)), layer.nbytes) for layer in (site.down, site.up)]
    sizes = rows * count, count, hidden, site.eps
    arrays = streams, injection, y, Constant(site.norm_weight), normed
    grid = rows * count + FETCH_BLOCKS
    kernel(grid, STAGED_THREADS, *arrays, *sizes, *weights[0], *weights[1], shared=site.norm_shared, early=True)
    return normed


def _read_many_rows(
    streams: torch.Tensor,
    site: GatedResidual,
    inverse: torch.Tensor | None,
    mixed: torch.Tensor,
    injection: torch.Tensor | None,
) -> None:
    """Any number of rows: streams are normed on their way into down, and again where they are mixed."""
    if inverse is None:
        inverse = inverse_norms(streams, site.eps)
    low = finish_down(down_sums(streams, inverse, site), site, injection)
    mix_rows(low, streams, inverse, site, mixed)


def down_sums(streams: torch.Tensor, inverse: torch.Tensor, site: GatedResidual) -> torch.Tensor:
    """The chains of down and inject over normed streams, float32 [2 * shards, R, stored outputs], of many rows."""
    rows, down = len(streams), site.down
    columns = down.stored_outputs
    sums = memory.empty((2 * down.shards, rows, columns))
    shape = down_shape(rows, down.shards, columns)
    defines = {"BLOCK_ROWS": shape.rows, "WARP_TILES": shape.warp_tiles, **site.defines}
    warpgroups = int(memory.architecture() in WARPGROUP_ARCHITECTURES)
    kernel = kernels.load(DOWN, "down_many", WARPGROUPS=warpgroups, **defines)
    arrays = _fragments(down), streams, inverse, site.norm_weight, sums
    grid, shared = shape.grid(rows, down.shards, columns), shape.shared(site.streams)
    kernel(grid, DOWN_WARPS * WARP, *arrays, rows, columns, shared=shared)
    return sums


def mix_rows(
    low: torch.Tensor, streams: torch.Tensor, inverse: torch.Tensor, site: GatedResidual, mixed: torch.Tensor
) -> None:
    """mixed [R, H], for many rows: the layer up, and the mean of the normed streams that it weighs."""
    rows, _, hidden = streams.shape
    units = -(-hidden // (TILE * MIX_COLUMNS)) * -(-rows // (ROW_TILE * MIX_ROW_TILES))
    kernel = kernels.load(MIX, "mix_many", **site.defines)
    arrays = _fragments(site.up), low, streams, inverse, site.norm_weight, mixed
    kernel(min(units, memory.multiprocessors()), MIX_THREADS, *arrays, rows, shared=site.mix_shared)


def finish_down(sums: torch.Tensor, site: GatedResidual, injection: torch.Tensor | None) -> torch.Tensor:
    """silu of down's outputs as the B operand of `up`, and the injection, from sums float32 [terms, R, columns]."""
    _, rows, columns = sums.shape
    steps, tiles = site.defines["STEPS"], -(-rows // ROW_TILE)
    low = memory.empty((tiles, steps, WARP, 4), torch.float16)
    kernel = kernels.load(MIX, "finish_down", **site.defines)
    threads = rows * (4 * steps + site.streams)
    kernel(-(-threads // THREADS), THREADS, sums, rows, columns, site.inject_at, low, injection, early=True)
    return low


def _half_layer(layer: LinearHandle) -> HalfLayer:
    assert isinstance(layer, HalfLayer)
    return layer


def _fragments(layer: LinearHandle) -> torch.Tensor:
    return _half_layer(layer).fragments


def _read_layer_by_layer(
    streams: torch.Tensor, site: GatedResidual, mixed: torch.Tensor, injection: torch.Tensor | None
) -> None:
    rows, count, hidden = streams.shape
    normed = group_norm(streams, site.norm_weight, count, site.eps)
    low, written = _down_and_inject(normed.view(rows, count * hidden), site)
    grid = -(-low.numel() // THREADS)
    kernels.load(LAYERS, "activate")(grid, THREADS, low, low.numel(), float(count))
    up = linear_layer.linear(low, site.up)
    grid_rows = -(-max(hidden, count) // THREADS), rows
    kernels.load(LAYERS, "mix")(grid_rows, THREADS, normed, up, written, mixed, injection, count, hidden)


def _down_and_inject(wide: torch.Tensor, site: GatedResidual) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums [R, rank] and [R, S], None without injections, of normed streams [R, S*H]."""
    sums = linear_layer.linear(wide, site.down)
    if site.inject_at is None:
        return sums, None if site.inject is None else linear_layer.linear(wide, site.inject)
    written = sums[:, site.inject_at :].contiguous() if site.writes else None
    return sums[:, : site.rank].contiguous(), written


def gated_write(streams: torch.Tensor, injection: torch.Tensor, y: torch.Tensor) -> None:
    """streams_s += injection_s * y, in place: [R, S, H], [R, S], [R, H]."""
    _add_to_streams(streams, injection, y)


def add_streams(streams: torch.Tensor, x: torch.Tensor) -> None:
    """x added to every stream, in place: [R, S, H], [R, H]."""
    _add_to_streams(streams, None, x)


def _add_to_streams(streams: torch.Tensor, injection: torch.Tensor | None, y: torch.Tensor) -> None:
    rows, count, width = streams.shape
    if streams.numel():
        whole = not (width % 4 or streams.data_ptr() % 16 or y.data_ptr() % 16)
        values = 4 if whole else 1
        kernel = kernels.load(STREAMS, "add_to_streams", VALUES=values)
        units = width // values
        kernel((-(-units // ADD_THREADS), rows), ADD_THREADS, streams, injection, y, count, units)


def gated_write_normed(streams: torch.Tensor, injection: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    """`gated_write`, and the factors that norm each stream as it then is: float32 [R, S], for the next `gated_read`."""
    rows, count, width = streams.shape
    inverse = memory.empty((rows, count))
    if streams.numel():
        kernel, grid, threads = _for_streams("write_streams", rows, count, width)
        kernel(grid, threads, streams, injection, y, inverse, rows * count, count, width, float(eps))
    return inverse


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
