"""Where the quantizer works: the arrays that it computes on and the trellis search, here on the CPU.

The quantizer's arithmetic is written once, for NumPy arrays and PyTorch tensors alike, in IEEE basic operations on
float64; so a workbench changes the speed, never the bits. `workbench_cuda.py` is the GPU's.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numba
import numpy as np

from isobit.checkpoint.search import search
from isobit.checkpoint.trellis import codebook_values, pack_ring, pack_states
from isobit.errors import IsobitError

Array = Any  # of the workbench: a NumPy array or a tensor
DEVICES = ("cpu", "cuda")


class Workbench(Protocol):
    """What the quantizer asks of a device. States are the workbench's own arrays [..., n]."""

    @property
    def place_name(self) -> str:
        """Where this is, for messages."""

    @property
    def weights_at_once(self) -> int:
        """How many weights of a layer to take at a time, so that the device is busy and its memory suffices."""

    @property
    def trial_tiles(self) -> int:
        """How many tiles keep the device busy for a moment."""

    def working(self) -> AbstractContextManager[None]:
        """Work is done inside: what a device is short of ends it with IsobitError."""

    def placed(self, values: np.ndarray) -> Array:
        """A host array on the device."""

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """float32 zeros on the device."""

    def wide(self, values: Array) -> Array:
        """The values as float64."""

    def host(self, values: Array) -> np.ndarray:
        """A device array on the host."""

    def search(self, targets: Array, bits: float, codebook: str) -> Array:
        """The states for targets [..., n], which are rounded to float32 first: see `search.search`."""

    def decoded(self, states: Array, codebook: str) -> Array:
        """The codebook values of states, float64."""

    def packed_tiles(self, states: Array, bits: float) -> np.ndarray:
        """As `trellis.pack_states`, on the host."""

    def packed_rings(self, states: Array, bits: int) -> np.ndarray:
        """As `trellis.pack_ring`, on the host."""


class CpuWorkbench:
    """NumPy, and the search on `threads` threads, or on all that there are."""

    place_name = "CPU"
    weights_at_once = 0
    trial_tiles = 8

    def __init__(self, threads: int | None = None):
        self._threads = numba.get_num_threads() if threads is None else threads

    def working(self) -> AbstractContextManager[None]:
        """Nothing is to be said."""
        return nullcontext()

    def placed(self, values: np.ndarray) -> np.ndarray:
        """The array itself."""
        return values

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        """float32 zeros."""
        return np.zeros(shape, np.float32)

    def wide(self, values: np.ndarray) -> np.ndarray:
        """The values as float64."""
        return values.astype(np.float64)

    def host(self, values: np.ndarray) -> np.ndarray:
        """The array itself."""
        return values

    def search(self, targets: np.ndarray, bits: float, codebook: str) -> np.ndarray:
        """uint16 states."""
        rings = targets.reshape(-1, targets.shape[-1]).astype(np.float32)
        return search(rings, bits, codebook, self._threads).reshape(targets.shape)

    def decoded(self, states: np.ndarray, codebook: str) -> np.ndarray:
        """The codebook values of states, float64."""
        return codebook_values(codebook)[states].astype(np.float64)

    def packed_tiles(self, states: np.ndarray, bits: float) -> np.ndarray:
        """As `trellis.pack_states`."""
        return pack_states(states, bits)

    def packed_rings(self, states: np.ndarray, bits: int) -> np.ndarray:
        """As `trellis.pack_ring`."""
        return pack_ring(states, bits)


def workbench(device: str = "cpu") -> Workbench:
    """The workbench of a device, "cpu" or "cuda"; raises IsobitError where there is no usable GPU."""
    if device == "cpu":
        return CpuWorkbench()
    if device not in DEVICES:
        raise IsobitError(f"device is {device}: expected one of {', '.join(DEVICES)}")
    from isobit.checkpoint.workbench_cuda import GpuWorkbench

    return GpuWorkbench()
