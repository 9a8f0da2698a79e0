"""docs/arithmetic.md, *linear*, as plain scalar loops: slow, and with nothing in common with the kernels but fma."""

import numpy as np
from numba import njit

from isobit.checkpoint.trellis import dequantize_inner
from isobit.checkpoint.weights import Exl3Linear, Linear
from isobit.ops.scalar import fma32, round_to_half

BLOCK = 128
INVERSE_ROOT = np.float32(1 / np.sqrt(np.float64(128)))


def linear(x: np.ndarray, weights: Linear) -> np.ndarray:
    """x float32 [R, in_features] -> float32 [R, out_features], every rounding as defined."""
    y = np.empty((len(x), weights.out_features), np.float32)
    bias = np.zeros(0, np.float32) if weights.bias is None else np.array(weights.bias, np.float32)
    if isinstance(weights, Exl3Linear):
        matrix = dequantize_inner(weights).astype(np.float32)
        suh, svh = weights.suh.astype(np.float32), weights.svh.astype(np.float32)
    else:
        inputs = -(-weights.in_features // 16) * 16
        matrix = np.zeros((inputs, weights.out_features), np.float32)
        matrix[: weights.in_features] = weights.weight.T
        suh = svh = np.zeros(0, np.float32)
    for row in range(len(x)):
        _row(x[row].copy(), matrix, suh, svh, bias, y[row])
    return y


@njit(error_model="numpy")
def _rotate(values):
    for start in range(0, values.size, BLOCK):
        for stride in (1, 2, 4, 8, 16, 32, 64):
            for i in range(start, start + BLOCK):
                if (i - start) & stride == 0:
                    a, b = values[i], values[i + stride]
                    values[i], values[i + stride] = a + b, a - b
    for i in range(values.size):
        values[i] *= INVERSE_ROOT


@njit(error_model="numpy")
def _chain(x, matrix, column, first, last):
    total = np.float32(0.0)
    for k in range(first, min(last, matrix.shape[0])):
        total = fma32(x[k], matrix[k, column], total)
    return total


@njit(error_model="numpy")
def _row(x, matrix, suh, svh, bias, y):
    k, n = matrix.shape
    inputs = np.zeros(k, np.float32)
    inputs[: x.size] = x
    if suh.size:
        for i in range(k):
            inputs[i] *= suh[i]
        _rotate(inputs)
        for i in range(k):
            inputs[i] = round_to_half(inputs[i])
    blocks = (k + BLOCK - 1) // BLOCK
    sums = np.empty(n, np.float32)
    for column in range(n):
        if k < 4096:
            sums[column] = _chain(inputs, matrix, column, 0, k)
        else:
            total = np.float64(_chain(inputs, matrix, column, 0, blocks // 4 * BLOCK))
            for shard in range(1, 4):
                first, last = shard * blocks // 4 * BLOCK, (shard + 1) * blocks // 4 * BLOCK
                total += np.float64(_chain(inputs, matrix, column, first, last))
            sums[column] = np.float32(total)
    if svh.size:
        _rotate(sums)
        for i in range(n):
            sums[i] *= svh[i]
    for i in range(y.size):
        y[i] = sums[i] + bias[i] if bias.size else sums[i]
