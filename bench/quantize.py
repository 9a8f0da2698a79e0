"""Error and speed of the quantizer on Gaussian weights: `python bench/quantize.py [--fit] [--tiles N] [--json]`.

Prints, for each codebook and width, the normalised mean squared error (with a fitted scale) beside its limit, and
weights a second: the best of three runs, compilation left out. Exit code 1 if a limit is missed. --fit searches the
deviations at which the error is least, as written down in BEST_DEVIATION of src/isobit/checkpoint/quantize.py.
"""

import argparse
import json
import sys
import time

import numba
import numpy as np

from isobit.checkpoint.quantize import BEST_DEVIATION, quantize_linear
from isobit.checkpoint.search import search
from isobit.checkpoint.trellis import TILE_VALUES, codebook_values
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS

ERROR_LIMITS = {1.5: 0.146, 2: 0.072, 2.5: 0.0365, 3: 0.0187, 3.5: 0.0092, 4: 0.0049}
SPEED_LIMIT = 60_000  # weights a second on two cores
REPEATS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="search the best deviations instead")
    parser.add_argument("--tiles", type=int, default=64, help="16x16 tiles of Gaussian weights (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    tiles = np.random.default_rng(20).standard_normal((options.tiles, TILE_VALUES)).astype(np.float32)
    pairs = [(codebook, bits) for codebook in CODEBOOKS for bits in WIDTHS if bits % 1 == 0 or codebook == "mul1"]
    if options.fit:
        for codebook, bits in pairs:
            print(f"{codebook:6} {bits:<4} {best_deviation(tiles, codebook, bits):.2f}", flush=True)
        return 0
    rows = [measure(tiles, codebook, bits) for codebook, bits in pairs]
    layer_speed = time_layer()
    missed = [row for row in rows if row["error"] > row["error_limit"] or row["speed"] < SPEED_LIMIT]
    if options.json:
        print(json.dumps({"threads": numba.get_num_threads(), "tiles": rows, "linear_3_bits": layer_speed}))
    else:
        report(rows, layer_speed)
    return 1 if missed else 0


def measure(tiles: np.ndarray, codebook: str, bits: float) -> dict[str, float | str]:
    scaled = tiles * np.float32(BEST_DEVIATION[codebook][bits])
    threads = numba.get_num_threads()
    search(scaled[:threads], bits, codebook, threads)
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        states = search(scaled, bits, codebook, threads)
        seconds.append(time.perf_counter() - begin)
    return {
        "codebook": codebook,
        "bits": bits,
        "error": error(tiles, states, codebook),
        "error_limit": ERROR_LIMITS.get(bits, 1.0),
        "speed": tiles.size / min(seconds),
    }


def error(tiles: np.ndarray, states: np.ndarray, codebook: str) -> float:
    """Normalised mean squared error with one fitted scale."""
    wanted, values = tiles.astype(np.float64), codebook_values(codebook)[states].astype(np.float64)
    fitted = values * ((wanted * values).sum() / np.square(values).sum())
    return float(np.square(wanted - fitted).sum() / np.square(wanted).sum())


def time_layer(size: int = 512) -> float:
    """Weights a second of a whole layer at 3 bits: scales, rotations, search and packing."""
    weight = np.random.default_rng(21).standard_normal((size, size)).astype(np.float32)
    begin = time.perf_counter()
    quantize_linear(weight, 3, name="layer")
    return weight.size / (time.perf_counter() - begin)


def best_deviation(tiles: np.ndarray, codebook: str, bits: float) -> float:
    """The least error's place: a coarse grid, then the parabola through the three points around its minimum."""
    spread = float(codebook_values(codebook).astype(np.float64).std())
    grid = spread * np.linspace(0.7, 1.3, 13)

    def at(deviation: float) -> float:
        return error(tiles, search(tiles * np.float32(deviation), bits, codebook, numba.get_num_threads()), codebook)

    errors = [at(float(deviation)) for deviation in grid]
    middle = min(max(int(np.argmin(errors)), 1), len(grid) - 2)
    around = slice(middle - 1, middle + 2)
    a, b, _ = np.polyfit(grid[around], errors[around], 2)
    return float(-b / (2 * a))


def report(rows: list[dict[str, float | str]], layer_speed: float) -> None:
    print(f"{numba.get_num_threads()} threads")
    print("codebook bits     error  limit   weights/s")
    for row in rows:
        limit = f"{row['error_limit']:.4f}" if row["error_limit"] != 1.0 else "-"
        print(f"{row['codebook']:8} {row['bits']:<4} {row['error']:9.6f}  {limit:6} {row['speed']:10,.0f}")
    print(f"a 512x512 layer at 3 bits, all steps: {layer_speed:,.0f} weights/s")


if __name__ == "__main__":
    sys.exit(main())
