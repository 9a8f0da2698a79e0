"""The EXL3 bit formats in NumPy, exact: tiles, rings, codebooks, and what the quantized tensors stand for.

A *state* is a 16-bit number that a codebook maps to one half value. Neighbouring states share bits, so that a tile of
256 values takes 256*bits bits and a ring of n values n*bits bits; both wrap around.
"""

import importlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from isobit.checkpoint.weights import CODEBOOKS, WIDTHS, Exl3Linear, QuantizedEmbedding

TILE = 16
TILE_VALUES = TILE * TILE
STATES = 1 << 16
BLOCK = 128  # width of the rotations of a linear layer
GROUP = 256  # values in one ring of a quantized embedding
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


@lru_cache
def codebook_values(codebook: str) -> np.ndarray:
    """The half value of every state, float16 [65536], read-only. Raises ValueError for an unknown codebook."""
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook {codebook!r} is unknown, expected one of {', '.join(CODEBOOKS)}")
    states = np.arange(STATES, dtype=np.uint32)
    products = states * np.uint32(MULTIPLIERS[codebook])
    if codebook == "mul1":
        values = _scaled_byte_sums(products)
    else:
        values = _sums_of_halves(products + np.uint32(64248484) if codebook == "3inst" else products)
    values.flags.writeable = False
    return values


def _scaled_byte_sums(products: np.ndarray) -> np.ndarray:
    factor, offset = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
    byte_sums = products.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    return ((1024 + byte_sums) * factor + offset).astype(np.float16)


