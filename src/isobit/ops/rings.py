"""The ring codec of n-gram rows and token embeddings: a scale, then a tail-biting stream of mul1 states."""

import numpy as np

from isobit.ops.scalar import fma32, from_half_bits, round_to_half, scalar_function

MUL1_MULTIPLIER = np.uint32(0x83DCD12D)
MUL1_SCALE = np.uint16(0x1EEE).view(np.float16).astype(np.float32)
MUL1_OFFSET = np.uint16(0xC931).view(np.float16).astype(np.float32)


@scalar_function
def mul1_value(state):
    """The mul1 codebook's half value of a 16-bit state, as float32."""
    product = np.uint32(np.uint32(state) * MUL1_MULTIPLIER)
    total = (product & 255) + ((product >> 8) & 255) + ((product >> 16) & 255) + (product >> 24)
    return round_to_half(fma32(np.float32(1024 + total), MUL1_SCALE, MUL1_OFFSET))


@scalar_function
def decode_ring(words, start, bits, count, out, out_start):
    """Write codebook(state) * scale of one ring's `count` values to out [.] from out_start.

    words: uint16 [.]; from `start` the scale's half bits, then count * bits / 16 words, in which bits i*bits to
    (i+1)*bits - 1, little-endian, are the low bits of state i; a state's higher bits are the symbols before.
    """
    scale = from_half_bits(words[start])
    stream_words = count * bits // 16
    mask = (1 << bits) - 1
    state = 0
    for i in range(-((15 + bits) // bits), count):
        bit = (i if i >= 0 else i + count) * bits
        word = bit >> 4
        following = word + 1 if word + 1 < stream_words else 0
        window = np.int64(words[start + 1 + word]) | (np.int64(words[start + 1 + following]) << 16)
        state = ((state << bits) | ((window >> (bit & 15)) & mask)) & 0xFFFF
        if i >= 0:
            out[out_start + i] = mul1_value(state) * scale
