"""The linear layer on CUDA in float64: what the tensor cores are given, and how far their sums may be off."""

import numpy as np

from isobit.checkpoint.weights import Exl3Linear, Linear
from isobit.ops.linear import reference
from isobit.ops.linear.cuda_layers import MOST_SPLIT_OUTPUTS
from isobit.ops.linear.reference import BLOCK, ROUNDING, SHARDED_INPUTS, SHARDS, TINY, rounded
from isobit.ops.linear.stored import narrowest_format
from isobit.ops.linear.tiles import FLOAT16

STEP = 16
STEP_ROUNDINGS = 18  # a step aligns its 16 products and the sum so far to the largest of them, and cuts each off once
CUT_OFF = 2 * ROUNDING  # of the largest term, at most: 23 bits are kept


def linear(x: np.ndarray, weights: Linear) -> np.ndarray:
    """x [R, in_features] -> float64 [R, out_features], the rounding of the inputs to half included."""
    return reference.linear(multiplied_inputs(x, weights), weights)


def error_limit(x: np.ndarray, weights: Linear, y: np.ndarray) -> np.ndarray:
    """How far the layer may be from y = `linear(x, weights)`, every rounding at its worst: float64 [R, outputs]."""
    chain_error = step_chain_error if on_tensor_cores(weights) else reference.fused_chain_error
    inputs = multiplied_inputs(x, weights)
    return reference.error_limit(inputs, np.zeros(inputs.shape), weights, y, chain_error)


def on_tensor_cores(weights: Linear) -> bool:
    """Whether the weights are halves: trellis values are; plain weights where half holds all of them."""
    return isinstance(weights, Exl3Linear) or narrowest_format(weights.weight) == FLOAT16


def multiplied_inputs(x: np.ndarray, weights: Linear) -> np.ndarray:
    """The inputs whose products with the weights are summed; those of a trellis layer are rounded when rotated."""
    if isinstance(weights, Exl3Linear) or not on_tensor_cores(weights):
        return x
    high = rounded(x)
    if len(weights.weight) > MOST_SPLIT_OUTPUTS:
        return high
    return high + rounded(x.astype(np.float32) - high.astype(np.float32))


def step_chain_error(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How far chains of steps of 16 products, two of each shard, and their sum may be off."""
    inputs = len(weights)
    shards = SHARDS if inputs >= SHARDED_INPUTS else 1
    steps = min(-(-inputs // shards) + BLOCK, inputs) / STEP + 1
    return (steps * STEP_ROUNDINGS * CUT_OFF + 2 * shards * ROUNDING) * (x @ weights) + inputs * TINY
