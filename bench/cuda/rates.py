"""How many operations of decoding this GPU does in a cycle of a scheduler: `python bench/cuda/rates.py`.

Of each operation: thousand millions a millisecond, and cycles that a scheduler takes for a warp's, at the clock that
makes a multiplication take two. "byte sums" are by integer tensor product, four words of a lane at once.
"""

import torch
from timing import milliseconds

from isobit.cuda import kernels, memory

OPERATIONS = ("multiply", "dp4a", "byte_perm", "funnel shift", "fma_half2", "byte sums", "codebook value")
SOURCE = "../../bench/cuda/rates.cu"  # below the package
BLOCKS_A_PROCESSOR, THREADS, CHAINS, COUNT = 4, 256, 8, 2048


def time_of(operation: int) -> float:
    """The median time of COUNT operations of every chain of every thread."""
    blocks = BLOCKS_A_PROCESSOR * memory.multiprocessors()
    out = memory.empty((blocks * THREADS,), torch.int32)
    kernel = kernels.load(SOURCE, "operations", OPERATION=operation)
    return milliseconds(lambda: kernel(blocks, THREADS, out, 7, COUNT))


def main() -> None:
    taken = [time_of(i) for i in range(len(OPERATIONS))]
    done = BLOCKS_A_PROCESSOR * memory.multiprocessors() * THREADS * CHAINS * COUNT / 1e9
    for name, each in zip(OPERATIONS, taken, strict=True):
        print(f"{name:16} {done / each:7.2f} G/ms   {2 * each / taken[0]:5.2f} cycles a warp", flush=True)


if __name__ == "__main__":
    main()
