"""Speed and error of the quantizer on this GPU: `python bench/cuda/quantize.py [--quick] [--compile]`.

Searches Gaussian 16x16 tiles at each width, prints weights a second beside the rate at which the GPU could issue the
search's instructions, and the normalised mean squared error beside its limit; checks some tiles against the CPU's
states. Without --quick also every other shape of the kernel, and whole layers with their rotations, scales and packing.
Exit code 1 if a limit is missed or a state differs. --compile needs no GPU: it compiles the kernels for an H200.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Entry, show, wall_milliseconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.quantize import ERROR_LIMITS, error

from isobit.checkpoint import search_cuda
from isobit.checkpoint.quantize import BEST_DEVIATION, quantize_linear
from isobit.checkpoint.search import fresh_bits, seam_window
from isobit.checkpoint.search import search as search_on_cpu
from isobit.checkpoint.search_cuda import SearchShape
from isobit.checkpoint.trellis import STATES, TILE_VALUES
from isobit.checkpoint.weights import WIDTHS
from isobit.checkpoint.workbench_cuda import GpuWorkbench
from isobit.cuda import kernels, memory

CLOCK, LANES = 1.755e9, 128  # hertz; instructions a clock of a multiprocessor
STATE_INSTRUCTIONS = 5  # difference, square and sum, comparison, its mark, minimum
CHECKED_TILES = 24
WAVES = 3
REPEATS = 3
QUICK_WIDTHS = (2, 3, 4, 5)
OTHER_SHAPES: dict[float, tuple[SearchShape, ...]] = {
    2: (SearchShape((2, 2), 1, 1, True, 1024), SearchShape((2, 2), 1, 2, False)),
    3: (
        SearchShape((3, 3), 1, 2, True),
        SearchShape((3, 3), 2, 1, True, 1024),
        SearchShape((3, 3), 1, 2, True, 1024),
        SearchShape((3, 3), 2, 2, False),
    ),
    4: (
        SearchShape((4, 4), 2, 1, True),
        SearchShape((4, 4), 4, 1, True),
        SearchShape((4, 4), 2, 1, True, 1024),
        SearchShape((4, 4), 1, 2, True, 1024),
    ),
    5: (SearchShape((5, 5), 1, 2, True, 1024), SearchShape((5, 5), 4, 1, True)),
}
LAYERS = ((2560, 640, 3), (640, 2560, 3), (2560, 12288, 4))


def floor_ms(tiles: int, bits: float) -> float:
    """What the search's states take at the rate of issue."""
    steps = TILE_VALUES + 2 * seam_window(TILE_VALUES, fresh_bits(bits))
    states = tiles * steps * STATES
    return 1e3 * states * STATE_INSTRUCTIONS / (CLOCK * LANES * memory.multiprocessors())


def search_times(bits: float, shapes: tuple[SearchShape, ...]) -> Iterator[Entry]:
    """The search in each shape: full waves of tiles."""
    blocks = memory.multiprocessors()
    for number, shape in enumerate(shapes):
        tiles = WAVES * blocks * shape.rings
        values = np.random.default_rng(20).standard_normal((tiles, TILE_VALUES)).astype(np.float32)
        targets = values * np.float32(BEST_DEVIATION["mul1"][bits])
        placed = memory.to_device(targets)
        found = memory.to_host(search_cuda.search(placed, bits, "mul1", shape)).view(np.uint16)
        ms = wall_milliseconds(partial(search_cuda.search, placed, bits, "mul1", shape), REPEATS)
        entry: Entry = {
            "what": f"search, {bits} bits, {shape.threads} threads x {shape.together} rings, "
            f"{shape.buffers} buffers{'' if shape.table_in_shared else ', table in L2'}",
            "ms": ms,
            "floor_ms": floor_ms(tiles, bits),
            "rate": f"{values.size / ms / 1e3:6.1f} M weights/s",
        }
        if number == 0:
            entry |= verdict(values, targets, found, bits)
        yield entry


def verdict(values: np.ndarray, targets: np.ndarray, found: np.ndarray, bits: float) -> dict[str, Any]:
    """Whether the error is within its limit and some states are the CPU's."""
    share, limit = error(values, found, "mul1"), ERROR_LIMITS.get(bits, 1)
    equal = np.array_equal(found[:CHECKED_TILES], search_on_cpu(targets[:CHECKED_TILES], bits, "mul1", threads=2))
    states = "states as on the CPU" if equal else "STATES DIFFER"
    return {"good": equal and share <= limit, "checked": f"error {share:.6f} of {limit:.4f}, {states}"}


def layer_times(inputs: int, outputs: int, bits: float) -> Entry:
    """A whole layer from host weights to host tensors."""
    weight = np.random.default_rng(21).standard_normal((outputs, inputs)).astype(np.float32)
    bench = GpuWorkbench()
    quantize = partial(quantize_linear, weight, bits, name="layer", bench=bench)
    quantize()
    ms = wall_milliseconds(quantize, REPEATS)
    return {
        "what": f"layer {inputs}x{outputs}, {bits} bits, all steps",
        "ms": ms,
        "floor_ms": floor_ms(weight.size // TILE_VALUES, bits),
        "rate": f"{weight.size / ms / 1e3:6.1f} M weights/s",
    }


def shapes_of(bits: float, quick: bool) -> tuple[SearchShape, ...]:
    """The kernel's shape for a width, then those to compare it with."""
    return (search_cuda.best_shape(bits), *(() if quick else OTHER_SHAPES.get(bits, ())))


def times(quick: bool) -> Iterator[Entry]:
    """One entry a measurement: what, ms, floor_ms, rate; `good` and `checked` where bits and error were checked."""
    for bits in QUICK_WIDTHS if quick else WIDTHS:
        yield from search_times(bits, shapes_of(bits, quick))
    for inputs, outputs, bits in LAYERS[:1] if quick else LAYERS:
        yield layer_times(inputs, outputs, bits)


def compile_all(quick: bool) -> None:
    """Fill the store of compiled kernels with all that are measured."""
    with kernels.rehearsal((9, 0)):
        for bits in QUICK_WIDTHS if quick else WIDTHS:
            for shape in shapes_of(bits, quick):
                shape.kernel().launcher()
        GpuWorkbench().packed_tiles(torch.zeros((1, TILE_VALUES), dtype=torch.int16), 3)


def main(quick: bool) -> int:
    good = True
    for entry in times(quick):
        show([entry])
        good = good and entry.get("good", True)
    return 0 if good else 1


if __name__ == "__main__":
    if "--compile" in sys.argv:
        compile_all("--quick" in sys.argv)
    else:
        sys.exit(main("--quick" in sys.argv))
