"""The linear layer on CUDA: tensor cores for trellis and half weights, float32 chains for what half cannot hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, hypot

import torch

from isobit.checkpoint.weights import Linear
from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant, Fields
from isobit.ops.linear import cuda_dealt, cuda_layers, cuda_products
from isobit.ops.linear.cuda_layers import (
    BLOCK,
    MOST_FEW_ROWS,
    MOST_PASSED_ROWS,
    TILE,
    FloatLayer,
    HalfLayer,
    LinearHandle,
    TrellisLayer,
    trellis_defines,
)

__all__ = ["linear", "linears", "prepare_linear"]

BY_ROW_COUNT, FEW_ROWS, MANY_ROWS, OWN_PRODUCT, AS_WIDE = range(5)  # how to compute; the model uses the first
WARP = 32
ALIGNED = 16  # bytes that a vector load takes
ROW_WARPS = 8  # of a block that rotates rows
WARP_ROWS = 4  # of many, that a warp rotates
ROW_THREADS = 256
OCTETS = ROW_THREADS // 8  # rows' blocks of 128 that a thread block rotates at a time
MOST_TURNS = 8  # warps that share a column of tiles
WARP_UNITS = 2  # blocks of 128 inputs that a warp of few_rows.cu rotates at a time
FINISHED_ROWS = 4  # of more than 16, that a warp rotates out together, as in few_rows.cu
ROTATED_BYTES = 64 << 10  # of rotated inputs that a block makes at most
COPIED_BYTES = 96 << 10  # that it copies at most, rather than reading them for every column
BLOCK_COLUMNS = BLOCK // TILE
MOST_FEW_PLAIN_ROWS = 256  # of plain layers without shards, up to which one launch replaces expanding their weights
MOST_GROUPED = 4  # layers of one launch, as in few_rows.cu and few_rows_plain.cu
WIDE_COLUMNS = 16  # of tiles for each multiprocessor, from which on every warp has its own
WIDE_STAGES = 3
CONTRACT_PROCESSORS = 2  # that a layer is spread over which is computed as if it were wide
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
    checked(x, handle)
    rows = len(x)
    y = memory.empty((rows, handle.out_features))
    if not rows:
        return y
    few = how in (FEW_ROWS, AS_WIDE) or (how == BY_ROW_COUNT and rows <= most_few_rows(handle))
    if isinstance(handle, FloatLayer):
        float_rows(x, handle, y, few)
    elif how == AS_WIDE and isinstance(handle, TrellisLayer) and handle.shards == 1:
        wide_trellis_rows(x, handle, y, CONTRACT_PROCESSORS)
    elif few:
        few_rows(x, handle, y)
    else:
        many_rows(x, handle, y, how == OWN_PRODUCT)
    return y


def most_few_rows(handle: LinearHandle) -> int:
    """Up to how many rows a layer is computed by the kernels of few rows."""
    return MOST_FEW_PLAIN_ROWS if isinstance(handle, HalfLayer) and handle.shards == 1 else MOST_FEW_ROWS


def checked(x: torch.Tensor, handle: LinearHandle) -> None:
    """Raises TypeError or ValueError for an x that is no input of the layer."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"linear: x is {x.dtype} with strides {x.stride()}, expected contiguous float32")
    if x.shape[1] != handle.in_features:
        raise ValueError(f"linear: x has {x.shape[1]} columns, expected {handle.in_features}")


def linears(x: torch.Tensor, handles: Sequence[LinearHandle]) -> list[torch.Tensor]:
    """Different layers of the same x: what `linear` gives for each; few rows in one launch, or side by side."""
    rows = len(x)
    if not 0 < rows <= MOST_FEW_PLAIN_ROWS:
        return [linear(x, handle) for handle in handles]
    outputs: dict[int, torch.Tensor] = {}
    if rows <= MOST_FEW_ROWS:
        side_by_side([partial(_compute_group, x, handles, group, outputs) for group in groups_of(handles)])
    else:
        for group in groups_of(handles):
            is_few = rows <= most_few_rows(handles[group[0]])
            for part in [group] if is_few else [(index,) for index in group]:
                _compute_group(x, handles, part, outputs)
    return [outputs[index] for index in range(len(handles))]


