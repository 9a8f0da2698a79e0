"""From plain weights to EXL3 tensors: scales, random-sign rotations, the trellis search, fitted scales.

Nothing here looks at activations: every input of a layer counts as equally strong. All arithmetic is elementwise in
float64 with sums in a fixed order, and the search is exact in its own terms, so the same weights and name give the
same bits on any machine and any number of threads.
"""

import hashlib
from collections.abc import Callable

import numba
import numpy as np

from isobit.checkpoint.search import search
from isobit.checkpoint.trellis import (
    BLOCK,
    GROUP,
    MULTIPLIERS,
    TILE_VALUES,
    butterfly,
    check_width,
    codebook_values,
    matrix_to_tile,
    pack_ring,
    pack_states,
    tile_to_matrix,
)
from isobit.checkpoint.weights import Exl3Linear, QuantizedEmbedding
from isobit.errors import IsobitError

QUANTIZER_VERSION = 1  # of the bits that the same weights give
HALF_MAX = float(np.finfo(np.float16).max)
OUTPUT_SCALE_EXPONENTS = (-10, 14)  # beyond these powers of two the input scales take over

# The deviation at which Gaussian targets are quantized with the least error (found by bench/quantize.py --fit).
BEST_DEVIATION: dict[str, dict[float, float]] = {
    "3inst": {1: 1.42, 2: 1.24, 3: 1.19, 4: 1.12, 5: 1.09, 6: 1.04, 7: 0.99, 8: 0.96},
    "mcg": {1: 1.44, 2: 1.24, 3: 1.19, 4: 1.14, 5: 1.09, 6: 1.03, 7: 0.98, 8: 0.96},
    "mul1": {1: 1.15, 1.5: 1.03, 2: 1.00, 2.5: 0.96, 3: 0.95, 3.5: 0.94, 4: 0.91, 5: 0.89, 6: 0.86, 7: 0.83, 8: 0.80},
}

Progress = Callable[[int], None]


class QuantizeError(IsobitError):
    """Weights that cannot be quantized."""