def _sums_of_halves(products: np.ndarray) -> np.ndarray:
    halves = ((products & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return halves[:, 0] + halves[:, 1]


def check_width(bits: float, codebook: str) -> None:
    """Raises ValueError unless `bits` is a width of the format, and one that `codebook` has."""
    if bits not in WIDTHS:
        raise ValueError(f"width {bits} is unknown, expected one of {', '.join(map(str, WIDTHS))}")
    if bits != int(bits) and codebook != "mul1":
        raise ValueError(f"width {bits} exists with codebook mul1 only, not with {codebook}")


@lru_cache
def state_ends(bits: float) -> np.ndarray:
    """int64 [256]: the bit of a tile's stream at which each position's state ends (exclusive). Read-only."""
    count = np.arange(1, TILE_VALUES + 1)
    twice = int(2 * bits)
    ends = count * (twice // 2) if twice % 2 == 0 else (count * twice - count % 2) // 2
    ends.flags.writeable = False
    return ends


@lru_cache
def tile_places() -> np.ndarray:
    """int64 [256]: row*16 + column, in the 16x16 tile, of each position. Read-only."""
    position = np.arange(TILE_VALUES)
    lane, slot = position // 8, position % 8
    row = 2 * (lane % 4) + (slot & 1) + 8 * ((slot >> 1) & 1)
    column = lane // 4 + 8 * (slot >> 2)
    places = row * TILE + column
    places.flags.writeable = False
    return places


def unpack_states(trellis: np.ndarray, bits: float) -> np.ndarray:
    """The states of packed tiles: int16 [..., 16*bits] -> uint16 [..., 256], in position order."""
    lead = trellis.shape[:-1]
    words = np.ascontiguousarray(trellis, dtype="<i2").view("<u4").astype(np.uint64)
    starts = (state_ends(bits) - 16) % int(TILE_VALUES * bits)
    first = starts // 32
    window = words[..., first] << np.uint64(32)
    window |= words[..., (first + 1) % words.shape[-1]]
    window >>= (48 - starts % 32).astype(np.uint64)
    return window.astype(np.uint16).reshape(*lead, TILE_VALUES)


def pack_states(states: np.ndarray, bits: float) -> np.ndarray:
    """Inverse of `unpack_states`: uint16 [..., 256] -> int16 [..., 16*bits].

    Only the new bits of each state are stored; states that do not overlap as a tail-biting path read back differently.
    """
    lead = states.shape[:-1]
    flat = states.reshape(-1, TILE_VALUES)
    ends = state_ends(bits)
    fresh = np.diff(ends, prepend=0)
    stream = np.zeros((len(flat), int(TILE_VALUES * bits)), np.uint8)
    for age in range(fresh.max()):
        held = np.flatnonzero(fresh > age)
        stream[:, ends[held] - 1 - age] = (flat[:, held] >> age) & 1
    words = np.packbits(stream, axis=1).view(">u4").astype("<u4")
    return words.view(np.int16).reshape(*lead, -1)


def tile_to_matrix(tiles: Any) -> Any:
    """Values in position order -> matrix: [K/16, N/16, 256] -> [K, N], an array or a tensor."""
    tiles_k, tiles_n, _ = tiles.shape
    square = tiles[:, :, np.argsort(tile_places()).tolist()].reshape(tiles_k, tiles_n, TILE, TILE)
    return square.swapaxes(1, 2).reshape(tiles_k * TILE, tiles_n * TILE)


def matrix_to_tile(matrix: Any) -> Any:
    """Inverse of `tile_to_matrix`: [K, N], multiples of 16 -> [K/16, N/16, 256], an array or a tensor."""
    k, n = matrix.shape
    square = matrix.reshape(k // TILE, TILE, n // TILE, TILE).swapaxes(1, 2)
    return square.reshape(k // TILE, n // TILE, TILE_VALUES)[:, :, tile_places().tolist()]


def dequantize_inner(linear: Exl3Linear) -> np.ndarray:
    """The codebook values of the layer, between the rotations: float16 [K, N], as stored (padded)."""
    return tile_to_matrix(codebook_values(linear.codebook)[unpack_states(linear.trellis, linear.bits)])


def dequantize(linear: Exl3Linear, dtype: DTypeLike = np.float64) -> np.ndarray:
    """The matrix W of y = x W + bias: `dtype` [in_features, out_features], rotations and scales applied, unpadded."""
    result: np.ndarray = np.empty((linear.in_features, linear.out_features), dtype)
    values = codebook_values(linear.codebook)
    suh, svh = linear.suh.astype(np.float64), linear.svh.astype(np.float64)
    for start in range(0, linear.in_features, BLOCK):
        stop = min(start + BLOCK, linear.in_features)
        tiles = linear.trellis[start // TILE : (start + BLOCK) // TILE]
        block = tile_to_matrix(values[unpack_states(tiles, linear.bits)]).astype(np.float64)
        block = butterfly(butterfly(block.T.copy(), BLOCK).T.copy(), BLOCK) / BLOCK
        block *= suh[start : start + BLOCK, None]
        block *= svh
        result[start:stop] = block[: stop - start, : linear.out_features]
    return result


def array_functions(values: Any) -> Any:
    """NumPy for its arrays, PyTorch for its tensors: what both name alike can be called on either."""
    return np if isinstance(values, np.ndarray) else importlib.import_module("torch")


def butterfly(x: Any, width: int) -> Any:
    """The unscaled Walsh-Hadamard transform of each `width` block of the last axis, strides 1, 2, ..., width/2.

    x: an array or a tensor.
    """
    stack = array_functions(x).stack
    for stride in (1 << i for i in range(width.bit_length() - 1)):
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * stride), 2, stride)
        upper, lower = pairs[..., 0, :], pairs[..., 1, :]
        x = stack((upper + lower, upper - lower), axis=-2).reshape(x.shape)
    return x


def unpack_ring(words: np.ndarray, bits: int) -> np.ndarray:
    """The states of rings, their scale word left out: int16 [..., n*bits/16] -> uint16 [..., n]."""
    count = words.shape[-1]
    stream = np.ascontiguousarray(words, dtype="<i2").view("<u2").astype(np.uint32)
    first_bit = np.arange(count * 16 // bits) * bits
    word = first_bit // 16
    window = stream[..., word] | stream[..., (word + 1) % count] << np.uint32(16)
    symbols = (window >> (first_bit % 16).astype(np.uint32)) & np.uint32((1 << bits) - 1)
    states = np.zeros_like(symbols)
    for age in range(-(-16 // bits)):
        states |= np.roll(symbols, age, axis=-1) << np.uint32(age * bits)
    return states.astype(np.uint16)


def pack_ring(states: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `unpack_ring`: uint16 [..., n] -> int16 [..., n*bits/16]; n*bits is a multiple of 16."""
    stream = ((states[..., None] >> np.arange(bits, dtype=np.uint16)) & 1).astype(np.uint8)
    stream = stream.reshape(*states.shape[:-1], states.shape[-1] * bits)
    return np.packbits(np.ascontiguousarray(stream), axis=-1, bitorder="little").view("<i2")


def ring_scales(rows: np.ndarray) -> np.ndarray:
    """The scale of each ring, its first word: int16 [..., words] -> float32 [...]."""
    return np.ascontiguousarray(rows[..., 0]).view(np.float16).astype(np.float32)


def dequantize_ngram_rows(rows: np.ndarray, bits: int, head_bias: np.ndarray | None = None) -> np.ndarray:
    """N-gram rows: int16 [R, 1 + width*bits/16] -> float32 [R, width]; head_bias: float16 [R, width], of each row."""
    values = codebook_values("mul1")[unpack_ring(rows[..., 1:], bits)].astype(np.float32)
    values *= ring_scales(rows)[..., None]
    return values if head_bias is None else values + head_bias.astype(np.float32)


def dequantize_embedding(embedding: QuantizedEmbedding, ids: np.ndarray | None = None) -> np.ndarray:
    """Embedding rows, all of them or those of `ids` [R]: float32 [R, hidden]."""
    rows = embedding.trellis if ids is None else embedding.trellis[ids]
    groups = embedding.signs.shape[0]
    rings = rows.reshape(len(rows), groups, rows.shape[1] // groups)
    rotated = dequantize_ngram_rows(rings, embedding.bits)
    values = butterfly(rotated, GROUP) * np.float32(1 / 16) * embedding.signs.astype(np.float32)
    return values.reshape(len(rows), groups * GROUP)[:, : embedding.hidden]