def side_by_side(launches: Sequence[Callable[[], object]]) -> None:
    """The first on the current stream and the others in turn beside it; the current stream waits for them."""
    first, *others = launches
    if memory.is_emulated() or not others:
        for launch in launches:
            launch()
        return
    main, side = torch.cuda.current_stream(), _side_stream()
    forked = main.record_event()
    first()
    with torch.cuda.stream(side):
        side.wait_event(forked)
        try:
            for launch in others:
                launch()
        finally:
            main.wait_event(side.record_event())


def groups_of(handles: Sequence[LinearHandle]) -> list[tuple[int, ...]]:
    """The places of the layers that one launch computes, the largest launch first."""
    alike: dict[tuple, list[int]] = {}
    for index, handle in enumerate(handles):
        alike.setdefault(_group_key(handle, index), []).append(index)
    groups = [
        tuple(places[first : first + MOST_GROUPED])
        for places in alike.values()
        for first in range(0, len(places), MOST_GROUPED)
    ]
    return sorted(groups, key=lambda group: -sum(handles[index].nbytes for index in group))


def _group_key(handle: LinearHandle, index: int) -> tuple:
    """Equal for layers that can be in one launch, which has one format and no shards."""
    if isinstance(handle, FloatLayer) or handle.shards > 1:
        return (index,)
    if isinstance(handle, HalfLayer):
        return ("half", handle.in_features, handle.parts)
    return (index,) if is_wide(handle) else ("trellis", handle.in_features, *sorted(handle.defines.items()))


def _compute_group(
    x: torch.Tensor, handles: Sequence[LinearHandle], group: tuple[int, ...], outputs: dict[int, torch.Tensor]
) -> None:
    first, *_ = layers = [handles[index] for index in group]
    if len(layers) == 1:
        outputs[group[0]] = linear(x, first)
        return
    checked(x, first)
    computed = [memory.empty((len(x), layer.out_features)) for layer in layers]
    if isinstance(first, TrellisLayer):
        few_trellis_rows(x, [layer for layer in layers if isinstance(layer, TrellisLayer)], computed)
    else:
        _multiply_plain(x, [layer for layer in layers if isinstance(layer, HalfLayer)], None, None, computed)
    outputs.update(zip(group, computed, strict=True))


@cache
def _side_stream() -> torch.cuda.Stream:
    """For layers beside another; what they allocate is used on the main stream only until that waits for them."""
    return torch.cuda.Stream()


def few_rows(x: torch.Tensor, handle: TrellisLayer | HalfLayer, y: torch.Tensor) -> None:
    """y [R, out_features] of up to 64 rows, of a plain layer without shards any number."""
    if isinstance(handle, TrellisLayer):
        few_trellis_rows(x, [handle], [y])
    else:
        few_plain_rows(x, handle, y)


