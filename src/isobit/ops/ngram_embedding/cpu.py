"""The n-gram embedding on the CPU."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from isobit.checkpoint.weights import NgramTable
from isobit.ops.batch import Batch
from isobit.ops.buffers import empty, flat
from isobit.ops.journal import journal_arguments
from isobit.ops.ngram_embedding.injection import inject_streams
from isobit.ops.rings import decode_ring
from isobit.ops.tape import do
from isobit.ops.work import run_split

__all__ = ["ngram_decode", "ngram_fetch", "ngram_gather", "ngram_ids", "ple_inject", "prepare_ple"]

STEPS = 16  # element operations of the injection for each of its elements


@dataclass(frozen=True)
class Ple:
    """One injection's constants: norm weights float32 [S*H], conv_weight float32 [taps * S*H]."""

    norm_key: np.ndarray
    norm_query: np.ndarray
    norm_conv: np.ndarray
    conv_weight: np.ndarray
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
        norm_key=np.array(norm_key, np.float32),
        norm_query=np.array(norm_query, np.float32),
        norm_conv=np.array(norm_conv, np.float32),
        conv_weight=np.asarray(conv_weight, np.float32).T.flatten(),
        streams=streams,
        dilation=dilation,
        eps=eps,
    )


def ngram_ids(
    tokens: np.ndarray,
    history: np.ndarray,
    table: NgramTable,
    end_token: int,
    batch: Batch,
    journal: np.ndarray | None = None,
) -> np.ndarray:
    """The table rows of every token: int32 [R] -> int64 [R, heads]; the history [slots, order - 1] moves on.

    journal: int32 [J, order - 1], the history after each row that the batch journals.
    """
    ids = empty((len(tokens), table.heads), np.int64)
    multipliers, sizes, offsets = (np.array(x, np.int64) for x in (table.multipliers, table.sizes, table.offsets))
    places, journal = journal_arguments(batch, journal, history)
    hash_rows(tokens, history, multipliers, sizes, offsets, end_token, batch.starts, batch.slots, places, journal, ids)
    return ids


def ngram_gather(ids: np.ndarray, table: NgramTable) -> np.ndarray:
    """The rows' values, head after head: int64 [R, heads] -> float32 [R, heads * width]."""
    return ngram_decode(ngram_fetch(ids, table), table)


def ngram_fetch(ids: np.ndarray, table: NgramTable) -> np.ndarray:
    """The table's rows as stored: int64 [R, heads] -> [R, heads, stored width], on the host."""
    return gather_stored(table, ids.ravel()).reshape(*ids.shape, -1)


def ngram_decode(fetched: np.ndarray, table: NgramTable) -> np.ndarray:
    """The values of fetched rows, head after head: [R, heads, stored width] -> float32 [R, heads * width]."""
    rows, heads, _ = fetched.shape
    stored = fetched.reshape(rows * heads, -1)
    out = empty((rows, heads * table.width))
    if table.bits is None:
        do(_widen, stored, table.bfloat16, out)
    else:
        values = out.reshape(-1)
        run_split(decode_rows, 4 * out.size, rows * heads, stored.view(np.uint16), table.bits, table.width, values)
    if table.head_bias is not None:
        do(add_bias, out, table.head_bias.astype(np.float32).ravel())
    return out


def _widen(stored: np.ndarray, bfloat16: bool, out: np.ndarray) -> None:
    values = stored.astype(np.uint32) << 16 if bfloat16 else stored.astype(np.float32)
    out[...] = values.view(np.float32).reshape(out.shape)


def gather_stored(table: NgramTable, ids: np.ndarray) -> np.ndarray:
    """Copies of the table's rows `ids` [n] as stored, [n, ...]; touches the pages of those rows only."""
    if len(table.shards) == 1:
        return np.asarray(table.shards[0])[ids]
    stored = np.empty((len(ids), table.shards[0].shape[1]), table.shards[0].dtype)
    shard_of_id = ids // table.shard_rows
    for shard in np.unique(shard_of_id):
        chosen = np.flatnonzero(shard_of_id == shard)
        stored[chosen] = np.asarray(table.shards[shard])[ids[chosen] - shard * table.shard_rows]
    return stored


def ple_inject(
    streams: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    handle: Ple,
    conv_state: np.ndarray,
    batch: Batch,
    journal: np.ndarray | None = None,
) -> None:
    """Add the injection to the streams in place: [R, S, H], [R, S*H], [R, H]; the pool [slots, rows, S*H] moves on.

    journal: [J, rows, S*H], the pool's value after each row that the batch journals.
    """
    places, journal = journal_arguments(batch, journal, conv_state)
    norms = handle.norm_key, handle.norm_query, handle.norm_conv
    constants = handle.streams, *norms, handle.conv_weight, handle.dilation, np.float32(handle.eps)
    inputs = flat(streams), flat(key), flat(value), *constants
    moving = flat(conv_state), batch.starts, batch.slots, places, flat(journal)
    run_split(inject_streams, STEPS * streams.size, batch.segments * handle.streams, *inputs, *moving)


@njit(nogil=True, cache=True, error_model="numpy")
def hash_rows(tokens, history, multipliers, sizes, offsets, end_token, starts, slots, places, journal, ids):
    """ids [R, heads] of tokens [R] in order; history [slots, order - 1] moves on."""
    order, heads = multipliers.size, sizes.size
    heads_an_order = heads // (order - 1)
    for segment in range(slots.size):
        past = history[slots[segment]]
        for row in range(starts[segment], starts[segment + 1]):
            mixed = np.int64(tokens[row]) * multipliers[0]
            ended = False
            for i in range(1, order):
                ended = ended or past[i - 1] == end_token
                mixed ^= np.int64(end_token if ended else past[i - 1]) * multipliers[i]
                for head in range((i - 1) * heads_an_order, i * heads_an_order):
                    ids[row, head] = mixed % sizes[head] + offsets[head]
            for i in range(order - 2, 0, -1):
                past[i] = past[i - 1]
            past[0] = tokens[row]
            if places.size and places[row] >= 0:
                for i in range(order - 1):
                    journal[places[row], i] = past[i]


@njit(nogil=True, cache=True, error_model="numpy")
def decode_rows(stored, bits, width, out, first, last):
    """Rings first to last - 1 of uint16 [n, words] to float32 [n * width]."""
    words = stored.ravel()
    for row in range(first, last):
        decode_ring(words, row * stored.shape[1], bits, width, out, row * width)


@njit(nogil=True, cache=True, error_model="numpy")
def add_bias(out, bias):
    for row in range(out.shape[0]):
        for i in range(bias.size):
            out[row, i] = out[row, i] + bias[i]
