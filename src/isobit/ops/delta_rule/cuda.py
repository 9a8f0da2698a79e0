"""The Gated DeltaNet recurrence on CUDA: rows in order, in parallel over value heads and columns."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.cuda import kernels, memory
from isobit.cuda.batch import placed
from isobit.errors import IsobitError
from isobit.ops.batch import Batch
from isobit.ops.delta_rule import cpu

__all__ = ["causal_conv", "delta_rule", "gated_norm", "prepare_delta"]

BY_ROW_COUNT, FEW_ROWS, MANY_ROWS = 0, 1, 2  # how to compute; the first is what the model uses
MOST_FEW_ROWS = 64
WARP = 32
SOURCE = "ops/delta_rule/delta_rule.cu"

FEW_COLUMNS, FEW_THREADS = 64, 128  # of a block of few_rows
TILE, TILE_THREADS = 16, 128  # of a block of many_rows
STAGED_ROWS = 32  # that a block of many_rows holds in shared memory
PREPARE_WARPS = 8
NORM_WARPS = 8
CONV_THREADS = {FEW_ROWS: 64, MANY_ROWS: 128}
CONV_CHUNK = {FEW_ROWS: 1, MANY_ROWS: 16}  # rows of a block


@dataclass(frozen=True)
class Delta:
    """One layer's constants. conv_weight: float32 [taps, C]; rate: float32 [Hv], exp(A_log); the rest as prepared."""

    conv_weight: torch.Tensor
    rate: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    gate_is_silu: bool

    @property
    def group(self) -> int:
        """The value heads of one key head that a lane of many_rows computes."""
        served, left = divmod(self.value_heads, self.key_heads)
        return next(size for size in (3, 2, 1) if (left == 0 and served % size == 0) or size == 1)

    @property
    def padded(self) -> int:
        """The values of a key as many_rows reads it: zeros from key_dim on."""
        return -(-self.key_dim // WARP) * WARP

    def kernel(self, name: str, journal: bool = False) -> kernels.Kernel:
        """A kernel of the recurrence for this layer's sizes."""
        return kernels.load(
            SOURCE,
            name,
            KEY_DIM=self.key_dim,
            VALUE_DIM=self.value_dim,
            KEY_HEADS=self.key_heads,
            VALUE_HEADS=self.value_heads,
            GROUP=self.group,
            JOURNAL=int(journal),
        )


def prepare_delta(
    conv_weight: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float,
    gate: str,
) -> Delta:
    """A layer from host arrays: conv_weight [C, taps], a_log and dt_bias [Hv], norm_weight [dv].

    gate: "sigmoid" or "silu". Raises IsobitError for another gate, and for dims that are no multiple of 4.
    """
    host = cpu.prepare_delta(
        conv_weight, a_log, dt_bias, norm_weight, key_heads, value_heads, key_dim, value_dim, eps, gate
    )
    if key_dim % 4 or value_dim % 4:
        raise IsobitError(
            f"linear_key_head_dim {key_dim} and linear_value_head_dim {value_dim} must be multiples of 4 on cuda; "
            "use --device cpu"
        )
    return Delta(
        conv_weight=memory.to_device(host.conv_weight),
        rate=memory.to_device(host.rate),
        dt_bias=memory.to_device(host.dt_bias),
        norm_weight=memory.to_device(host.norm_weight),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        eps=float(host.eps),
        gate_is_silu=host.gate_is_silu,
    )


def causal_conv(
    x: torch.Tensor,
    handle: Delta,
    conv_state: torch.Tensor,
    batch: Batch,
    journal: torch.Tensor | None = None,
    how: int = BY_ROW_COUNT,
) -> torch.Tensor:
    """silu of the causal convolution of q, k and v: [R, C] -> [R, C]; the pool [slots, taps - 1, C] moves on.

    journal: [J, taps - 1, C], the pool's value after each row that the batch journals. `how` is for the contract and
    changes no byte.
    """
    return convolve(x, handle.conv_weight, 1, conv_state, batch, journal, how)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    state: torch.Tensor,
    batch: Batch,
    journal: torch.Tensor | None = None,
    how: int = BY_ROW_COUNT,
) -> torch.Tensor:
    """silu of the causal convolution of each stream's rows: float32 [R, C] -> [R, C].

    weight: float32 [taps, C], the oldest row's tap first. state: float32 [slots, dilation * (taps - 1), C], the rows
    before the segment, oldest first; afterwards the rows before the stream's next row. journal: float32 [J, the shape
    of a slot], gets the state after each row that the batch journals.
    """
    out = memory.empty(x.shape)
    launch_convolution("convolve", x, weight, dilation, state, batch, journal, how, out)
    return out