def few_trellis_rows(x: torch.Tensor, layers: Sequence[TrellisLayer], outputs: Sequence[torch.Tensor]) -> None:
    """The same of a trellis, or of several of one group: rotate, decode and multiply, rotate back."""
    first = layers[0]
    if is_wide(first):
        wide_trellis_rows(x, first, outputs[0], memory.multiprocessors())
        return
    rows, width = x.shape
    chunks, shards = first.input_blocks, first.shards
    columns = tuple(layer.stored_outputs // TILE for layer in layers)
    shape = few_rows_shape(columns, shards, chunks, rows)
    row_tiles, twice_bits = tiles_of(rows), first.defines["TWICE_BITS"]
    own_operand = has_own_operand(shape, shards, chunks, rows)
    table, blocks = layer_table(x, layers, outputs, shape)
    defines = {"ROW_TILES": row_tiles, "FUSED": int(shape.fused), "SHARED_OPERAND": int(own_operand)}
    defines |= {"ONE_ROW": int(rows == 1), "TURN_BLOCKS": shape.turn_blocks}
    kernels.load("ops/linear/few_rows.cu", "few_rows", **defines, **first.defines)(
        (blocks, shards),
        (WARP, shape.turns, shape.columns),
        table,
        chunks,
        rows,
        width,
        is_whole(x),
        shared=shared_bytes(shape, shards, chunks, rows, twice_bits),
        early=True,
    )


def layer_table(
    x: torch.Tensor, layers: Sequence[TrellisLayer], outputs: Sequence[torch.Tensor], shape: "FewRowsShape"
) -> tuple[Fields, int]:
    """(What few_rows reads of each layer, how many blocks a shard of all of them has)."""
    passes = passes_sums(shape, layers[0].shards, len(x))
    fields: list = []
    blocks = 0
    for layer, y in zip(layers, outputs, strict=True):
        columns = layer.stored_outputs // TILE
        values = None if passes else memory.empty((layer.shards, len(x), layer.stored_outputs))
        fields += (Constant(layer.trellis), Constant(layer.suh), Constant(layer.svh), Constant(layer.bias))
        fields += (x if shape.fused else rotated_operand(x, layer), values, layer.counters, layer.passed, y)
        fields += (columns, layer.out_features, blocks)
        blocks += -(-columns // shape.columns)
    no_layer = *(None,) * 9, 0, 0, blocks
    return Fields(*fields, *no_layer * (MOST_GROUPED - len(layers))), blocks


def is_wide(layer: TrellisLayer) -> bool:
    """Whether there are so many outputs that each warp has columns of its own."""
    return layer.shards == 1 and layer.stored_outputs // TILE >= WIDE_COLUMNS * memory.multiprocessors()


def wide_trellis_rows(x: torch.Tensor, handle: TrellisLayer, y: torch.Tensor, processors: int) -> None:
    """The same of a layer with so many outputs that each warp of the multiprocessors has columns of its own."""
    rows = len(x)
    dealt = cuda_dealt.dealt_shape(handle, rows)
    if dealt is not None:
        cuda_dealt.dealt_rows(rotated_operand(x, handle), handle, y, dealt, processors)
        return
    row_tiles = tiles_of(rows)
    wide = WIDE_SHAPES[row_tiles]
    defines = {"ROW_TILES": row_tiles, "WARP_COLUMNS": wide.warp_columns, **handle.defines}
    stage_bytes = wide.chunk_tiles * wide.warp_columns * TILE * handle.defines["TWICE_BITS"]
    kernels.load("ops/linear/few_rows_wide.cu", "few_rows_wide", **defines)(
        wide.blocks * processors,
        wide.warps * WARP,
        *cuda_dealt.wide_arguments(rotated_operand(x, handle), handle, y),
        shared=wide.warps * WIDE_STAGES * stage_bytes,
        early=True,
    )


def rotated_operand(x: torch.Tensor, handle: TrellisLayer) -> torch.Tensor:
    """The rotated inputs of up to 64 rows in the order of the product's operand, and room to read whole tiles of 8."""
    rows, width = x.shape
    blocks, read_more = handle.input_blocks, 8 * tiles_of(rows) - rows
    operand = memory.empty((handle.stored_inputs // WARP * rows + read_more, WARP), torch.float16)
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
    """A block: columns of tiles, warps that take turns on each, and whether it rotates the inputs itself.

    turn_blocks: of 128 inputs that a warp decodes at a time.
    """

    columns: int
    turns: int
    fused: bool
    turn_blocks: int = 1

    @property
    def warps(self) -> int:
        return self.columns * self.turns


@dataclass(frozen=True)
class FewRowsCost:
    """What the parts of few_rows take: cycles, or a warp's issue slots, of which a scheduler has one a cycle."""

    begin: int = 180  # slots of a warp outside of the loop
    chunk: int = 380  # slots of a warp for 128 inputs of 8 rows or fewer
    tile: int = 20  # more slots for every 8 rows more
    rotation: int = 131  # slots of a warp for four units, each a row's block of 128 inputs
    rotated: int = 2000  # cycles until the first four units of every warp are rotated
    apart: int = 4600  # cycles of a layer's rotation by a kernel of its own
    decoded: int = 700  # cycles of decoding for 128 inputs
    decoded_rows: int = 300  # more cycles for more than one row and up to 16
    carried: int = 430  # cycles of the products of 128 inputs and of handing the chain over
    crowded: int = 40  # more cycles for every warp of a scheduler past the second
    carried_block: int = 264  # more cycles for 128 inputs more in a turn
    carried_tile: int = 100  # more cycles for 8 rows more
    carried_beside: int = 50  # the same of more than 16 rows, whose products do not wait for each other
    met: int = 2880  # cycles until a counter says that other blocks' sums are there, and they are
    passed: int = 1500  # the same of sums that say so themselves
    finished: int = 1200  # cycles until a warp has rotated out a block of four rows of more than 16
    late: int = 1700  # cycles of a block that cannot begin while the kernel before runs, unless that rotates inputs
    late_awaited: int = 500  # the same of one that awaits its inputs halfway through its first decoding
    room: float = 1 / 3  # of a multiprocessor's warps, which a block of no more warps finds free meanwhile
    no_room: float = 5 / 6  # the same that are never free
    read: int = 53  # bytes a cycle that a multiprocessor has of the second-level cache


FEW_ROWS_COST = FewRowsCost()
SCHEDULERS = 4  # of a multiprocessor


def few_rows_shape(tile_columns: tuple[int, ...], shards: int, chunks: int, rows: int) -> FewRowsShape:
    """The shape of least cost for layers of so many columns; of several the one with the most warps."""
    return least_cost_shape(tile_columns, shards, chunks, rows, memory.multiprocessors())


@cache
def least_cost_shape(
    tile_columns: tuple[int, ...], shards: int, chunks: int, rows: int, processors: int
) -> FewRowsShape:
    """The same on a GPU of so many multiprocessors."""

    def cost(shape: FewRowsShape) -> tuple[float, int]:
        cycles = few_rows_cycles(shape, tile_columns, shards, chunks, rows, processors)
        return cycles, -shape.warps

    return min(possible_shapes(shards, chunks, rows), key=cost)


def possible_shapes(shards: int, chunks: int, rows: int) -> list[FewRowsShape]:
    """All that a block can be; none has more turns than the shortest shard has chunks."""
    fits = operand_bytes(shards, chunks, rows) <= ROTATED_BYTES
    kinds = [(True, 1), (False, 1)] if fits else [(False, 1)]
    if fits and rows == 1 and all(shard * chunks // shards % 2 == 0 for shard in range(1, shards + 1)):
        kinds.append((True, 2))
    shapes = [
        FewRowsShape(columns, turns, fused, turn_blocks)
        for fused, turn_blocks in kinds
        for turns in range(1, max(1, min(MOST_TURNS, chunks // shards // turn_blocks)) + 1)
        for columns in range(1, resident_warps(rows, turn_blocks) // turns + 1)
    ]
    return [shape for shape in shapes if shape.turn_blocks == 1 or WARP_UNITS * shape.warps >= -(-chunks // shards)]


def resident_warps(rows: int, turn_blocks: int) -> int:
    """Of a multiprocessor, as in few_rows.cu."""
    return 12 if tiles_of(rows) > 2 or turn_blocks > 1 else 24


def operand_bytes(shards: int, chunks: int, rows: int) -> int:
    """What the rotated inputs of the longest shard take."""
    return 2 * rows * BLOCK * -(-chunks // shards)


def has_own_operand(shape: FewRowsShape, shards: int, chunks: int, rows: int) -> bool:
    """Whether a block has the rotated inputs in shared memory."""
    return shape.fused or (tiles_of(rows) <= 2 and operand_bytes(shards, chunks, rows) <= COPIED_BYTES)


def shared_bytes(shape: FewRowsShape, shards: int, chunks: int, rows: int, twice_bits: int) -> int:
    """What a block takes: its warps' chunks, the chains that they hand over, and perhaps the rotated inputs."""
    stages = 3 if twice_bits <= 8 and tiles_of(rows) != 2 else 2
    chunk_bytes = shape.turn_blocks * BLOCK * twice_bits
    taken = shape.columns * (shape.turns * stages * chunk_bytes + tiles_of(rows) * WARP * ALIGNED)
    return taken + (operand_bytes(shards, chunks, rows) if has_own_operand(shape, shards, chunks, rows) else 0)


def few_rows_cycles(
    shape: FewRowsShape, tile_columns: tuple[int, ...], shards: int, chunks: int, rows: int, processors: int
) -> float:
    """About how many cycles the multiprocessor with the most blocks takes, but for what all shapes wait for."""
    cost, own_chunks, more_tiles = FEW_ROWS_COST, -(-chunks // shards), tiles_of(rows) - 1
    warps, units = shape.warps, rows * own_chunks
    blocks = shards * sum(-(-columns // shape.columns) for columns in tile_columns)
    fullest = -(-blocks // processors)
    rounds = ceil(fullest / (resident_warps(rows, shape.turn_blocks) // warps))
    together = warps * ceil(fullest / rounds) / SCHEDULERS
    # The scheduler with the most warps is the last to end.
    uneven = ceil(together) / together
    issued = uneven * (warps * cost.begin + shape.columns * own_chunks * (cost.chunk + more_tiles * cost.tile))
    carried = cost.carried + max(0.0, together - 2) * cost.crowded + (shape.turn_blocks - 1) * cost.carried_block
    carried += more_tiles * (cost.carried_tile if more_tiles <= 1 else cost.carried_beside)
    decoded = shape.turn_blocks * cost.decoded + (cost.decoded_rows if 1 < rows <= 16 else 0)
    waited = ceil(own_chunks / shape.turn_blocks) * max(carried, (decoded + carried) / shape.turns)
    apart = 0 if shape.fused else len(tile_columns) * cost.apart
    between = 0.0
    if shape.fused:
        late = cost.late if shape.turn_blocks == 1 else cost.late_awaited
        between += late_share(shape, blocks, rows, processors) * late
        issued += ceil(units / 4) * cost.rotation
        between += rounds * ceil(units / (4 * warps)) * cost.rotated
    if not passes_sums(shape, shards, rows):
        between += rounds * cost.met
    elif shape.columns % BLOCK_COLUMNS:
        between += rounds * cost.passed
    if more_tiles > 1:
        own_blocks = -(-shape.columns // BLOCK_COLUMNS)
        between += ceil(own_blocks * ceil(rows / FINISHED_ROWS) / warps) * cost.finished
    times_read = 2 if shape.fused else 1 if has_own_operand(shape, shards, chunks, rows) else shape.columns
    read = fullest * times_read * operand_bytes(shards, chunks, rows) / cost.read
    # Warps that wait leave their slots to others, but not at the beginning and at the end.
    return hypot(fullest * issued / SCHEDULERS, rounds * waited) + between + read + apart


def late_share(shape: FewRowsShape, blocks: int, rows: int, processors: int) -> float:
    """From 0, blocks begin beside the kernel before, which is taken to be alike, to 1: they begin once it has ended."""
    cost, own = FEW_ROWS_COST, shape.warps / resident_warps(rows, shape.turn_blocks)
    beside_none = min(1.0, max(0.0, (own - cost.room) / (cost.no_room - cost.room))) if blocks <= processors else 1.0
    return beside_none * min(1.0, max(0.0, 2 * blocks / processors - 1))


def passes_sums(shape: FewRowsShape, shards: int, rows: int) -> bool:
    """Whether sums go from block to block as they come, or all are in blocks of whole 128 outputs."""
    return shards == 1 and (shape.columns % BLOCK_COLUMNS == 0 or rows <= MOST_PASSED_ROWS)


def few_plain_rows(x: torch.Tensor, handle: HalfLayer, y: torch.Tensor) -> None:
    """The same of half weights: inputs are rounded on their way, shards added by the block that comes last."""
    values = _room_for_sums(len(x), handle) if handle.shards > 1 else None
    _multiply_plain(x, [handle], values, handle.counters, [y])


def plain_sums(x: torch.Tensor, handle: HalfLayer) -> torch.Tensor:
    """What `few_plain_rows` adds in float64 in order: each shard's sums of each part [shards * parts, R, N]."""
    values = _room_for_sums(len(x), handle)
    _multiply_plain(x, [handle], values, None, [None])
    return values


def _room_for_sums(rows: int, handle: HalfLayer) -> torch.Tensor:
    return memory.empty((handle.shards * handle.parts, rows, handle.stored_outputs))


def _multiply_plain(
    x: torch.Tensor,
    layers: Sequence[HalfLayer],
    values: torch.Tensor | None,
    counters: torch.Tensor | None,
    outputs: Sequence[torch.Tensor | None],
) -> None:
    """Half weights times x: to each layer's outputs, of one shard, or to the values of a single layer's shards."""
    rows, first = len(x), layers[0]
    if first.in_features != first.stored_inputs or not is_whole(x):
        x = padded(x, first.stored_inputs)
    table, columns = _plain_table(layers, outputs)
    shape = plain_shape(first.parts, columns, first.shards, first.input_blocks, rows)
    kernels.load("ops/linear/few_rows_plain.cu", "few_rows_plain", PARTS=first.parts, **shape.defines)(
        (columns, first.shards, -(-rows // shape.block_rows)),
        (shape.chain_warps + shape.feeders) * WARP,
        table,
        x,
        values,
        counters,
        first.stored_inputs // TILE,
        rows,
        shape.block_rows,
        shared=shape.feeders * shape.chunk_bytes(first.parts),
        early=True,
    )


def _plain_table(layers: Sequence[HalfLayer], outputs: Sequence[torch.Tensor | None]) -> tuple[Fields, int]:
    """(What few_rows_plain reads of each layer, how many columns of tiles all of them have)."""
    fields: list = []
    columns = 0
    for layer, y in zip(layers, outputs, strict=True):
        fields += (Constant(layer.fragments), Constant(layer.bias), y, layer.out_features, columns)
        columns += layer.stored_outputs // TILE
    no_layer = None, None, None, 0, columns
    return Fields(*fields, *no_layer * (MOST_GROUPED - len(layers))), columns


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
    halves = sums = None
    for part in cuda_products.passes(len(x), handle.stored_outputs, handle.shards * parts):
        own_x, own_y = part.rows_of(x), part.rows_of(y)
        if halves is None or part.first_output == 0:
            halves = memory.empty((parts, part.stored_rows, handle.stored_inputs), torch.float16)
            round_inputs(own_x, handle, halves)
        shape = handle.shards, parts, part.stored_rows, part.outputs
        if sums is None or sums.shape != shape:
            sums = memory.empty(shape)
        own_weights = part.outputs_of(weights)
        for index in range(parts):
            cuda_products.products(halves[index], own_weights, bounds, sums[:, index], own_product)
        finish_outputs(sums, handle, own_y, part.first_output)


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
