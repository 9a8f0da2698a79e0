"""The Gated DeltaNet recurrence in float64, for the rows of one stream."""

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def causal_conv(x: np.ndarray, weight: np.ndarray, before: np.ndarray, dilation: int = 1) -> np.ndarray:
    """x [n, C], weight [C, taps] (oldest first), before [dilation * (taps - 1), C] -> float64 [n, C], silu applied."""
    history = np.concatenate([before, x]).astype(np.float64)
    taps = weight.shape[1]
    products = [weight[:, tap].astype(np.float64) * history[tap * dilation :][: len(x)] for tap in range(taps)]
    return silu(np.sum(products, axis=0))


def delta_rule(
    qkv: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    state: np.ndarray,
    key_heads: int,
) -> tuple[np.ndarray, np.ndarray]:
    """qkv [n, C], a, b [n, Hv], state [Hv, dk, dv] -> output [n, Hv*dv] and the state after the last row."""
    qkv, a, b, state = (array.astype(np.float64) for array in (qkv, a, b, state))
    value_heads, key_dim, value_dim = state.shape
    keys = key_heads * key_dim
    q, k = (qkv[:, first : first + keys].reshape(-1, key_heads, key_dim) for first in (0, keys))
    v = qkv[:, 2 * keys :].reshape(-1, value_heads, value_dim)
    q, k = (np.repeat(x, value_heads // key_heads, axis=1) for x in (l2norm(q) / np.sqrt(key_dim), l2norm(k)))
    decay = np.exp(-np.exp(a_log.astype(np.float64)) * np.logaddexp(0, a + dt_bias))
    beta = sigmoid(b)
    output = np.empty(v.shape)
    for row in range(len(qkv)):
        state = state * decay[row, :, None, None]
        remembered = np.einsum("hkv,hk->hv", state, k[row])
        state = state + k[row][:, :, None] * (beta[row, :, None] * (v[row] - remembered))[:, None, :]
        output[row] = np.einsum("hkv,hk->hv", state, q[row])
    return output.reshape(len(qkv), -1), state


def l2norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def gated_norm(x: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float, gate: str) -> np.ndarray:
    """x, z [R, Hv*dv], weight [dv] -> float64 [R, Hv*dv]; gate: "sigmoid" or "silu"."""
    heads = x.astype(np.float64).reshape(len(x), -1, len(weight))
    normed = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + eps) * weight
    return normed.reshape(x.shape) * {"sigmoid": sigmoid, "silu": silu}[gate](z.astype(np.float64))
