"""The trellis search on a GPU: the states that `isobit.checkpoint.search` finds on the CPU, bit for bit."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.checkpoint.search import STATE_BITS, fresh_bits, seam_window
from isobit.checkpoint.trellis import STATES, check_width, codebook_values
from isobit.cuda import kernels, memory
from isobit.cuda.errors import DeviceError

SOURCE = "checkpoint/search.cu"
RUN = 8  # leaving u that a thread takes at once
PADDING = 32  # costs
TABLE_BYTES = 2 * STATES
STATIC_BYTES = 2 << 10  # of shared memory, at most
RESERVED_BYTES = 1 << 10  # of shared memory, which every block gives to the system
HOPPER_SHARED_BYTES = 228 << 10  # of a multiprocessor; what the emulator stands for
# (together, buffers, table_in_shared), the fastest first.
SHAPES = ((2, 2, True), (2, 1, True), (1, 2, True), (1, 1, True), (1, 2, False), (1, 1, False))


@dataclass(frozen=True)
class SearchShape:
    """How the kernel is cut; no bit depends on it.

    fresh: new bits of even and odd positions; together: rings that a thread advances at once; buffers: 2 if a block
    keeps the costs of two positions, else 1; table_in_shared: whether the codebook lies in shared memory.
    """

    fresh: tuple[int, int]
    together: int
    buffers: int
    table_in_shared: bool
    threads: int = 512

    @property
    def rings(self) -> int:
        """Rings that a block searches at a time."""
        least_runs = (1 << (STATE_BITS - self.fresh[1])) // RUN
        return max(1, self.threads // least_runs) * self.together

    @property
    def note_bytes(self) -> int:
        """What a ring notes at each position: a byte for each path that is kept, or two for 16 marks."""
        paths = 1 << (STATE_BITS - self.fresh[0])
        return 2 * paths if self.fresh[0] == 4 else paths

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        costs = (1 << (STATE_BITS - self.fresh[0])) + (PADDING if self.fresh[1] <= 6 else 0)
        return 4 * self.buffers * self.rings * costs + (TABLE_BYTES if self.table_in_shared else 0)

    def kernel(self) -> kernels.Kernel:
        """The kernel of this shape."""
        even, odd = self.fresh
        return kernels.load(
            SOURCE,
            "search_rings",
            EVEN=even,
            ODD=odd,
            THREADS=self.threads,
            TOGETHER=self.together,
            BUFFERS=self.buffers,
            TABLE_IN_SHARED=int(self.table_in_shared),
        )


def search(targets: torch.Tensor, bits: float, codebook: str, shape: SearchShape | None = None) -> torch.Tensor:
    """The states of the closest paths: float32 [rings, n] -> the bits of uint16 in int16 [rings, n], on the device.

    As `isobit.checkpoint.search.search`, whose bits it gives in any shape. Raises DeviceError where the GPU has too
    little shared memory for this width.
    """
    check_width(bits, codebook)
    fresh = fresh_bits(bits)
    chosen = shape or best_shape(bits)
    count, length = targets.shape
    states = memory.empty((count, length), torch.int16)
    if count == 0:
        return states
    table = memory.to_device(codebook_values(codebook).view(np.int16))
    blocks = min(memory.multiprocessors(), -(-count // chosen.rings))
    workspace = memory.empty((blocks * length * chosen.rings * chosen.note_bytes,), torch.uint8)
    chosen.kernel()(
        blocks,
        chosen.threads,
        targets.contiguous(),
        table,
        workspace,
        states,
        count,
        length,
        seam_window(length, fresh),
        shared=chosen.shared_bytes,
    )
    return states


def best_shape(bits: float) -> SearchShape:
    """The fastest shape of this width that the GPU's shared memory holds."""
    limit = _shared_bytes() - RESERVED_BYTES - STATIC_BYTES
    shapes = [SearchShape(fresh_bits(bits), *sizes) for sizes in SHAPES]
    for shape in shapes:
        if shape.shared_bytes <= limit:
            return shape
    raise DeviceError(
        f"a search at {bits} bits needs {shapes[-1].shared_bytes >> 10} KiB of shared memory, this GPU's blocks have "
        f"{limit >> 10}; use --device cpu for this width"
    )


def _shared_bytes() -> int:
    """Shared memory of a multiprocessor."""
    if memory.is_emulated():
        return HOPPER_SHARED_BYTES
    return int(memory.properties().shared_memory_per_multiprocessor)
