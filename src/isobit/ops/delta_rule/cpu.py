"""The Gated DeltaNet recurrence on the CPU: rows in order, parallel over value heads and blocks of value columns."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from isobit.errors import IsobitError
from isobit.ops.batch import Batch
from isobit.ops.buffers import empty, scratch
from isobit.ops.convolution import convolve
from isobit.ops.journal import journal_arguments
from isobit.ops.lanes import (
    LANES,
    copy_at,
    lane_dot_at,
    lanes_fill,
    lanes_fma,
    lanes_load,
    lanes_load_first,
    lanes_multiply,
    lanes_spread,
    lanes_store,
    lanes_store_first,
    lanes_subtract,
    lanes_zero,
)
from isobit.ops.scalar import exp32, rsqrt32, sigmoid32, silu32, softplus32
from isobit.ops.work import run_split

__all__ = ["causal_conv", "delta_rule", "gated_norm", "prepare_delta"]

L2_EPS = np.float32(1e-6)


@dataclass(frozen=True)
class Delta:
    """One layer's constants. conv_weight: float32 [taps, C]; rate: float32 [Hv], exp(A_log); the rest as prepared."""

    conv_weight: np.ndarray
    rate: np.ndarray
    dt_bias: np.ndarray
    norm_weight: np.ndarray
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: np.float32
    gate_is_silu: bool


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
    """A layer from conv_weight [C, taps], a_log and dt_bias [Hv], norm_weight [dv]; gate: "sigmoid" or "silu"."""
    if gate not in ("sigmoid", "silu"):
        raise IsobitError(f"output_gate_type {gate!r} is unknown: expected 'sigmoid' or 'silu'; check config.json")
    rate = np.empty(value_heads, np.float32)
    rate_rows(np.array(a_log, np.float32), rate)
    return Delta(
        conv_weight=np.array(np.asarray(conv_weight, np.float32).T, order="C"),
        rate=rate,
        dt_bias=np.array(dt_bias, np.float32),
        norm_weight=np.array(norm_weight, np.float32),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        eps=np.float32(eps),
        gate_is_silu=gate == "silu",
    )


def causal_conv(
    x: np.ndarray, handle: Delta, conv_state: np.ndarray, batch: Batch, journal: np.ndarray | None = None
) -> np.ndarray:
    """silu of the causal convolution of q, k and v: [R, C] -> [R, C]; the pool [slots, taps - 1, C] moves on.

    journal: [J, taps - 1, C], the pool's value after each row that the batch journals.
    """
    return convolve(x, handle.conv_weight, 1, conv_state, batch, journal)


