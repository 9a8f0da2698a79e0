"""The quantizer's workbench on a GPU: PyTorch tensors, the search and the packing as kernels.

Only sums, differences, products and quotients of tensors are computed here, each rounded once as on the CPU. A tensor
must not be divided by a number that is no power of two: PyTorch would multiply by its reciprocal.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from isobit.checkpoint.search_cuda import search
from isobit.checkpoint.trellis import STATES, TILE_VALUES, codebook_values
from isobit.cuda import kernels, memory
from isobit.cuda.errors import DeviceError

PACK_SOURCE = "checkpoint/pack.cu"
PACK_THREADS = 256


class GpuWorkbench:
    """Raises DeviceError where there is no usable GPU."""

    place_name = "GPU"
    weights_at_once = 1 << 23

    def __init__(self) -> None:
        self._device = memory.device()
        self._codebooks: dict[str, torch.Tensor] = {}

    @property
    def trial_tiles(self) -> int:
        """How many tiles keep the GPU busy for a moment."""
        return 1 if memory.is_emulated() else 32 * memory.multiprocessors()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Raises DeviceError where the GPU's memory does not suffice."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise DeviceError(
                "the GPU has too little free memory to quantize: stop what else runs on it, or use --device cpu"
            ) from None

    def placed(self, values: np.ndarray) -> torch.Tensor:
        """A copy on the GPU."""
        return memory.to_device(values)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """float32 zeros."""
        return memory.zeros(shape)

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        """The values as float64."""
        return values.double()

    def host(self, values: torch.Tensor) -> np.ndarray:
        """A copy on the host."""
        return memory.to_host(values)

    def search(self, targets: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
        """The bits of uint16 states in int16."""
        rings = targets.reshape(-1, targets.shape[-1]).float()
        return search(rings, bits, codebook).reshape(targets.shape)

    def decoded(self, states: torch.Tensor, codebook: str) -> torch.Tensor:
        """The codebook values of states, float64."""
        if codebook not in self._codebooks:
            self._codebooks[codebook] = self.placed(codebook_values(codebook).astype(np.float64))
        return self._codebooks[codebook][states.int() & (STATES - 1)]

    def packed_tiles(self, states: torch.Tensor, bits: float) -> np.ndarray:
        """As `trellis.pack_states`, on the host."""
        words = memory.empty((*states.shape[:-1], int(TILE_VALUES * bits) // 32), torch.int32)
        self._pack("pack_tiles", states, words, int(2 * bits))
        return self.host(words).view(np.int16)

    def packed_rings(self, states: torch.Tensor, bits: int) -> np.ndarray:
        """As `trellis.pack_ring`, on the host."""
        length = states.shape[-1]
        words = memory.empty((*states.shape[:-1], length * bits // 16), torch.int16)
        self._pack("pack_rings", states, words, bits, length)
        return self.host(words)

    def _pack(self, name: str, states: torch.Tensor, words: torch.Tensor, *sizes: int) -> None:
        count = words.numel()
        if count:
            blocks = -(-count // PACK_THREADS)
            kernel = kernels.load(PACK_SOURCE, name)
            kernel(blocks, PACK_THREADS, states.contiguous(), words, count, *sizes)
