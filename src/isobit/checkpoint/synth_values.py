"""Random values that are the same on every machine: raw PCG64 integers, then single IEEE operations."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from isobit.checkpoint.store import NUMPY_TYPES

PIECE_VALUES = 1 << 22
BELL_SPREAD = 147.8  # standard deviation of the sum of four random bytes


class Values:
    """A tensor's random values, in order: keyed by the seed and the tensor's name, whatever is written around it."""

    def __init__(self, seed: int, name: str):
        self._key = f"{seed}/{name}"

    @cached_property
    def _generator(self) -> np.random.PCG64:
        """Made when a value is drawn: most tensors of a checkpoint are small and given, and making it takes longer."""
        digest = hashlib.sha256(self._key.encode()).digest()
        state, increment = (int.from_bytes(half, "little") for half in (digest[:16], digest[16:]))
        generator = np.random.PCG64(0)
        generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
        return generator

    def skip(self, count: int) -> None:
        """Pass over an even number of `bell` values, as if they had been drawn."""
        self._generator.advance(count // 2)

    def words(self, count: int, dtype: Any) -> np.ndarray:
        """`count` random integers over the whole range of the integer type."""
        kind = np.dtype(dtype).newbyteorder("<")
        raw = np.asarray(self._generator.random_raw(-(-count * kind.itemsize // 8)), "<u8")
        return raw.view(kind)[:count]

    def bell(self, count: int, spread: float) -> np.ndarray:
        """float32, nearly normal with mean 0 and standard deviation `spread`: a sum of four bytes, scaled."""
        words = self.words(count, np.uint32)
        pairs = (words & np.uint32(0x00FF00FF)) + ((words >> np.uint32(8)) & np.uint32(0x00FF00FF))
        sums = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
        return (sums.astype(np.float32) - np.float32(510)) * np.float32(spread / BELL_SPREAD)

    def between(self, count: int, low: float, high: float) -> np.ndarray:
        """float32, uniform in [low, high]."""
        steps = (self.words(count, np.uint32) >> np.uint32(8)).astype(np.float32)
        return steps * np.float32((high - low) / (1 << 24)) + np.float32(low)

    def signed_between(self, count: int, low: float, high: float) -> np.ndarray:
        """float32, uniform in [low, high], each with a random sign; signs are drawn first, so pieces differ."""
        signs = (self.words(count, np.uint8) & 1).astype(np.float32) * np.float32(2) - np.float32(1)
        return self.between(count, low, high) * signs


Fill = Callable[[Values, int], np.ndarray]  # one object for equal arguments, but for `given`


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. fill(values, count): its next `count` values; a piece holds a multiple of `unit`.

    drawn_as: the name of the tensor whose random numbers it takes, when not its own. whole: whether another tensor has
    the same numbers, so that none of them can come from elsewhere.
    """

    dtype: str
    shape: tuple[int, ...]
    fill: Fill
    unit: int = 1
    drawn_as: str | None = None
    whole: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * NUMPY_TYPES[self.dtype].itemsize

    def pieces(self, seed: int, name: str) -> Iterator[np.ndarray]:
        """The tensor's values in order, as stored, a few megabytes at a time."""
        values = Values(seed, self.drawn_as or name)
        whole_words = 8 * self.unit  # a piece that ends inside a raw integer would drop the rest of it
        step = -(-PIECE_VALUES // whole_words) * whole_words
        for start in range(0, self.count, step):
            yield _stored(self.fill(values, min(step, self.count - start)), self.dtype)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(NUMPY_TYPES[dtype], copy=False)


@cache
def bell(spread: float) -> Fill:
    return lambda values, count: values.bell(count, spread)


@cache
def between(low: float, high: float) -> Fill:
    return lambda values, count: values.between(count, low, high)


@cache
def signed_between(low: float, high: float) -> Fill:
    return lambda values, count: values.signed_between(count, low, high)


@cache
def diagonal(size: int, value: float) -> Fill:
    """A [size, size] matrix with `value` on its diagonal and zeros elsewhere, in pieces of `size + 1` numbers."""

    def fill(values: Values, count: int) -> np.ndarray:
        numbers = np.zeros(count, np.float32)
        numbers[:: size + 1] = value
        return numbers

    return fill


def given(numbers: list[int], dtype: Any) -> Fill:
    return lambda values, count: np.array(numbers, dtype)


def bits(values: Values, count: int) -> np.ndarray:
    """Random int16 words: any pattern is a valid trellis, and a valid set of packed signs."""
    return values.words(count, np.int16)


@cache
def rings(words: int) -> Fill:
    """Rings of `words` words each: the scale, a half in [0.5, 1), then random bits."""

    def fill(values: Values, count: int) -> np.ndarray:
        rows = values.words(count, np.uint16).reshape(-1, words)
        rows[:, 0] = (rows[:, 0] & np.uint16(0x03FF)) | np.uint16(0x3800)
        return rows.view(np.int16).reshape(-1)

    return fill
