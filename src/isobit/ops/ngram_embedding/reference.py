"""The n-gram embedding written plainly: ids in Python integers, rows and injection in float64, one stream a call."""

import numpy as np

from isobit.checkpoint.weights import NgramTable
from isobit.ops.delta_rule.reference import causal_conv, sigmoid
from isobit.ops.norm import reference as norm_reference


def ngram_ids(tokens: np.ndarray, history: np.ndarray, table: NgramTable, end_token: int) -> np.ndarray:
    """tokens [n] after `history` [order - 1], most recent first -> int64 [n, heads]."""
    order, heads = len(table.multipliers), table.heads
    past = [int(token) for token in history[::-1]] + [int(token) for token in tokens]
    ids = np.empty((len(tokens), heads), np.int64)
    for row in range(len(tokens)):
        seen = past[row : row + order][::-1]
        for i in range(1, order):
            if end_token in seen[1 : i + 1]:
                seen[i] = end_token
        for head in range(heads):
            mixed = 0
            for i in range(head // (heads // (order - 1)) + 2):
                mixed ^= seen[i] * int(table.multipliers[i]) & (2**64 - 1)
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            ids[row, head] = signed % int(table.sizes[head]) + int(table.offsets[head])
    return ids


def ngram_gather(ids: np.ndarray, table: NgramTable) -> np.ndarray:
    """ids [R, heads] -> float64 [R, heads * width]."""
    rows = np.stack([_row(table, int(row)) for row in ids.ravel()]).reshape(*ids.shape, table.width)
    if table.head_bias is not None:
        rows = rows + table.head_bias.astype(np.float64)
    return rows.reshape(len(ids), -1)


def _row(table: NgramTable, row: int) -> np.ndarray:
    stored = np.array(table.shards[row // table.shard_rows][row % table.shard_rows])
    if table.bits is not None:
        return _decode(stored, table.bits)
    if table.bfloat16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def _decode(words: np.ndarray, bits: int) -> np.ndarray:
    stream = "".join(f"{int(word) & 0xFFFF:016b}"[::-1] for word in words[1:])
    symbols = [int(stream[i : i + bits][::-1], 2) for i in range(0, len(stream), bits)]
    scale = float(words[:1].view(np.float16)[0])
    factor, offset = (float(half) for half in np.array([0x1EEE, 0xC931], np.uint16).view(np.float16))
    values = []
    for i in range(len(symbols)):
        state = sum(symbols[i - age] << (age * bits) for age in range(-(-16 // bits))) & 0xFFFF
        total = sum((state * 0x83DCD12D % 2**32).to_bytes(4, "little"))
        values.append(float(np.float16((1024 + total) * factor + offset)) * scale)
    return np.array(values)


def ple_inject(
    streams: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    norm_key: np.ndarray,
    norm_query: np.ndarray,
    norm_conv: np.ndarray,
    conv_weight: np.ndarray,
    before: np.ndarray,
    dilation: int,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """streams [n, S, H], key [n, S*H], value [n, H], before [dilation * (taps - 1), S*H] -> float64: the streams
    afterwards, and what the convolution reads of each row, [n, S*H].
    """
    rows, count, hidden = streams.shape
    keys = norm_reference.norm(key.reshape(rows, count, hidden), norm_key.reshape(count, hidden), eps)
    queries = norm_reference.norm(streams, norm_query.reshape(count, hidden), eps)
    dot = (keys * queries).sum(axis=-1) / np.sqrt(hidden)
    gate = np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6))
    gated = sigmoid(gate)[:, :, None] * value.astype(np.float64)[:, None, :]
    normed = norm_reference.norm(gated, norm_conv.reshape(count, hidden), eps).reshape(rows, -1)
    local = causal_conv(normed, conv_weight, before, dilation).reshape(streams.shape)
    return streams.astype(np.float64) + gated + local, normed