def delta_rule(
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    handle: Delta,
    states: np.ndarray,
    batch: Batch,
    journal: np.ndarray | None = None,
) -> np.ndarray:
    """The recurrence: [R, C], [R, Hv], [R, Hv] -> [R, Hv*dv]; the pool [slots, Hv, dk, dv] moves on.

    journal: [J, Hv, dk, dv], the pool's value after each row that the batch journals.
    """
    rows, heads = a.shape
    q, k = (scratch((rows, handle.key_heads, handle.key_dim)) for _ in range(2))
    decay, beta = scratch((rows, heads)), scratch((rows, heads))
    arguments = qkv, a, b, handle.rate, handle.dt_bias, q, k, decay, beta
    run_split(gate_rows, 2 * q.size, rows, *arguments)
    out = empty((rows, heads * handle.value_dim))
    blocks = heads * -(-handle.value_dim // LANES)
    recurrence = q, k, qkv, decay, beta, states, batch.starts, batch.slots
    journals = journal_arguments(batch, journal, states)
    run_split(delta_blocks, out.size * handle.key_dim // 8, blocks, *recurrence, *journals, out)
    return out


def gated_norm(x: np.ndarray, z: np.ndarray, handle: Delta) -> np.ndarray:
    """RMS norm of each head, times weight, times the gate of z: [R, Hv*dv], [R, Hv*dv] -> [R, Hv*dv]."""
    out = empty(x.shape)
    arguments = x, z, handle.norm_weight, handle.eps, handle.gate_is_silu, out
    run_split(gated_norm_rows, x.size, len(x), *arguments)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def rate_rows(a_log, rate):
    for i in range(rate.size):
        rate[i] = exp32(a_log[i])


@njit(nogil=True, cache=True, error_model="numpy")
def gate_rows(qkv, a, b, rate, dt_bias, q, k, decay, beta, first, last):
    """The normed q and k [R, Hk, dk], the decay and beta [R, Hv] of rows first to last - 1."""
    heads, width = q.shape[1], q.shape[2]
    scale = np.float32(1.0 / np.sqrt(np.float64(width)))
    for row in range(first, last):
        for head in range(a.shape[1]):
            decay[row, head] = exp32(-rate[head] * softplus32(a[row, head] + dt_bias[head]))
            beta[row, head] = sigmoid32(b[row, head])
        for head in range(heads):
            start = row * qkv.shape[1] + head * width
            inverse = rsqrt32(lane_dot_at(qkv, start, qkv, start, width) + L2_EPS)
            for i in range(width):
                q[row, head, i] = (qkv[row, head * width + i] * inverse) * scale
            start += heads * width
            inverse = rsqrt32(lane_dot_at(qkv, start, qkv, start, width) + L2_EPS)
            for i in range(width):
                k[row, head, i] = qkv[row, (heads + head) * width + i] * inverse


@njit(nogil=True, cache=True, error_model="numpy")
def delta_blocks(q, k, qkv, decay, beta, states, starts, slots, places, journal, out, first, last):
    """All rows, in blocks first to last - 1: block i is 32 value columns of one head, head after head."""
    value_heads, key_dim, value_dim = states.shape[1], states.shape[2], states.shape[3]
    key_heads, channels = q.shape[1], qkv.shape[1]
    values = 2 * key_heads * key_dim
    blocks = (value_dim + LANES - 1) // LANES
    pool, journal_pool = states.ravel(), journal.ravel()
    block_state = np.empty(key_dim * LANES, np.float32)
    for block in range(first, last):
        head, column = block // blocks, (block % blocks) * LANES
        width = min(LANES, value_dim - column)
        key_head = head * key_heads // value_heads
        for segment in range(slots.size):
            start, end = starts[segment], starts[segment + 1]
            place = (slots[segment] * value_heads + head) * key_dim * value_dim + column
            if width < LANES:
                copy_columns(pool, place, value_dim, block_state, 0, LANES, key_dim, width)
            for row in range(start, end):
                from_pool = row == start and width == LANES
                to_pool = row == end - 1 and width == LANES
                value_place = row * channels + values + head * value_dim + column
                out_place = (row * value_heads + head) * value_dim + column
                read = delta_row(
                    pool if from_pool else block_state,
                    place if from_pool else 0,
                    value_dim if from_pool else LANES,
                    pool if to_pool else block_state,
                    place if to_pool else 0,
                    value_dim if to_pool else LANES,
                    q,
                    k,
                    (row * key_heads + key_head) * key_dim,
                    key_dim,
                    load_columns(qkv, value_place, width),
                    decay[row, head],
                    beta[row, head],
                )
                store_columns(out, out_place, read, width)
                if places.size and places[row] >= 0:
                    copy_columns(
                        pool if to_pool else block_state,
                        place if to_pool else 0,
                        value_dim if to_pool else LANES,
                        journal_pool,
                        (places[row] * value_heads + head) * key_dim * value_dim + column,
                        value_dim,
                        key_dim,
                        width,
                    )
            if width < LANES:
                copy_columns(block_state, 0, LANES, pool, place, value_dim, key_dim, width)


@njit(forceinline=True, nogil=True, error_model="numpy")
def delta_row(
    source, source_place, source_stride, target, target_place, target_stride, q, k, keys, key_dim, value, decay, beta
):
    """What the query reads after the block's state [dk, 32] went from source to target by one row."""
    decays = lanes_fill(decay)
    remembered = lanes_zero()
    for i in range(key_dim):
        kept = lanes_multiply(lanes_load(source, source_place + i * source_stride), decays)
        remembered = lanes_fma(kept, lanes_spread(k, keys + i), remembered)
    change = lanes_multiply(lanes_fill(beta), lanes_subtract(value, remembered))
    read = lanes_zero()
    for i in range(key_dim):
        kept = lanes_multiply(lanes_load(source, source_place + i * source_stride), decays)
        renewed = lanes_fma(lanes_spread(k, keys + i), change, kept)
        read = lanes_fma(renewed, lanes_spread(q, keys + i), read)
        lanes_store(target, target_place + i * target_stride, renewed)
    return read


@njit(forceinline=True, nogil=True, error_model="numpy")
def load_columns(x, place, width):
    return lanes_load(x, place) if width == LANES else lanes_load_first(x, place, width)


@njit(forceinline=True, nogil=True, error_model="numpy")
def store_columns(x, place, lanes, width):
    if width == LANES:
        lanes_store(x, place, lanes)
    else:
        lanes_store_first(x, place, lanes, width)


@njit(nogil=True, error_model="numpy")
def copy_columns(source, source_place, source_stride, target, target_place, target_stride, key_dim, width):
    for i in range(key_dim):
        copy_at(source, source_place + i * source_stride, target, target_place + i * target_stride, width)


@njit(nogil=True, cache=True, error_model="numpy")
def gated_norm_rows(x, z, weight, eps, gate_is_silu, out, first, last):
    """(weight * normed) * gate(z) for rows first to last - 1; each head of len(weight) values by itself."""
    width = weight.size
    for row in range(first, last):
        for head in range(x.shape[1] // width):
            start = row * x.shape[1] + head * width
            inverse = rsqrt32(lane_dot_at(x, start, x, start, width) / np.float32(width) + eps)
            for i in range(width):
                column = head * width + i
                gate = silu32(z[row, column]) if gate_is_silu else sigmoid32(z[row, column])
                out[row, column] = (weight[i] * (x[row, column] * inverse)) * gate
