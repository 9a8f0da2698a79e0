"""The mixture of experts on CUDA: preparing weights, the router's choice, and one call for any number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.checkpoint.weights import Linear, PlainLinear
from isobit.cuda import kernels, memory
from isobit.cuda.kernels import Constant, Settled
from isobit.ops.experts.cuda_layers import BLOCK, TILE, PlacedLayers, place_layers, stored_sizes, whole_blocks
from isobit.ops.experts.cuda_shapes import MANY_BLOCKS_WARPS, Products, Shape, even_blocks, many_blocks
from isobit.ops.experts.stored import checked_experts

__all__ = ["experts", "prepare_experts", "route"]

BY_ROW_COUNT, FEW_ROWS, MANY_ROWS, MANY_ROWS_BY_WARPS = 0, 1, 2, 3  # how to compute; the first is what the model uses
MOST_FEW_ROWS = 64
ROUTE_WARPS = 4  # rows of a thread block, where there are many
MOST_SCRATCH_BYTES = 1 << 30  # of one pass over the experts
MOST_MANY_ROWS = 8192  # of one pass
WARPGROUP_ARCHITECTURES = ((9, 0),)  # whose tensor cores take rows from shared memory, to more speed and the same bits
WARPGROUPS_ROW_TILE = 160  # the most rows of one expert in a thread block
ROUTE = "ops/experts/route.cu"
FEW, FEW_PRODUCTS = "ops/experts/few_rows.cu", "ops/experts/few_products.cu"
MANY, MANY_PRODUCTS = "ops/experts/many_rows.cu", "ops/experts/many_products.cu"
GATE_ROWS = 32  # rows of a thread block that computes the shared expert's gate
TILE_ROWS, MOST_PARTS = 8, 8  # of few_products.cu
MOST_COLUMNS = {
    "multiply_gate_up": 8,
    "multiply_down": 32,
}  # of 16 outputs in a thread block of rows that are not fused
ENOUGH_BLOCKS = 2048  # to keep every processor busy with such rows
MANY_BLOCKS = 1024  # of the fewest columns: shared out as such rows are, even if they are fused
MOST_FUSED_ROWS = 4  # that thread blocks rotate themselves
ROW_PADDING = 32  # of halves, of such a row
FEW_GATE_BYTES = 2 * 4 * (4 * (BLOCK + 4) + BLOCK)  # of shared memory: twice 128 inputs of the shared expert's gate
SMALL_SHARED = ((0, 0), (8, 6), (8, 9), (12, 0), (12, 1))  # architectures with little shared memory
MANY_STAGES, STAGE_INPUTS, SUMS_PADDING = 3, 64, 4  # of many_products.cu


@dataclass(frozen=True)
class ExpertsHandle:
    """The experts of one layer on the device.

    width, inner_width: hidden and inner values in whole blocks. gate: the shared expert's gate, its float32 weights
    padded to whole steps of 16, and its bias; or `gate_linear`, a handle of the linear op, where it is not plain.
    inner_counters, outer_counters, row_counters: zeros, with which warps see who comes last; zeros again after every
    call.
    """

    routed: int
    hidden: int
    width: int
    inner_width: int
    layers: PlacedLayers
    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    gate_linear: Any
    inner_counters: torch.Tensor
    outer_counters: torch.Tensor
    row_counters: torch.Tensor
    nbytes: int


def prepare_experts(
    gate: Sequence[Linear],
    up: Sequence[Linear],
    down: Sequence[Linear],
    shared_gate: Linear,
    shared_up: Linear,
    shared_down: Linear,
    shared_expert_gate: Linear,
) -> ExpertsHandle:
    """The experts' handle. Raises CheckpointError when the layers do not fit each other."""
    shared = shared_gate, shared_up, shared_down
    triples = checked_experts(gate, up, down, shared, shared_expert_gate)
    hidden = gate[0].in_features
    layers = place_layers([weights for triple in triples for weights in triple])
    weights, bias, linear_handle = _place_gate(shared_expert_gate)
    inner_width = max(whole_blocks(triple[0].out_features) for triple in triples)
    gate_bytes = linear_handle.nbytes if weights is None else weights.nbytes
    return ExpertsHandle(
        routed=len(gate),
        hidden=hidden,
        width=whole_blocks(hidden),
        inner_width=inner_width,
        layers=layers,
        gate=weights,
        gate_bias=bias,
        gate_linear=linear_handle,
        inner_counters=memory.zeros((len(triples), MOST_PARTS, inner_width // BLOCK), torch.int32),
        outer_counters=memory.zeros((len(triples), MOST_PARTS, whole_blocks(hidden) // BLOCK), torch.int32),
        row_counters=memory.zeros((MOST_FEW_ROWS, whole_blocks(hidden) // BLOCK), torch.int32),
        nbytes=layers.nbytes + gate_bytes,
    )


def route(
    logits: torch.Tensor, chosen: int, renormalise: bool, how: int = BY_ROW_COUNT
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `chosen` likeliest experts of each row, ties to the lower id: float32 [R, E] -> (ids, weights).

    ids: int32 [R, chosen], ascending. weights: float32 [R, chosen], softmax probabilities, divided by their sum if
    `renormalise`. `how` is for the contract and changes no byte. Raises ValueError when there are fewer experts than
    `chosen`.
    """
    rows, count = logits.shape
    if not 0 < chosen <= count:
        raise ValueError(f"route: {chosen} of {count} experts asked for")
    ids, weights = memory.empty((rows, chosen), torch.int32), memory.empty((rows, chosen))
    if rows:
        warps = 1 if _few(rows, how) else ROUTE_WARPS
        kernel = kernels.load(ROUTE, "route", COUNT=count, CHOSEN=chosen, RENORMALISE=int(renormalise))
        kernel(-(-rows // warps), 32 * warps, logits, ids, weights, rows, early=True)
    return ids, weights


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: ExpertsHandle, how: int = BY_ROW_COUNT
) -> torch.Tensor:
    """The chosen experts' weighted sum and the shared expert: x float32 [R, H] -> float32 [R, H].

    ids: int32 [R, chosen], ascending in a row, as `route` gives them. weights: float32 [R, chosen]. `how` is for the
    contract and changes no byte. Buffers take at most about MOST_SCRATCH_BYTES. Up to 64 rows nothing depends on a
    value on the host, so that the call can be captured in a graph.
    """
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise TypeError(f"experts: x is {x.dtype} with strides {x.stride()}, expected contiguous float32")
    rows, width = x.shape
    if width != handle.hidden:
        raise ValueError(f"experts: x has {width} columns, expected {handle.hidden}")
    y = memory.empty((rows, width))
    few = _few(rows, how)
    most_rows = MOST_FEW_ROWS if few else _most_rows(handle, ids.shape[1])
    for first in range(0, rows, most_rows):
        part = slice(first, first + most_rows)
        inputs = x[part], ids[part], weights[part], handle, y[part]
        if few:
            _few_rows(*inputs)
        else:
            _many_rows(*inputs, by_warps=how == MANY_ROWS_BY_WARPS)
    return y


def _few(rows: int, how: int) -> bool:
    return rows <= MOST_FEW_ROWS if how == BY_ROW_COUNT else how == FEW_ROWS


def _few_rows(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: ExpertsHandle, y: torch.Tensor
) -> None:
    rows, chosen = ids.shape
    pairs, tiles = rows * (chosen + 1), rows * chosen + -(-rows // TILE_ROWS)
    width, inner_width, table = handle.width, handle.inner_width, Constant(handle.layers.table)
    fused = rows <= MOST_FUSED_ROWS
    ready = tile_list = members = None
    if not fused:
        ready = memory.empty((2, pairs, width), torch.float16)
        tile_list, members = memory.empty((tiles, 4), torch.int32), memory.empty((tiles, TILE_ROWS), torch.int32)
        kernels.load(FEW, "prepare_rows")(
            (-(-width // (4 * BLOCK)), pairs), 32, x, ids, table, ready, tile_list, members, rows, chosen,
            handle.routed, handle.hidden, width, early=True,
        )  # fmt: skip
    logits, gate = _gate_logits(x, handle), handle.gate
    halves, floats = _hidden_values(handle, pairs)
    inner_sums, sums = memory.empty((pairs, 2, inner_width)), memory.empty((pairs, width))
    macros = {**handle.layers.macros, "FUSED": int(fused)}
    products = few_products("multiply_gate_up", handle, rows, chosen)
    shape = few_shape("multiply_gate_up", products, fused)
    gate_rows = 0 if gate is None or (fused and shape.leaves_idle_warp(products)) else 1
    kernels.load(FEW_PRODUCTS, "multiply_gate_up", **macros, **shape.macros())(
        (2 * shape.slices(products), gate_rows + tiles), 32 * shape.warps, table, tile_list, members, ids, rows, chosen,
        handle.routed, ready, width, x, handle.hidden, inner_sums, handle.inner_counters, halves, floats, inner_width,
        shape.columns, gate_rows, Constant(gate), 0 if gate is None else gate.numel(), Constant(handle.gate_bias),
        logits, shared=shape.shared_bytes(products), early=True,
    )  # fmt: skip
    products = few_products("multiply_down", handle, rows, chosen)
    shape = few_shape("multiply_down", products, fused)
    kernels.load(FEW_PRODUCTS, "multiply_down", **macros, **shape.macros())(
        (shape.slices(products), tiles), 32 * shape.warps, table, Settled(tile_list), Settled(members), halves, floats,
        inner_width, sums, handle.outer_counters, handle.row_counters, Settled(ids), weights, logits, rows, chosen,
        handle.routed, y, handle.hidden, width, shape.columns, shared=shape.shared_bytes(products), early=True,
    )  # fmt: skip


def few_products(name: str, handle: ExpertsHandle, rows: int, chosen: int) -> Products:
    """What the thread blocks of a kernel of few rows share."""
    tiles, macros, gate_up = rows * chosen + -(-rows // TILE_ROWS), handle.layers.macros, name == "multiply_gate_up"
    inputs_bytes = 2 * rows * (handle.width + ROW_PADDING) if rows <= MOST_FUSED_ROWS else 0
    return Products(
        groups=2 * tiles if gate_up else tiles,
        columns=(handle.inner_width if gate_up else handle.width) // TILE,
        chunks=(handle.width if gate_up else handle.inner_width) // BLOCK,
        tile_bytes=_most_tile_bytes(macros),
        long_layers=bool(macros["LONG_LAYERS"]),
        other_bytes=inputs_bytes + FEW_GATE_BYTES if gate_up else 0,
    )


def few_shape(name: str, products: Products, fused: bool) -> Shape:
    """How they share it; it changes no byte."""
    if fused and products.groups * products.columns // MANY_BLOCKS_WARPS < MANY_BLOCKS:
        return even_blocks(products, memory.multiprocessors(), _shared_bytes())
    return many_blocks(products, MOST_COLUMNS[name], ENOUGH_BLOCKS)


def _many_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    handle: ExpertsHandle,
    y: torch.Tensor,
    by_warps: bool = False,
) -> None:
    rows, chosen = ids.shape
    pairs, routed = rows * (chosen + 1), handle.routed
    width, inner_width, table = handle.width, handle.inner_width, handle.layers.table
    warpgroups = memory.architecture() in WARPGROUP_ARCHITECTURES and not by_warps
    row_tile = WARPGROUPS_ROW_TILE if warpgroups else _row_tile()
    macros = {**handle.layers.macros, "ROW_TILE": row_tile, "WARPGROUPS": int(warpgroups)}
    side_bytes, side_threads = _side_shared_bytes(macros), 256 if warpgroups else 128
    members, counts = memory.empty((routed + 1, rows), torch.int32), memory.empty((routed + 1,), torch.int32)
    kernels.load(MANY, "sort_pairs")(routed + 1, 512, ids, members, counts, rows, chosen, routed)
    most_tiles = pairs // row_tile + min(routed + 1, pairs)
    tiles = memory.empty((most_tiles, 4), torch.int32)
    kernels.load(MANY, "plan_tiles")(1, 1024, counts, tiles, rows, routed, row_tile, most_tiles)
    ready = memory.empty((2, pairs, width), torch.float16)
    kernels.load(MANY, "prepare_rows")(
        (-(-width // (4 * BLOCK)), rows), 128, x, ids, table, ready, rows, chosen, routed, handle.hidden, width
    )
    logits = _gate_logits(x, handle)
    if handle.gate is not None:
        kernels.load(MANY, "shared_gates")(
            -(-rows // GATE_ROWS), 128, x, handle.hidden, rows, handle.gate, handle.gate.numel(), handle.gate_bias,
            logits,
        )  # fmt: skip
    halves, floats = _hidden_values(handle, pairs)
    kernels.load(MANY_PRODUCTS, "multiply_gate_up", **macros)(
        (inner_width // BLOCK, most_tiles), 2 * side_threads, table, tiles, members, ready, pairs,
        width, x, handle.hidden, chosen + 1, halves, floats, inner_width, shared=2 * side_bytes,
    )  # fmt: skip
    terms = ready.view(torch.float32).view(pairs, width)
    kernels.load(MANY_PRODUCTS, "multiply_down", **macros)(
        (width // BLOCK, most_tiles), side_threads, table, tiles, members, halves, floats, inner_width, weights,
        logits, terms, width, chosen, shared=side_bytes,
    )  # fmt: skip
    kernels.load(MANY, "add_terms")(
        (-(-width // (4 * BLOCK)), rows), 128, terms, ids, y, chosen, routed, handle.hidden, width
    )


def _gate_logits(x: torch.Tensor, handle: ExpertsHandle) -> torch.Tensor:
    """Room for the shared expert's gate of each row; what is in it, where the linear op computes it."""
    if handle.gate_linear is None:
        return memory.empty((len(x),))
    from isobit.ops.linear.cuda import linear

    return linear(x, handle.gate_linear)


def _hidden_values(handle: ExpertsHandle, pairs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The down projections' inputs, [pairs, inner_width]: halves, and floats where a layer is plain."""
    shape = (pairs, handle.inner_width)
    floats = memory.empty(shape) if handle.layers.macros["PLAIN_LAYERS"] else None
    return memory.empty(shape, torch.float16), floats


def _most_rows(handle: ExpertsHandle, chosen: int) -> int:
    inner_bytes = 6 if handle.layers.macros["PLAIN_LAYERS"] else 2
    row_bytes = (chosen + 1) * (4 * handle.width + inner_bytes * handle.inner_width) + 4 * (handle.routed + 1)
    return max(1, min(MOST_MANY_ROWS, MOST_SCRATCH_BYTES // row_bytes))


def _row_tile() -> int:
    """The most rows of one expert in a thread block without warpgroups, from the shared memory of the chip."""
    return 64 if memory.architecture() in SMALL_SHARED else 128


def _shared_bytes() -> int:
    """Shared memory of a multiprocessor that one thread block can have."""
    return (99 if memory.architecture() in SMALL_SHARED else 163 if memory.architecture() < (9, 0) else 227) << 10


def _side_shared_bytes(macros: dict[str, int]) -> int:
    """What a side of a block of many_products.cu needs: rows and tiles on their way, then the sums."""
    row_tile, tiles = macros["ROW_TILE"], STAGE_INPUTS // TILE * (BLOCK // TILE)
    stages = (MANY_STAGES + macros["WARPGROUPS"]) * (row_tile * STAGE_INPUTS * 2 + tiles * _most_tile_bytes(macros))
    return max(stages, row_tile * (BLOCK + SUMS_PADDING) * 4)


def _most_tile_bytes(macros: dict[str, int]) -> int:
    """Bytes of a tile of the widest format."""
    widths = macros["THREE_INST_WIDTHS"] | macros["MCG_WIDTHS"] | macros["MUL1_WIDTHS"]
    return 16 * max(widths.bit_length() - 1, 0)


def _place_gate(weights: Linear) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
    if not isinstance(weights, PlainLinear):
        from isobit.ops.linear.cuda import prepare_linear

        return None, None, prepare_linear(weights)
    padded = torch.zeros(stored_sizes(weights)[0])
    padded[: weights.in_features] = torch.from_numpy(weights.weight[0].copy())
    bias = None if weights.bias is None else memory.to_device(weights.bias)
    return memory.to_device(padded), bias, None
