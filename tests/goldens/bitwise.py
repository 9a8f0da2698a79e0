"""The EXL3 formats decoded bit by bit, one value at a time, straight from the format's description.

Shares no code with isobit and nothing with its way of doing it: Python integers, and `fractions` where a rounding is.
"""

from fractions import Fraction

import numpy as np

MASK = (1 << 32) - 1


def half(value: Fraction) -> np.float16:
    """A rational number rounded once to half precision, to nearest even; normal numbers and zero only."""
    if value == 0:
        return np.float16(0)
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    assert exponent >= -14, "subnormal"
    unit = Fraction(2) ** (exponent - 10)
    return np.float16(float(round(value / unit) * unit))


def half_bits(bits: int) -> Fraction:
    """The value of a half number from its bits."""
    sign, exponent, mantissa = bits >> 15, (bits >> 10) & 31, bits & 1023
    magnitude = (1024 + mantissa) * Fraction(2) ** (exponent - 25) if exponent else mantissa * Fraction(2) ** -24
    return -magnitude if sign else magnitude


def codebook_value(state: int, codebook: str) -> np.float16:
    """What a 16-bit state stands for."""
    if codebook == "mul1":
        product = state * 0x83DCD12D & MASK
        total = 1024 + sum(product >> shift & 255 for shift in (0, 8, 16, 24))
        return half(total * half_bits(0x1EEE) + half_bits(0xC931))
    product = (state * 89226354 + 64248484 if codebook == "3inst" else state * 0xCBAC1FED) & MASK
    mixed = product & 0x8FFF8FFF ^ 0x3B603B60
    return half(half_bits(mixed & 0xFFFF) + half_bits(mixed >> 16))


def tile_matrix(words: list[int], bits: float, codebook: str) -> np.ndarray:
    """One packed tile, 16*bits unsigned 16-bit words -> float16 [16, 16], row = k, column = n."""
    stream = []
    for low, high in zip(words[::2], words[1::2], strict=True):
        word = low | high << 16
        stream += [word >> shift & 1 for shift in range(31, -1, -1)]
    tile = np.empty((16, 16), np.float16)
    for p in range(256):
        whole = int(bits)
        end = (p + 1) * whole if bits == whole else ((p + 1) * (2 * whole + 1) - (p + 1) % 2) // 2
        state = 0
        for bit in range(end - 16, end):
            state = state << 1 | stream[bit % len(stream)]
        lane, slot = p // 8, p % 8
        row = 2 * (lane % 4) + (slot & 1) + 8 * (slot >> 1 & 1)
        tile[row, lane // 4 + 8 * (slot >> 2)] = codebook_value(state, codebook)
    return tile


def ring_values(words: list[int], bits: int) -> np.ndarray:
    """One ring without its scale word, unsigned 16-bit words -> float16 values of the mul1 codebook."""
    count = len(words) * 16 // bits
    symbols = []
    for i in range(count):
        stream_bits = (words[bit // 16] >> bit % 16 & 1 for bit in range(i * bits, (i + 1) * bits))
        symbols.append(sum(bit << place for place, bit in enumerate(stream_bits)))
    values = np.empty(count, np.float16)
    for i in range(count):
        state, shift, position = 0, 0, i
        while shift < 16:
            state |= symbols[position % count] << shift
            shift, position = shift + bits, position - 1
        values[i] = codebook_value(state & 0xFFFF, "mul1")
    return values
