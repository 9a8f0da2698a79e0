"""The n-gram embedding on CUDA: ids and the mapped table's rows on the host, values and injection on the device."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.checkpoint.weights import NgramTable
from isobit.cuda import kernels, memory
from isobit.ops.batch import Batch
from isobit.ops.delta_rule.cuda import BY_ROW_COUNT, launch_convolution
from isobit.ops.ngram_embedding import cpu
from isobit.ops.ngram_embedding.cpu import ngram_ids
from isobit.ops.norm.cuda import on_device

__all__ = ["ngram_decode", "ngram_fetch", "ngram_gather", "ngram_ids", "ple_inject", "prepare_ple"]

WARP = 32
DECODE_WARPS = 8
RING, HALF, FLOAT, BFLOAT = range(4)  # KIND of decode.cu


@dataclass(frozen=True)
class Ple:
    """One injection's constants: norm weights float32 [S*H], conv_weight float32 [taps, S*H]."""

    norm_key: torch.Tensor
    norm_query: torch.Tensor
    norm_conv: torch.Tensor
    conv_weight: torch.Tensor
    streams: int
    dilation: int
    eps: float


def prepare_ple(
    norm_key: np.ndarray,
    norm_query: np.ndarray,
    norm_conv: np.ndarray,
    conv_weight: np.ndarray,
    streams: int,
    dilation: int,
    eps: float,
) -> Ple:
    """An injection from its norm weights [S*H] and conv_weight [S*H, taps], the oldest row's tap first."""
    return Ple(
        norm_key=memory.to_device(np.array(norm_key, np.float32)),
        norm_query=memory.to_device(np.array(norm_query, np.float32)),
        norm_conv=memory.to_device(np.array(norm_conv, np.float32)),
        conv_weight=memory.to_device(np.array(np.asarray(conv_weight, np.float32).T, order="C")),
        streams=streams,
        dilation=dilation,
        eps=eps,
    )


def ngram_gather(ids: np.ndarray, table: NgramTable) -> torch.Tensor:
    """The rows' values, head after head: int64 [R, heads] -> float32 [R, heads * width]."""
    return ngram_decode(ngram_fetch(ids, table), table)


def ngram_fetch(ids: np.ndarray, table: NgramTable) -> np.ndarray:
    """The table's rows as stored: int64 [R, heads] -> [R, heads, stored width], on the host.

    Of a table that lies on the device (one shard, a tensor) the ids themselves, [R, heads].
    """
    return ids if lies_on_device(table) else cpu.ngram_fetch(ids, table)


def ngram_decode(fetched: np.ndarray | torch.Tensor, table: NgramTable) -> torch.Tensor:
    """The values of what `ngram_fetch` gave, [R, heads, ...], on the host or not -> float32 [R, heads * width]."""
    given = fetched if isinstance(fetched, torch.Tensor) else memory.to_device(fetched)
    rows, heads = given.shape[:2]
    out = memory.empty((rows, heads * table.width))
    count = rows * heads
    if count:
        stored, ids = (table.shards[0], given) if lies_on_device(table) else (given, None)
        bias = None if table.head_bias is None else on_device(table.head_bias)
        kernel = kernels.load(
            "ops/ngram_embedding/decode.cu",
            "decode_rows",
            WIDTH=table.width,
            KIND=kind_of(table),
            BITS=table.bits or 16,
        )
        kernel(-(-count // DECODE_WARPS), DECODE_WARPS * WARP, stored, ids, bias, heads, count, out)
    return out


def lies_on_device(table: NgramTable) -> bool:
    """Whether the table's rows are a tensor."""
    return isinstance(table.shards[0], torch.Tensor)


def kind_of(table: NgramTable) -> int:
    """How the table stores values, as decode.cu calls it."""
    if table.bits is not None:
        return RING
    if table.bfloat16:
        return BFLOAT
    return HALF if table.shards[0].dtype in (np.float16, torch.float16) else FLOAT


def ple_inject(
    streams: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: Ple,
    conv_state: torch.Tensor,
    batch: Batch,
    journal: torch.Tensor | None = None,
    how: int = BY_ROW_COUNT,
) -> None:
    """Add the injection to the streams in place: [R, S, H], [R, S*H], [R, H]; the pool [slots, rows, S*H] moves on.

    journal: [J, rows, S*H], the pool's value after each row that the batch journals. `how` is for the contract and
    changes no byte.
    """
    rows, count, hidden = streams.shape
    if not rows:
        return
    gates, conv_input = memory.empty((rows, count)), memory.empty((rows, count * hidden))
    norms = handle.norm_key, handle.norm_query, handle.norm_conv
    root = float(np.float32(np.sqrt(np.float64(hidden))))
    gate_streams = kernels.load("ops/ngram_embedding/injection.cu", "gate_streams", HIDDEN=hidden)
    constants = *norms, root, float(handle.eps), count
    gate_streams(rows * count, WARP, streams, key, value, *constants, gates, conv_input, shared=3 * hidden * 4)
    launch_convolution(
        "convolve_into_streams",
        conv_input,
        handle.conv_weight,
        handle.dilation,
        conv_state,
        batch,
        journal,
        how,
        gates,
        value,
        hidden,
        streams,
        columns=1 if hidden % 4 else 4,
    )
