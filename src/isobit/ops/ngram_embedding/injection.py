"""The injection's kernel: every stream of every segment by itself, row after row, all steps of a row together."""

import numpy as np
from numba import njit

from isobit.ops.lanes import (
    LANES,
    copy_at,
    lane_dot_at,
    lanes_load_first,
    lanes_store_first,
    lanes_zero,
)
from isobit.ops.norm.cpu import inverse_rms_at, scale_at
from isobit.ops.scalar import ZERO, fma32, scalar_function, sigmoid32, silu32

LEAST_DOT = np.float32(1e-6)


@njit(nogil=True, cache=True, error_model="numpy")
def inject_streams(
    streams, key, value, count, norm_key, norm_query, norm_conv, conv_weight, dilation, eps, state, starts, slots,
    places, journal, first, last,
):  # fmt: skip
    """Streams first to last - 1, the `count` of a segment after those of the one before: [R, count, H] in place.

    key: [R, count*H]. value: [R, H]. norm weights: [count*H]. conv_weight: [taps, count*H]. state, journal:
    [slots, rows, count*H]. All of these are given flat. places: int32 [R], or empty where nothing is journaled.
    """
    wide = norm_key.size
    hidden, taps = wide // count, conv_weight.size // wide
    kept = (taps - 1) * dilation
    root = np.float32(np.sqrt(np.float64(hidden)))
    keys, queries, gated = np.empty(hidden, np.float32), np.empty(hidden, np.float32), np.empty(hidden, np.float32)
    ring, tap_at = np.empty((kept + 1) * hidden, np.float32), np.empty(taps, np.int64)
    for item in range(first, last):
        column = item % count * hidden
        segment = item // count
        start, end, slot = np.int64(starts[segment]), np.int64(starts[segment + 1]), np.int64(slots[segment])
        for place in range(kept):
            copy_at(state, (slot * kept + place) * wide + column, ring, place * hidden, hidden)
        for row in range(start, end):
            at = row * wide + column
            scale_at(key, at, inverse_rms_at(key, at, hidden, eps), norm_key, column, hidden, keys, 0)
            scale_at(streams, at, inverse_rms_at(streams, at, hidden, eps), norm_query, column, hidden, queries, 0)
            _scale(_gate(lane_dot_at(keys, 0, queries, 0, hidden) / root), value, row * hidden, hidden, gated)
            newest = row - start + kept
            inverse = inverse_rms_at(gated, 0, hidden, eps)
            scale_at(gated, 0, inverse, norm_conv, column, hidden, ring, newest % (kept + 1) * hidden)
            for tap in range(taps):
                tap_at[tap] = (newest - (taps - 1 - tap) * dilation) % (kept + 1) * hidden
            _add(streams, at, gated, conv_weight, wide, column, ring, tap_at, hidden)
            if places.size > 0 and places[row] >= 0:
                _unroll(ring, newest + 1, kept, hidden, journal, places[row] * kept * wide + column, wide)
        if end > start:
            _unroll(ring, end - start + kept, kept, hidden, state, slot * kept * wide + column, wide)


@scalar_function
def _gate(dot):
    """sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))), sign(0) = 0."""
    size = np.sqrt(max(abs(dot), LEAST_DOT))
    return sigmoid32(size if dot > ZERO else (-size if dot < ZERO else ZERO))


@scalar_function
def _scale(factor, x, at, count, out):
    """out = factor * x, `count` values from flat element `at` of x."""
    for i in range(0, count, LANES):
        some = min(LANES, count - i)
        lanes_store_first(out, i, factor * lanes_load_first(x, at + i, some), some)


@scalar_function
def _add(streams, at, gated, conv_weight, wide, column, ring, tap_at, hidden):
    """Add to one stream of a row: the gated value, and silu of the convolution over the ring's rows at `tap_at`."""
    for i in range(0, hidden, LANES):
        some = min(LANES, hidden - i)
        total = lanes_zero()
        for tap in range(tap_at.size):
            weights = lanes_load_first(conv_weight, tap * wide + column + i, some)
            total = fma32(weights, lanes_load_first(ring, tap_at[tap] + i, some), total)
        added = lanes_load_first(gated, i, some) + silu32(total)
        lanes_store_first(streams, at + i, lanes_load_first(streams, at + i, some) + added, some)


@scalar_function
def _unroll(ring, rows, kept, hidden, state, at, wide):
    """The ring's last `kept` of `rows` rows to flat elements at, at + wide, ... of `state`, oldest first."""
    for place in range(kept):
        copy_at(ring, (rows - kept + place) % (kept + 1) * hidden, state, at + place * wide, hidden)