def quantize_linear(
    weight: np.ndarray,
    bits: float,
    codebook: str = "mul1",
    *,
    name: str = "",
    bias: np.ndarray | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Exl3Linear:
    """Quantize one layer: weight float32 [N, K] (outputs first, as Hugging Face stores it), bias float [N] or None.

    name keys the random signs. progress is told how many weights were done since the last call, padding included.
    Raises ValueError for a width the codebook does not have, QuantizeError for NaN, infinities or weights too large
    for the format's half-precision scales.
    """
    check_width(bits, codebook)
    _check_finite(weight, name)
    out_features, in_features = weight.shape
    padded = np.zeros((_padded(in_features), _padded(out_features)), np.float32)
    padded[:in_features, :out_features] = weight.T
    suh, svh = _scales(padded, BEST_DEVIATION[codebook][bits], name)
    trellis = np.empty((padded.shape[0] // 16, padded.shape[1] // 16, int(16 * bits)), np.int16)
    fit = _OutputFit(padded.shape[1])
    for start in range(0, padded.shape[0], BLOCK):
        strip = padded[start : start + BLOCK].astype(np.float64)
        scale = suh[start : start + BLOCK, None].astype(np.float64)
        targets = matrix_to_tile(_rotate(_divide(strip, scale * svh.astype(np.float64))).astype(np.float32))
        states = search(targets.reshape(-1, TILE_VALUES), bits, codebook, _threads(threads)).reshape(targets.shape)
        trellis[start // 16 : (start + BLOCK) // 16] = pack_states(states, bits)
        quantized = tile_to_matrix(codebook_values(codebook)[states]).astype(np.float64)
        fit.add(strip, _rotate(quantized) * scale)
        if progress:
            progress(strip.size)
    svh = _to_half(fit.scales(), name)
    stored_bias = None if bias is None else _stored_bias(bias, padded.shape[1], name)
    return Exl3Linear(name, trellis, suh, svh, stored_bias, bits, codebook, in_features, out_features)


def stored_tensors(linear: Exl3Linear) -> dict[str, np.ndarray]:
    """What a checkpoint stores of a layer, by suffix: trellis, suh, svh, the codebook's marker, bias."""
    tensors = {"trellis": linear.trellis, "suh": linear.suh, "svh": linear.svh}
    if linear.codebook != "3inst":
        tensors[linear.codebook] = np.array(MULTIPLIERS[linear.codebook], np.uint32).view(np.int32)
    if linear.bias is not None:
        tensors["bias"] = linear.bias
    return tensors


def quantize_ngram_rows(
    rows: np.ndarray, bits: int, bias: np.ndarray | None = None, *, threads: int | None = None, name: str = ""
) -> np.ndarray:
    """N-gram rows: float [R, width] -> int16 [R, 1 + width*bits/16]. bias: float16 [R, width] of each row's head."""
    _check_finite(rows, name)
    centred = rows.astype(np.float64)
    if bias is not None:
        centred -= bias.astype(np.float64)
    return _quantize_rings(centred, bits, threads, name)


def quantize_embedding(
    weight: np.ndarray, bits: int, *, name: str = "", threads: int | None = None
) -> QuantizedEmbedding:
    """Token embeddings: float [vocab, hidden] in rings of 256 rotated values, the last one zero-padded."""
    _check_finite(weight, name)
    vocab, hidden = weight.shape
    groups = -(-hidden // GROUP)
    signs = _random_signs(name, groups * GROUP).reshape(groups, GROUP)
    padded = np.zeros((vocab, groups * GROUP), np.float64)
    padded[:, :hidden] = weight
    rotated = butterfly(padded.reshape(vocab, groups, GROUP) * signs, GROUP) / 16
    rings = _quantize_rings(rotated.reshape(-1, GROUP), bits, threads, name)
    return QuantizedEmbedding(name, rings.reshape(vocab, -1), signs.astype(np.float16), bits, hidden)


def ordered_sum(values: np.ndarray) -> np.ndarray:
    """The sum over the first axis by adding halves, in an order that depends on its length alone."""
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        values = folded if len(values) % 2 == 0 else np.concatenate([folded, values[-1:]])
    return values[0]


def _scales(padded: np.ndarray, deviation: float, name: str) -> tuple[np.ndarray, np.ndarray]:
    """float16 suh [K], svh [N], signed, such that each rotated block has about `deviation`.

    svh evens out the outputs. suh follows the square root of an input's size, which is least square error for inputs
    of equal strength: noise grows with suh^2, the weights to quantize shrink with it.
    """
    outputs = _output_sizes(padded)
    inputs = _input_sizes(padded, outputs)
    block_means = ordered_sum(inputs.reshape(-1, BLOCK).T) / BLOCK
    suh = np.sqrt(inputs * np.repeat(block_means, BLOCK)) / deviation
    exponent = int(np.frexp(outputs.max())[1])
    moved = exponent - min(max(exponent, OUTPUT_SCALE_EXPONENTS[0]), OUTPUT_SCALE_EXPONENTS[1])
    suh = np.ldexp(suh, moved) * _random_signs(f"{name}.suh", len(suh))
    svh = np.ldexp(outputs, -moved) * _random_signs(f"{name}.svh", len(outputs))
    return _to_half(suh, name), _to_half(svh, name)


def _output_sizes(padded: np.ndarray) -> np.ndarray:
    """The root mean square of each column; less in a block with columns of zeros, so that the block's mean is 1."""
    squares = np.zeros(padded.shape[1], np.float64)
    for start in range(0, len(padded), BLOCK):
        squares += ordered_sum(np.square(padded[start : start + BLOCK].astype(np.float64)))
    used = (squares > 0).reshape(-1, BLOCK).sum(axis=1) / BLOCK
    return np.sqrt(squares / len(padded) * np.repeat(used, BLOCK))


def _input_sizes(padded: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """The root mean square of each row after the columns are divided by `outputs`."""
    squares = np.empty(len(padded), np.float64)
    for start in range(0, len(padded), BLOCK):
        even = _divide(padded[start : start + BLOCK].astype(np.float64), outputs)
        squares[start : start + BLOCK] = ordered_sum(np.square(even).T)
    filled = BLOCK * int(outputs.reshape(-1, BLOCK).any(axis=1).sum())
    return np.sqrt(squares / max(filled, 1))


class _OutputFit:
    """Least squares for the output scales: the svh that bring what was quantized closest to the weights."""

    def __init__(self, outputs: int):
        self._products = np.zeros(outputs, np.float64)
        self._squares = np.zeros(outputs, np.float64)

    def add(self, weights: np.ndarray, quantized: np.ndarray) -> None:
        self._products += ordered_sum(weights * quantized)
        self._squares += ordered_sum(np.square(quantized))

    def scales(self) -> np.ndarray:
        return _divide(self._products, self._squares)


def _quantize_rings(values: np.ndarray, bits: int, threads: int | None, name: str) -> np.ndarray:
    """float64 [R, n] -> int16 [R, 1 + n*bits/16], each ring with its own fitted scale."""
    check_width(bits, "mul1")
    codebook: np.ndarray = codebook_values("mul1").astype(np.float64)
    size = np.sqrt(ordered_sum(np.square(values).T) / values.shape[1])
    deviation = BEST_DEVIATION["mul1"][bits]
    peak: np.ndarray = np.abs(values).max(axis=1)
    # A ring with outliers is scaled down until they fit into the codebook, but not to less than half.
    scale = np.maximum(size / deviation, np.minimum(peak / float(codebook.max()), 2 * size / deviation))
    states = search(_divide(values, scale[:, None]).astype(np.float32), bits, "mul1", _threads(threads))
    quantized = codebook[states]
    fitted = _divide(ordered_sum((values * quantized).T), ordered_sum(np.square(quantized).T))
    scales = _to_half(fitted, name).view(np.int16)
    return np.concatenate([scales[:, None], pack_ring(states, bits)], axis=1)


def _rotate(block: np.ndarray) -> np.ndarray:
    """The orthonormal Hadamard rotation of rows and columns, in blocks of 128; its own inverse."""
    return butterfly(butterfly(block.T, BLOCK).T, BLOCK) / BLOCK


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """values / by, 0 where `by` is 0."""
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape)), where=by != 0)


def _random_signs(name: str, count: int) -> np.ndarray:
    """+1 or -1, float64 [count], keyed by the name."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(-(-count // 64)).astype("<u8")
    return 1.0 - 2.0 * np.unpackbits(words.view(np.uint8), bitorder="little")[:count]


def _to_half(values: np.ndarray, name: str) -> np.ndarray:
    if np.abs(values).max(initial=0) > HALF_MAX:
        raise QuantizeError(f"{name}: the weights are too large for half-precision scales; leave this tensor plain")
    return (values + 0.0).astype(np.float16)  # the sum turns -0 into +0


def _stored_bias(bias: np.ndarray, outputs: int, name: str) -> np.ndarray:
    _check_finite(bias, f"{name}.bias")
    stored = np.zeros(outputs, np.float16)
    stored[: len(bias)] = _to_half(bias, f"{name}.bias")
    return stored


def _check_finite(values: np.ndarray, name: str) -> None:
    if not np.isfinite(values).all():
        raise QuantizeError(
            f"{name}: holds NaN or infinite values, expected finite weights; mend or replace the source"
        )


def _padded(features: int) -> int:
    return -(-features // BLOCK) * BLOCK


def _threads(asked: int | None) -> int:
    return numba.get_num_threads() if asked is None else asked
