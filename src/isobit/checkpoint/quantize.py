"""From plain weights to EXL3 tensors: scales, random-sign rotations, the trellis search, fitted scales.

Nothing here looks at activations: every input of a layer counts as equally strong. All arithmetic is elementwise in
float64 with sums in a fixed order, and the search is exact in its own terms, so the same weights and name give the
same bits on any machine, on any workbench.
"""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from isobit.checkpoint.trellis import (
    BLOCK,
    GROUP,
    MULTIPLIERS,
    array_functions,
    butterfly,
    check_width,
    codebook_values,
    matrix_to_tile,
    tile_to_matrix,
)
from isobit.checkpoint.weights import Exl3Linear, QuantizedEmbedding
from isobit.checkpoint.workbench import Array, CpuWorkbench, Workbench
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
    bench: Workbench | None = None,
    progress: Progress | None = None,
) -> Exl3Linear:
    """Quantize one layer: weight float32 [N, K] (outputs first, as Hugging Face stores it), bias float [N] or None.

    name keys the random signs. bench: where to work, the CPU unless said. progress is told how many weights were done
    since the last call, padding included. Raises ValueError for a width the codebook does not have, QuantizeError for
    NaN, infinities or weights too large for the format's half-precision scales.
    """
    check_width(bits, codebook)
    _check_finite(weight, name)
    bench = bench or CpuWorkbench()
    out_features, in_features = weight.shape
    padded = bench.zeros((_padded(in_features), _padded(out_features)))
    padded[:in_features, :out_features] = bench.placed(weight).T
    suh, svh = _scales(padded, BEST_DEVIATION[codebook][bits], name, bench)
    trellis = np.empty((padded.shape[0] // 16, padded.shape[1] // 16, int(16 * bits)), np.int16)
    fit = _OutputFit(padded.shape[1])
    output_scale = bench.placed(svh.astype(np.float64))
    for start, stop in _pieces(padded, bench):
        piece = bench.wide(padded[start:stop])
        scale = bench.placed(suh[start:stop, None].astype(np.float64))
        targets = matrix_to_tile(_rotate(_divide(piece, scale * output_scale)))
        states = bench.search(targets, bits, codebook)
        trellis[start // 16 : stop // 16] = bench.packed_tiles(states, bits)
        quantized = _rotate(tile_to_matrix(bench.decoded(states, codebook))) * scale
        fit.add(bench.host(_strip_sums(piece * quantized)), bench.host(_strip_sums(quantized * quantized)))
        if progress:
            progress((stop - start) * padded.shape[1])
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
    rows: np.ndarray, bits: int, bias: np.ndarray | None = None, *, name: str = "", bench: Workbench | None = None
) -> np.ndarray:
    """N-gram rows: float [R, width] -> int16 [R, 1 + width*bits/16]. bias: float16 [R, width] of each row's head."""
    _check_finite(rows, name)
    bench = bench or CpuWorkbench()
    centred = bench.wide(bench.placed(rows))
    if bias is not None:
        centred = centred - bench.wide(bench.placed(bias))
    return _quantize_rings(centred, bits, name, bench)


def quantize_embedding(
    weight: np.ndarray, bits: int, *, name: str = "", bench: Workbench | None = None
) -> QuantizedEmbedding:
    """Token embeddings: float [vocab, hidden] in rings of 256 rotated values, the last one zero-padded."""
    _check_finite(weight, name)
    bench = bench or CpuWorkbench()
    vocab, hidden = weight.shape
    groups = -(-hidden // GROUP)
    signs = _random_signs(name, groups * GROUP).reshape(groups, GROUP)
    padded = np.zeros((vocab, groups * GROUP), np.float64)
    padded[:, :hidden] = weight
    rotated = butterfly(bench.placed(padded.reshape(vocab, groups, GROUP) * signs), GROUP) / 16
    rings = _quantize_rings(rotated.reshape(-1, GROUP), bits, name, bench)
    return QuantizedEmbedding(name, rings.reshape(vocab, -1), signs.astype(np.float16), bits, hidden)


def ordered_sum(values: Array) -> Array:
    """The sum over the first axis by adding halves, in an order that depends on its length alone."""
    concatenate = array_functions(values).concatenate
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[half : 2 * half]
        values = folded if len(values) % 2 == 0 else concatenate([folded, values[-1:]])
    return values[0]


def _pieces(padded: Array, bench: Workbench) -> Iterator[tuple[int, int]]:
    """(first input, end) of the pieces that a layer is worked on in: strips of 128 inputs, several at once."""
    inputs, outputs = padded.shape
    step = BLOCK * max(1, bench.weights_at_once // (BLOCK * outputs))
    for start in range(0, inputs, step):
        yield start, min(start + step, inputs)


def _strip_sums(values: Array) -> Array:
    """[inputs, N] -> [strips, N]: the ordered sum of each strip of 128 inputs."""
    return ordered_sum(values.reshape(-1, BLOCK, values.shape[1]).swapaxes(0, 1))


def _scales(padded: Array, deviation: float, name: str, bench: Workbench) -> tuple[np.ndarray, np.ndarray]:
    """float16 suh [K], svh [N], signed, such that each rotated block has about `deviation`.

    svh evens out the outputs. suh follows the square root of an input's size, which is least square error for inputs
    of equal strength: noise grows with suh^2, the weights to quantize shrink with it.
    """
    outputs = _output_sizes(padded, bench)
    inputs = _input_sizes(padded, outputs, bench)
    block_means = ordered_sum(inputs.reshape(-1, BLOCK).T) / BLOCK
    suh = np.sqrt(inputs * np.repeat(block_means, BLOCK)) / deviation
    exponent = int(np.frexp(outputs.max())[1])
    moved = exponent - min(max(exponent, OUTPUT_SCALE_EXPONENTS[0]), OUTPUT_SCALE_EXPONENTS[1])
    suh = np.ldexp(suh, moved) * _random_signs(f"{name}.suh", len(suh))
    svh = np.ldexp(outputs, -moved) * _random_signs(f"{name}.svh", len(outputs))
    return _to_half(suh, name), _to_half(svh, name)


def _output_sizes(padded: Array, bench: Workbench) -> np.ndarray:
    """The root mean square of each column; less in a block with columns of zeros, so that the block's mean is 1."""
    squares = np.zeros(padded.shape[1], np.float64)
    for start, stop in _pieces(padded, bench):
        piece = bench.wide(padded[start:stop])
        for of_strip in bench.host(_strip_sums(piece * piece)):
            squares += of_strip
    used = (squares > 0).reshape(-1, BLOCK).sum(axis=1) / BLOCK
    return np.sqrt(squares / len(padded) * np.repeat(used, BLOCK))


def _input_sizes(padded: Array, outputs: np.ndarray, bench: Workbench) -> np.ndarray:
    """The root mean square of each row after the columns are divided by `outputs`."""
    squares = np.empty(len(padded), np.float64)
    divisors = bench.placed(outputs)
    for start, stop in _pieces(padded, bench):
        even = _divide(bench.wide(padded[start:stop]), divisors)
        squares[start:stop] = bench.host(ordered_sum((even * even).T))
    filled = BLOCK * int(outputs.reshape(-1, BLOCK).any(axis=1).sum())
    return np.sqrt(squares / max(filled, 1))


class _OutputFit:
    """Least squares for the output scales: the svh that bring what was quantized closest to the weights."""

    def __init__(self, outputs: int):
        self._products = np.zeros(outputs, np.float64)
        self._squares = np.zeros(outputs, np.float64)

    def add(self, products: np.ndarray, squares: np.ndarray) -> None:
        """Strips' sums [strips, N] of weight*quantized and of quantized^2."""
        for product, square in zip(products, squares, strict=True):
            self._products += product
            self._squares += square

    def scales(self) -> np.ndarray:
        return _divide(self._products, self._squares)


def _quantize_rings(values: Array, bits: int, name: str, bench: Workbench) -> np.ndarray:
    """float64 [R, n] -> int16 [R, 1 + n*bits/16], each ring with its own fitted scale."""
    check_width(bits, "mul1")
    array = array_functions(values)
    size = np.sqrt(bench.host(ordered_sum((values * values).T)) / values.shape[1])
    deviation = BEST_DEVIATION["mul1"][bits]
    peak = bench.host(array.amax(array.abs(values), axis=1))
    largest = float(codebook_values("mul1").max())
    # A ring with outliers is scaled down until they fit into the codebook, but not to less than half.
    scale = np.maximum(size / deviation, np.minimum(peak / largest, 2 * size / deviation))
    states = bench.search(_divide(values, bench.placed(scale[:, None])), bits, "mul1")
    quantized = bench.decoded(states, "mul1")
    products, squares = ordered_sum((values * quantized).T), ordered_sum((quantized * quantized).T)
    scales = _to_half(_divide(bench.host(products), bench.host(squares)), name).view(np.int16)
    return np.concatenate([scales[:, None], bench.packed_rings(states, bits)], axis=1)


def _rotate(block: Array) -> Array:
    """The orthonormal Hadamard rotation of rows and columns, in blocks of 128; its own inverse."""
    return butterfly(butterfly(block.T, BLOCK).T, BLOCK) / BLOCK


def _divide(values: Array, by: Array) -> Array:
    """values / by, 0 where `by` is 0."""
    where = array_functions(values).where
    return where(by != 0, values / where(by != 0, by, 1), 0.0)


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
