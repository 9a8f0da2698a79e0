"""The linear layer on CUDA: tensor cores for trellis and half weights, float32 chains for what half cannot hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from isobit.checkpoint.weights import Linear
from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant
from isobit.ops.linear import cuda_dealt, cuda_layers, cuda_products
from isobit.ops.linear.cuda_layers import (
    BLOCK,
    MOST_FEW_ROWS,
    TILE,
    FloatLayer,
    HalfLayer,
    LinearHandle,
    TrellisLayer,
    trellis_defines,
)

__all__ = ["linear", "linears", "prepare_linear"]

BY_ROW_COUNT, FEW_ROWS, MANY_ROWS, OWN_PRODUCT = 0, 1, 2, 3  # how to compute; the first is what the model uses
WARP = 32
ALIGNED = 16  # bytes that a vector load takes
ROW_WARPS = 8  # of a block that rotates rows
WARP_ROWS = 4  # of many, that a warp rotates
ROW_THREADS = 256
OCTETS = ROW_THREADS // 8  # rows' blocks of 128 that a thread block rotates at a time
TURNS = 4  # warps that share a column of tiles
MOST_COLUMNS = 3
ONE_WAVE = 6  # chains that a multiprocessor carries at a time
MOST_UNITS = 8  # rows' blocks of 128 that a warp may rotate before it multiplies, four at a time
SHARED_OPERAND_BYTES = 64 << 10  # that a block copies at most, rather than reading it again and again
MOST_WARPS = {1: 12, 2: 12, 4: 8, 8: 8}  # of a block, by its tiles of 8 rows
WIDE_COLUMNS = 16  # of tiles for each multiprocessor, from which on every warp has its own
WIDE_STAGES = 3
MOST_FEEDERS = 14  # warps of a block of a plain layer that feed its chains
CHUNKS = ((8, 1, 1, 16), (16, 2, 1, 16), (32, 2, 2, 8), (64, 2, 4, 4))  # by the operand's columns: PlainShape's middle
ALONE_BYTES, PAIRED_BYTES = 208 << 10, 104 << 10  # of chunks in a block that has a multiprocessor alone, or shares it
CHAIN_OUTPUTS, CHAIN_WARPS = 32, 4  # of a block of the fused chain
CHAIN_THREAD_ROWS = (2, 8)  # of few rows and of many


def prepare_linear(weights: Linear) -> LinearHandle:
    """A layer's handle, its weights on the device: tiles as stored, plain weights in the order the product reads.

    Raises CheckpointError when the tensors of the layer do not fit each other.
    """
    return cuda_layers.prepare(weights)


def linear(x: torch.Tensor, handle: LinearHandle, how: int = BY_ROW_COUNT) -> torch.Tensor:
    """x float32 [R, in_features] -> float32 [R, out_features]. `how` is for the contract and changes no byte.

    Up to 64 rows nothing depends on a value, so that the call can be captured in a graph.
    """
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"linear: x is {x.dtype} with strides {x.stride()}, expected contiguous float32")
    rows, width = x.shape
    if width != handle.in_features:
        raise ValueError(f"linear: x has {width} columns, expected {handle.in_features}")
    y = memory.empty((rows, handle.out_features))
    if not rows:
        return y
    few = how == FEW_ROWS or (how == BY_ROW_COUNT and rows <= MOST_FEW_ROWS)
    if isinstance(handle, FloatLayer):
        float_rows(x, handle, y, few)
    elif few:
        few_rows(x, handle, y)
    else:
        many_rows(x, handle, y, how == OWN_PRODUCT)
    return y


def linears(x: torch.Tensor, handles: Sequence[LinearHandle]) -> list[torch.Tensor]:
    """Several layers of the same x: what `linear` gives for each; few rows side by side."""
    if len(x) > MOST_FEW_ROWS or memory.is_emulated():
        return [linear(x, handle) for handle in handles]
    main = torch.cuda.current_stream()
    forked, outputs = main.record_event(), [linear(x, handles[0])]
    for side, handle in zip(_side_streams(), handles[1:], strict=False):
        with torch.cuda.stream(side):
            side.wait_event(forked)
            try:
                outputs.append(linear(x, handle))
            finally:
                main.wait_event(side.record_event())
    return outputs + [linear(x, handle) for handle in handles[len(outputs) :]]


@cache
def _side_streams() -> tuple[torch.cuda.Stream, ...]:
    """Streams for layers beside another; what they allocate is used on the main stream only until they wait for it."""
    return tuple(torch.cuda.Stream() for _ in range(3))


def few_rows(x: torch.Tensor, handle: TrellisLayer | HalfLayer, y: torch.Tensor) -> None:
    """y [R, out_features] of up to 64 rows."""
    if isinstance(handle, TrellisLayer):
        few_trellis_rows(x, handle, y)
    else:
        few_plain_rows(x, handle, y)


def few_trellis_rows(x: torch.Tensor, handle: TrellisLayer, y: torch.Tensor) -> None:
    """The same of a trellis: rotate, decode and multiply, rotate back."""
    rows, width = x.shape
    blocks, tile_columns = handle.input_blocks, handle.stored_outputs // TILE
    if handle.shards == 1 and tile_columns >= WIDE_COLUMNS * memory.multiprocessors():
        wide_trellis_rows(x, handle, y)
        return
    shape = few_rows_shape(tile_columns, handle.shards, blocks, rows)
    inputs = x if shape.fused else rotated_operand(x, handle)
    values = memory.empty((handle.shards, rows, handle.stored_outputs))
    row_tiles, twice_bits = tiles_of(rows), handle.defines["TWICE_BITS"]
    stages = 3 if twice_bits <= 8 else 2
    shared = shape.columns * (shape.turns * stages * BLOCK * twice_bits + row_tiles * WARP * ALIGNED)
    operand_bytes = 2 * rows * BLOCK * -(-blocks // handle.shards)
    own_operand = shape.fused or (row_tiles == 1 and operand_bytes <= SHARED_OPERAND_BYTES)
    if own_operand:
        shared += operand_bytes
    defines = {"ROW_TILES": row_tiles, "FUSED": int(shape.fused), "SHARED_OPERAND": int(own_operand)}
    kernels.load("ops/linear/few_rows.cu", "few_rows", **defines, **handle.defines)(
        (-(-tile_columns // shape.columns), handle.shards),
        shape.columns * shape.turns * WARP,
        Constant(handle.trellis),
        inputs,
        Constant(handle.suh),
        values,
        handle.counters,
        tile_columns,
        blocks,
        rows,
        width,
        is_whole(x),
        shape.columns,
        shape.turns,
        Constant(handle.svh),
        Constant(handle.bias),
        y,
        handle.out_features,
        shared=shared,
        early=True,
    )


def wide_trellis_rows(x: torch.Tensor, handle: TrellisLayer, y: torch.Tensor) -> None:
    """The same of a layer with so many outputs that each warp has columns of its own."""
    rows = len(x)
    dealt = cuda_dealt.dealt_shape(handle, rows)
    if dealt is not None:
        cuda_dealt.dealt_rows(rotated_operand(x, handle), handle, y, dealt)
        return
    row_tiles = tiles_of(rows)
    wide = WIDE_SHAPES[row_tiles]
    defines = {"ROW_TILES": row_tiles, "WARP_COLUMNS": wide.warp_columns, **handle.defines}
    stage_bytes = wide.chunk_tiles * wide.warp_columns * TILE * handle.defines["TWICE_BITS"]
    kernels.load("ops/linear/few_rows_wide.cu", "few_rows_wide", **defines)(
        wide.blocks * memory.multiprocessors(),
        wide.warps * WARP,
        Constant(handle.trellis),
        rotated_operand(x, handle),
        memory.empty((rows, handle.stored_outputs)),
        handle.counters,
        handle.stored_outputs // TILE,
        handle.input_blocks,
        rows,
        Constant(handle.svh),
        Constant(handle.bias),
        y,
        handle.out_features,
        shared=wide.warps * WIDE_STAGES * stage_bytes,
        early=True,
    )


def rotated_operand(x: torch.Tensor, handle: TrellisLayer) -> torch.Tensor:
    """The rotated inputs of up to 64 rows in the order of the product's operand."""
    rows, width = x.shape
    blocks = handle.input_blocks
    operand = memory.empty((handle.stored_inputs // WARP, rows, WARP), torch.float16)
    rotate = kernels.load("ops/linear/inputs.cu", "rotate_few")
    grid, arrays = -(-blocks * rows // OCTETS), (x, Constant(handle.suh), operand)
    rotate(grid, ROW_THREADS, *arrays, rows, width, blocks, is_whole(x), early=True)
    return operand


def tiles_of(rows: int) -> int:
    """Tiles of 8 columns that hold `rows` of them: 1, 2, 4 or 8."""
    return next(tiles for tiles in (1, 2, 4, 8) if rows <= 8 * tiles)


@dataclass(frozen=True)
class WideShape:
    """Blocks of a multiprocessor and their warps; columns that a warp has at a time, and how many of their tiles."""

    blocks: int
    warps: int
    warp_columns: int
    chunk_tiles: int


WIDE_SHAPES = {1: WideShape(3, 8, 1, 8), 2: WideShape(3, 8, 1, 8), 4: WideShape(4, 4, 2, 4), 8: WideShape(3, 4, 2, 4)}


@dataclass(frozen=True)
class FewRowsShape:
    """A block: columns of tiles, warps that take turns on each, and whether it rotates the inputs itself."""

    columns: int
    turns: int
    fused: bool


@cache
def few_rows_shape(tile_columns: int, shards: int, blocks: int, rows: int) -> FewRowsShape:
    """The shape that spreads the chains most evenly over the multiprocessors; of several the widest."""
    turns = max(1, min(TURNS, blocks // shards))
    chains, processors = tile_columns * shards, memory.multiprocessors()

    def most_chains(columns: int) -> int:
        return columns * -(-(-(-tile_columns // columns) * shards) // processors)

    widest = MOST_WARPS[tiles_of(rows)] // turns
    columns = min(range(1, min(widest, MOST_COLUMNS) + 1), key=lambda count: (most_chains(count), -count))
    units = rows * -(-blocks // shards)
    fused = chains <= ONE_WAVE * processors and units <= MOST_UNITS * columns * turns
    return FewRowsShape(columns, turns, fused)


def few_plain_rows(x: torch.Tensor, handle: HalfLayer, y: torch.Tensor) -> None:
    """The same of half weights: inputs are rounded on their way, shards added by the block that comes last."""
    values = _room_for_sums(len(x), handle) if handle.shards > 1 else None
    _multiply_plain(x, handle, values, handle.counters, y)


def plain_sums(x: torch.Tensor, handle: HalfLayer) -> torch.Tensor:
    """What `few_plain_rows` adds in float64 in order: each shard's sums of each part [shards * parts, R, N]."""
    values = _room_for_sums(len(x), handle)
    _multiply_plain(x, handle, values, None, None)
    return values


def _room_for_sums(rows: int, handle: HalfLayer) -> torch.Tensor:
    return memory.empty((handle.shards * handle.parts, rows, handle.stored_outputs))


def _multiply_plain(
    x: torch.Tensor,
    handle: HalfLayer,
    values: torch.Tensor | None,
    counters: torch.Tensor | None,
    y: torch.Tensor | None,
) -> None:
    rows = len(x)
    if handle.in_features != handle.stored_inputs or not is_whole(x):
        x = padded(x, handle.stored_inputs)
    shape = plain_shape(handle.parts, handle.stored_outputs // TILE, handle.shards, handle.input_blocks, rows)
    kernels.load("ops/linear/few_rows_plain.cu", "few_rows_plain", PARTS=handle.parts, **shape.defines)(
        (handle.stored_outputs // TILE, handle.shards, -(-rows // shape.block_rows)),
        (shape.chain_warps + shape.feeders) * WARP,
        Constant(handle.fragments),
        x,
        values,
        counters,
        handle.stored_inputs // TILE,
        rows,
        shape.block_rows,
        Constant(handle.bias),
        y,
        handle.out_features,
        shared=shape.feeders * shape.chunk_bytes(handle.parts),
        early=True,
    )


@dataclass(frozen=True)
class PlainShape:
    """A block: its rows, tiles of 8 columns a chain warp, chain warps, tiles of a chunk, and the warps that feed."""

    block_rows: int
    row_tiles: int
    chain_warps: int
    chunk_tiles: int
    feeders: int

    @property
    def defines(self) -> dict[str, int]:
        return {"ROW_TILES": self.row_tiles, "CHAIN_WARPS": self.chain_warps, "CHUNK_TILES": self.chunk_tiles}

    def chunk_bytes(self, parts: int) -> int:
        """What a chunk's weights and operand take."""
        return self.chunk_tiles * WARP * (ALIGNED + self.block_rows * parts)


@cache
def plain_shape(parts: int, columns: int, shards: int, blocks: int, rows: int) -> PlainShape:
    """The shape whose feeders hold as much of a chain's inputs at a time as shared memory does."""
    block_rows = min(rows, CHUNKS[-1][0] // parts)
    row_tiles, chain_warps, chunk_tiles = next(sizes[1:] for sizes in CHUNKS if block_rows * parts <= sizes[0])
    alone = columns * shards * -(-rows // block_rows) <= memory.multiprocessors()
    most_tiles = -(-blocks // shards) * BLOCK // TILE
    chunks = -(-most_tiles // chunk_tiles)
    one = PlainShape(block_rows, row_tiles, chain_warps, chunk_tiles, 1)
    fitting = (ALONE_BYTES if alone else PAIRED_BYTES) // one.chunk_bytes(parts)
    return replace(one, feeders=min(MOST_FEEDERS, chunks, fitting))


def many_rows(x: torch.Tensor, handle: TrellisLayer | HalfLayer, y: torch.Tensor, own_product: bool) -> None:
    """y of any number of rows, some thousands at a time: weights expanded once, products at the tensor cores' rate."""
    weights, bounds = expanded(handle), handle.shard_bounds
    parts = handle.parts if isinstance(handle, HalfLayer) else 1
    halves = sums = memory.empty((0,))
    for part in cuda_products.passes(len(x), handle.stored_outputs, handle.shards * parts):
        rows = slice(part.first_row, part.first_row + part.rows)
        if part.first_output == 0:
            halves = memory.empty((parts, part.stored_rows, handle.stored_inputs), torch.float16)
            round_inputs(x[rows], handle, halves)
        shape = handle.shards, parts, part.stored_rows, part.outputs
        if sums.shape != shape:
            sums = memory.empty(shape)
        own_weights = weights[part.first_output : part.first_output + part.outputs]
        for index in range(parts):
            cuda_products.products(halves[index], own_weights, bounds, sums[:, index], own_product)
        finish_outputs(sums, handle, y[rows], part.first_output)


def round_inputs(x: torch.Tensor, handle: TrellisLayer | HalfLayer, halves: torch.Tensor) -> None:
    """Fill halves [parts, stored rows, stored inputs] with inputs, rotated or not; rows past x stay as they are."""
    rows, width = x.shape
    parts, stored_rows, columns = halves.shape
    if isinstance(handle, TrellisLayer):
        rotate = kernels.load("ops/linear/inputs.cu", "rotate_many")
        grid = handle.input_blocks, -(-rows // (ROW_WARPS * WARP_ROWS))
        rotate(grid, ROW_THREADS, x, handle.suh, halves, rows, width, handle.input_blocks, is_whole(x))
    else:
        rounded = kernels.load("ops/linear/inputs.cu", "round_many")
        grid = -(-columns // (4 * ROW_THREADS)), rows
        rounded(grid, ROW_THREADS, x, halves, stored_rows, width, columns, parts, is_whole(x))


def finish_outputs(
    sums: torch.Tensor, handle: TrellisLayer | HalfLayer, y: torch.Tensor, first_output: int = 0
) -> None:
    """Outputs first_output on of y [R, out_features] from their sums [shards, parts, stored rows, N]."""
    rows, outputs = y.shape
    shards, parts, stored_rows, columns = sums.shape
    shape = shards * parts, stored_rows, columns
    if isinstance(handle, TrellisLayer):
        rotate = kernels.load("ops/linear/outputs.cu", "rotate_outputs")
        grid = columns // BLOCK, -(-rows // (ROW_WARPS * WARP_ROWS))
        first_block = first_output // BLOCK
        scales, bias = Constant(handle.svh), Constant(handle.bias)
        rotate(grid, ROW_THREADS, sums, *shape, first_block, rows, scales, bias, y, outputs, early=True)
    else:
        total = kernels.load("ops/linear/outputs.cu", "sum_outputs")
        grid = -(-columns // ROW_THREADS), rows
        total(grid, ROW_THREADS, sums, *shape, first_output, Constant(handle.bias), y, outputs, early=True)


def expanded(handle: TrellisLayer | HalfLayer) -> torch.Tensor:
    """The layer's half weights [stored outputs, stored inputs]: between the rotations, of a trellis layer."""
    weights = memory.empty((handle.stored_outputs, handle.stored_inputs), torch.float16)
    columns, tiles = handle.stored_outputs // TILE, handle.stored_inputs // TILE
    if isinstance(handle, TrellisLayer):
        expand = kernels.load("ops/linear/expand.cu", "expand_trellis", **handle.defines)
        grid = handle.stored_outputs // BLOCK, handle.input_blocks
        expand(grid, ROW_THREADS, handle.trellis, weights, columns, handle.stored_inputs)
    else:
        expand = kernels.load("ops/linear/expand.cu", "expand_fragments", **trellis_defines("mul1", 3))
        expand((handle.input_blocks, columns), ROW_THREADS, handle.fragments, weights, tiles)
    return weights


def float_rows(x: torch.Tensor, handle: FloatLayer, y: torch.Tensor, few: bool) -> None:
    """y with the CPU's bytes; `few` rows or many only say how many of them a thread computes."""
    rows, width = x.shape
    columns, outputs = handle.stored_outputs, handle.out_features
    sums = memory.empty((handle.shards, rows, columns))
    thread_rows = CHAIN_THREAD_ROWS[0 if few else 1]
    defines = {"BFLOAT16": int(handle.weights.dtype == torch.int16), "THREAD_ROWS": thread_rows}
    chain = kernels.load("ops/linear/float_chain.cu", "float_chain", **defines)
    blocks = -(-columns // CHAIN_OUTPUTS), handle.shards, -(-rows // (CHAIN_WARPS * thread_rows))
    chain(blocks, CHAIN_WARPS * WARP, handle.weights, x, sums, width, handle.stored_inputs, columns, rows)
    total = kernels.load("ops/linear/outputs.cu", "sum_outputs")
    grid = -(-columns // ROW_THREADS), rows
    total(grid, ROW_THREADS, sums, handle.shards, rows, columns, 0, Constant(handle.bias), y, outputs, early=True)


def is_whole(x: torch.Tensor) -> bool:
    """Whether rows of x can be read 16 bytes at a time."""
    return x.shape[1] % 4 == 0 and x.data_ptr() % ALIGNED == 0


def padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """x with zeros up to `columns` columns, a multiple of 16."""
    rows, width = x.shape
    wider = memory.empty((rows, columns))
    pad = kernels.load("ops/linear/inputs.cu", "pad_inputs")
    pad((-(-columns // (4 * ROW_THREADS)), rows), ROW_THREADS, x, wider, width, columns, early=True)
    return wider
