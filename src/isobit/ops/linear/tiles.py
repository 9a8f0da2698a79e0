"""Sixteen by sixteen weights at a time: how each storage format becomes float32, as vector code.

A format is known by one whole number, so that Numba's cache can key on it. Decoding gives 32 vectors of 8 values:
those of inputs k = 0..15 and outputs 0..7 or 8..15. Each format has two compiled functions: `decode` writes float32
panels for the many-row product, `multiply_row` feeds one row's chains straight from registers.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from llvmlite import ir
from numba import cfunc, types

from isobit.ops.linear.memory import place_of
from isobit.ops.linear.vectors import (
    FLOAT,
    HALF,
    INT,
    SHORT,
    broadcast,
    fma,
    load,
    shuffle,
    splat,
    store,
    sum_of_bytes,
    vector,
)
from isobit.ops.scalar import intrinsic

TILE = 16
LANES = 8
HALVES = (0, 1)

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
_CODEBOOK_OF = {100: "3inst", 200: "mcg", 300: "mul1"}
_BASE_OF = {name: base for base, name in _CODEBOOK_OF.items()}


def trellis_format(codebook: str, bits: float) -> int:
    """The number of a trellis format."""
    return _BASE_OF[codebook] + int(2 * bits)


def tile_bytes(number: int) -> int:
    """Bytes of one tile of format `number`."""
    if number < 100:
        return TILE * TILE * (4 if number == FLOAT32 else 2)
    return 16 * (number % 100)


def _windows(builder, tile, twice_bits: int):
    """The 32-bit windows of the bit stream at every multiple of 16 bits: windows[h][g] for h = -1 .. 2*bits - 1.

    Lane g begins at bit 32*g*bits, where the values with l // 4 == g begin; window h begins 16*h bits later.
    """
    words = load(builder, tile, vector(INT, 4 * twice_bits), align=2)
    count = 4 * twice_bits

    def strided(word: int):
        lanes = [(g * twice_bits // 2 + word) % count for g in range(LANES)]
        return shuffle(builder, words, ir.Constant(words.type, ir.Undefined), lanes)

    needed = range(-1, twice_bits // 2 + 2)
    whole = {word: strided(word) for word in needed}
    sixteen = splat(INT, 16, LANES)

    def between(word: int):
        return builder.or_(builder.shl(whole[word], sixteen), builder.lshr(whole[word + 1], sixteen))

    straddling = {word: between(word) for word in range(-1, twice_bits // 2 + 1)}
    windows = {}
    for h in range(-1, twice_bits):
        even = whole[h // 2] if h % 2 == 0 else straddling[h // 2]
        if twice_bits % 2 == 0:
            windows[h] = even
        else:
            odd = straddling[h // 2] if h % 2 == 0 else whole[h // 2 + 1]
            windows[h] = shuffle(builder, even, odd, [g + LANES * (g % 2) for g in range(LANES)])
    return windows


def _state(builder, windows, twice_bits: int, q: int):
    """The 16-bit states of positions 32*g + q for the eight g."""
    end = ((q + 1) * twice_bits - ((q + 1) % 2) * (twice_bits % 2)) // 2
    first_half, skipped = divmod(end - 16, 16)
    window = windows[first_half]
    if skipped == 0:
        return builder.lshr(window, splat(INT, 16, LANES))
    shifted = builder.lshr(window, splat(INT, 16 - skipped, LANES))
    return builder.and_(shifted, splat(INT, 0xFFFF, LANES))


def _round_to_half(builder, x, scaled):
    """x rounded to 11 significant bits; scaled is x * 8193 rounded once (Dekker's splitting).

    For all three codebooks this is the rounding to half of every state, ties included; a test runs all of them.
    """
    return builder.fadd(scaled, builder.fsub(x, scaled))


def _mul1_values(builder, states):
    total = sum_of_bytes(builder, builder.mul(states, splat(INT, 0x83DCD12D, LANES)))
    h = builder.uitofp(total, vector(FLOAT, LANES))
    factor, offset = _half(0x1EEE), _half(0x1EEE) * 1024 + _half(0xC931)
    x = fma(builder, h, splat(FLOAT, factor, LANES), splat(FLOAT, offset, LANES))
    scaled = fma(builder, h, splat(FLOAT, factor * 8193, LANES), splat(FLOAT, offset * 8193, LANES))
    return _round_to_half(builder, x, scaled)


def _half(bits: int) -> float:
    return float(np.uint16(bits).view(np.float16))


def _sum_of_halves(builder, words):
    """The two masked halves of every lane, added and rounded to half.

    A half with exponent 12 to 15 becomes a float32 by moving its sign and low 12 bits into place.
    """
    kept, flipped, three = (splat(INT, value, LANES) for value in (0x81FFE000, 0x3F6C0000, 3))

    def widened(high):
        moved = builder.and_(builder.ashr(high, three), kept)
        return builder.bitcast(builder.xor(moved, flipped), vector(FLOAT, LANES))

    low = widened(builder.shl(words, splat(INT, 16, LANES)))
    x = builder.fadd(low, widened(words))
    return _round_to_half(builder, x, builder.fmul(x, splat(FLOAT, 8193.0, LANES)))


def _codebook_values(builder, codebook: str, states):
    if codebook == "mul1":
        return _mul1_values(builder, states)
    if codebook == "mcg":
        return _sum_of_halves(builder, builder.mul(states, splat(INT, 0xCBAC1FED, LANES)))
    product = builder.mul(states, splat(INT, 89226354, LANES))
    return _sum_of_halves(builder, builder.add(product, splat(INT, 64248484, LANES)))


def _trellis_values(builder, tile, codebook: str, twice_bits: int):
    windows = _windows(builder, tile, twice_bits)
    for k in range(TILE):
        for half in HALVES:
            q = 8 * (k % 8 // 2) + (k & 1) + 2 * (k >> 3) + 4 * half
            yield k, half, _codebook_values(builder, codebook, _state(builder, windows, twice_bits, q))


def _plain_values(builder, tile, number: int):
    element, size = (FLOAT, 4) if number == FLOAT32 else (SHORT, 2)
    for k in range(TILE):
        for half in HALVES:
            stored = load(builder, tile, vector(element, LANES), (k * TILE + half * LANES) * size, align=size)
            if number == FLOAT16:
                stored = builder.fpext(builder.bitcast(stored, vector(HALF, LANES)), vector(FLOAT, LANES))
            elif number == BFLOAT16:
                widened = builder.zext(stored, vector(INT, LANES))
                stored = builder.bitcast(builder.shl(widened, splat(INT, 16, LANES)), vector(FLOAT, LANES))
            yield k, half, stored


def _values(builder, tile, number: int):
    """(k, half, vector) of all 32 vectors of the tile at address `tile`."""
    if number < 100:
        return _plain_values(builder, tile, number)
    return _trellis_values(builder, tile, _CODEBOOK_OF[number - number % 100], number % 100)


@intrinsic(prefer_literal=True)
def _decode_tile(typingctx, tile, out, number):
    """Write the tile's 256 float32 values to address `out`, [k, n]."""
    literal = number.literal_value

    def codegen(context, builder, signature, args):
        for k, half, values in _values(builder, args[0], literal):
            store(builder, values, args[1], (k * TILE + half * LANES) * 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, number), codegen


@intrinsic(prefer_literal=True)
def _multiply_tile(typingctx, tile, x, sums, number):
    """Carry 16 outputs' chains at address `sums` over the tile's 16 inputs at address `x`."""
    literal = number.literal_value

    def codegen(context, builder, signature, args):
        tile, x, sums, _ = args
        chains = [load(builder, sums, vector(FLOAT, LANES), half * LANES * 4) for half in HALVES]
        for k, half, values in _values(builder, tile, literal):
            input_k = broadcast(builder, load(builder, x, FLOAT, k * 4), LANES)
            chains[half] = fma(builder, input_k, values, chains[half])
        for half in HALVES:
            store(builder, chains[half], sums, half * LANES * 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, number), codegen


_ADDRESS = types.int64
_DECODE = types.void(*[_ADDRESS] * 6)
_MULTIPLY_ROW = types.void(*[_ADDRESS] * 6)


def _make_decode(number: int, size: int):
    @cfunc(_DECODE, cache=True)
    def decode(tiles, row_stride, rows, columns, panels, panel_stride):
        for row in range(rows):
            for column in range(columns):
                tile = tiles + row * row_stride + column * size
                _decode_tile(tile, panels + column * panel_stride + row * 1024, number)

    return decode


def _make_multiply_row(number: int, size: int):
    @cfunc(_MULTIPLY_ROW, cache=True)
    def multiply_row(tiles, row_stride, rows, columns, x, sums):
        for row in range(rows):
            for column in range(columns):
                _multiply_tile(tiles + row * row_stride + column * size, x + row * 64, sums + column * 64, number)

    return multiply_row


@dataclass(frozen=True)
class TileFormat:
    """The compiled functions of one format, by address; all arguments are int64, strides are in bytes.

    decode(tiles, row_stride, rows, columns, panels, panel_stride): tiles of `rows` tile rows and `columns` tile columns
    become float32 panels, one per tile column, [16*rows, 16].
    multiply_row(tiles, row_stride, rows, columns, x, sums): sums[16*columns] continue their chains over x[16*rows].
    """

    number: int
    tile_bytes: int
    decode: int
    multiply_row: int


_kept_alive: list = []


@cache
def tile_format(number: int) -> TileFormat:
    """Compile (or load from Numba's cache) the functions of a format."""
    size = tile_bytes(number)
    decode, multiply_row = _make_decode(number, size), _make_multiply_row(number, size)
    _kept_alive.extend((decode, multiply_row))
    return TileFormat(number, size, place_of(decode), place_of(multiply_row))