def launch_convolution(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    dilation: int,
    state: torch.Tensor,
    batch: Batch,
    journal: torch.Tensor | None,
    how: int,
    *outputs: torch.Tensor | int,
    columns: int | None = None,
) -> None:
    """Launch the kernel `name` of convolution.cu, whose last parameters are `outputs`, by `columns` (1 or 4) a thread.

    The other arguments are those of `convolve`.
    """
    (rows, width), taps = x.shape, len(weight)
    if not rows:
        return
    how, columns = chosen(how, rows), columns or (1 if width % 4 else 4)
    threads, chunk = CONV_THREADS[how], CONV_CHUNK[how]
    kernel = kernels.load("ops/delta_rule/convolution.cu", name, TAPS=taps, DILATION=dilation, COLUMNS=columns)
    places = journal_places(batch, journal)
    arrays = placed(batch)
    grid = -(-width // (columns * threads)), -(-rows // chunk)
    segments = places, arrays.starts, arrays.slots, arrays.segment_of_row
    arguments = x, kernels.Constant(weight), state, journal, *segments, rows, width, chunk, *outputs
    kernel(grid, threads, *arguments, early=name == "convolve")


def delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    handle: Delta,
    states: torch.Tensor,
    batch: Batch,
    journal: torch.Tensor | None = None,
    how: int = BY_ROW_COUNT,
) -> torch.Tensor:
    """The recurrence: [R, C], [R, Hv], [R, Hv] -> [R, Hv*dv]; the pool [slots, Hv, dk, dv] moves on.

    journal: [J, Hv, dk, dv], the pool's value after each row that the batch journals. `how` is for the contract and
    changes no byte.
    """
    out = memory.empty((len(qkv), handle.value_heads * handle.value_dim))
    if batch.rows:
        compute = few_rows if chosen(how, batch.rows) == FEW_ROWS else many_rows
        compute(qkv, a, b, handle, states, batch, journal, out)
    return out


def few_rows(qkv, a, b, handle: Delta, states, batch: Batch, journal, out: torch.Tensor) -> None:
    """One launch: the gates and norms of a row are computed where they are used."""
    arrays = placed(batch)
    tiles = -(-handle.value_dim // FEW_COLUMNS)
    pool, starts, slots = (kernels.Settled(array) for array in (states, arrays.starts, arrays.slots))
    moving = pool, journal, journal_places(batch, journal), starts, slots
    constants = kernels.Constant(handle.rate), kernels.Constant(handle.dt_bias), query_scale(handle)
    grid = handle.value_heads * tiles, batch.segments
    handle.kernel("few_rows")(grid, FEW_THREADS, qkv, a, b, *constants, *moving, out, early=True)


def many_rows(qkv, a, b, handle: Delta, states, batch: Batch, journal, out: torch.Tensor) -> None:
    """Gates and norms of all rows first; then the recurrence, whose steps wait for nothing else."""
    arrays, groups = placed(batch), handle.value_heads // handle.group
    keys_queries = memory.empty((batch.rows, handle.key_heads, 2 * handle.padded))
    gates = memory.empty((batch.rows, groups, 8))
    items = batch.rows * handle.key_heads
    inputs = qkv, a, b, handle.rate, handle.dt_bias, query_scale(handle), batch.rows
    prepare = handle.kernel("prepare_rows")
    prepare(-(-items // PREPARE_WARPS), PREPARE_WARPS * WARP, *inputs, keys_queries, gates)
    places = journal_places(batch, journal)
    tiles = -(-handle.value_dim // TILE)
    row_floats = 2 * handle.padded + handle.group * TILE + 8
    moving = states, journal, places, arrays.starts, arrays.slots
    kernel = handle.kernel("many_rows", journal=places is not None)
    shared = STAGED_ROWS * row_floats * 4
    kernel((groups * tiles, batch.segments), TILE_THREADS, qkv, keys_queries, gates, *moving, out, shared=shared)


def gated_norm(x: torch.Tensor, z: torch.Tensor, handle: Delta) -> torch.Tensor:
    """RMS norm of each head, times weight, times the gate of z: [R, Hv*dv], [R, Hv*dv] -> [R, Hv*dv]."""
    out = memory.empty(x.shape)
    width = len(handle.norm_weight)
    count = x.numel() // width
    if count:
        kernel = kernels.load("ops/delta_rule/gated_norm.cu", "gated_norm", WIDTH=width, SILU=int(handle.gate_is_silu))
        constants = kernels.Constant(handle.norm_weight), handle.eps, count
        kernel(-(-count // NORM_WARPS), NORM_WARPS * WARP, x, z, *constants, out, early=True)
    return out


def chosen(how: int, rows: int) -> int:
    """FEW_ROWS or MANY_ROWS."""
    if how != BY_ROW_COUNT:
        return how
    return FEW_ROWS if rows <= MOST_FEW_ROWS else MANY_ROWS


def journal_places(batch: Batch, journal: torch.Tensor | None) -> torch.Tensor | None:
    """int32 [R], the journal row of each row or -1; None where nothing is journaled."""
    return None if journal is None else placed(batch).journal


def query_scale(handle: Delta) -> float:
    """1 / sqrt(dk) in float32."""
    return float(np.float32(1.0 / np.sqrt(np.float64(handle.key_dim))))
