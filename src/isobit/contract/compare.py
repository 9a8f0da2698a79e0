"""Comparing outputs by their bytes, and telling whether inputs stayed as they were."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from isobit.ops.contract import Outputs


def first_difference(left: Outputs, right: Outputs) -> str | None:
    """The first element whose bytes differ, by name and place, or None. Any NaN equals any other NaN."""
    if left.keys() != right.keys():
        return f"the outputs named {sorted(left.keys() ^ right.keys())}"
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} of {a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
        if a.tobytes() != b.tobytes():
            unequal = differing(a, b)
            if unequal.any():
                return f"{name}{place_of_first(unequal)}"
    return None


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """bool of a's shape: which elements have other bytes, NaNs apart."""
    unequal = bits_of(a) != bits_of(b)
    return unequal & ~(np.isnan(a) & np.isnan(b)) if a.dtype.kind == "f" else unequal


def bits_of(array: np.ndarray) -> np.ndarray:
    """The bytes of each element as a whole number: of the array's shape."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def place_of_first(mask: np.ndarray) -> list[int]:
    """The index of the first true element."""
    return [int(i) for i in np.argwhere(mask)[0]]


def fingerprint(value: Any) -> str:
    """A hash of every array within nested dicts, sequences and dataclasses."""
    digest = hashlib.sha256()
    for array in _arrays(value):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _arrays(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))
