"""The row contract of linear."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.checkpoint.weights import CODEBOOKS, WIDTHS, Exl3Linear, Linear, PlainLinear
from isobit.ops.cases import given, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.linear import reference
from isobit.ops.linear.blocks import FEW_ROWS, GROUP_ROWS
from isobit.ops.linear.cpu import (
    BY_ROW_COUNT,
    FEW_BY_FEW,
    IN_PANELS,
    MOST_ROWS,
    ROW_BY_ROW,
    linear,
    linears,
    prepare_linear,
)

HOW = {
    "row by row": ROW_BY_ROW,
    "few by few": FEW_BY_FEW,
    "in panels": IN_PANELS,
    "by row count": BY_ROW_COUNT,
}
IN_COMPANY = "in company"  # as one of several layers of the same x
FEW_FORMATS = (("mul1", 3), ("mul1", 2.5), ("mcg", 4), ("3inst", 5))


class LinearOp:
    """Every row is its own stream."""

    name = "linear"
    implementations: tuple[str, ...] = (*HOW, IN_COMPANY)
    row_edges: tuple[int, ...] = (3, GROUP_ROWS, FEW_ROWS, 2 * GROUP_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        formats = all_formats() if full else FEW_FORMATS
        for codebook, bits in formats:
            weights = random_trellis(rng, 200, 300, codebook, bits, bias=True)
            yield self._case(f"{codebook} {bits} bits 200x300", awkward_rows(rng, 23, 200), weights)
        for kind in ("float16", "bfloat16", "float32"):
            yield self._case(f"{kind} 150x41", awkward_rows(rng, 23, 150), random_plain(rng, 150, 41, kind))
        yield self._case("float32 130x1", awkward_rows(rng, 9, 130), random_plain(rng, 130, 1, "float32"))
        yield self._case("4 shards", awkward_rows(rng, 14, 4100), random_trellis(rng, 4100, 128, "mul1", 3))
        yield self._case("4 plain shards", awkward_rows(rng, 14, 4100), random_plain(rng, 4100, 33, "float16"))
        yield self._case("many rows", awkward_rows(rng, 530, 128), random_trellis(rng, 128, 128, "mul1", 3))
        if full:
            yield from self._real_widths(rng)

    def _real_widths(self, rng: np.random.Generator) -> Iterator[Case]:
        for k, n, bits in ((2560, 1024, 4), (2560, 640, 3), (640, 2560, 3), (6144, 384, 4), (2560, 512, 5)):
            weights = random_trellis(rng, k, n, "mul1", bits)
            yield self._case(f"{k}x{n} {bits} bits", awkward_rows(rng, 70, k), weights)
        for k, n in ((10240, 320), (320, 1024), (2560, 512), (2560, 48), (10240, 4)):
            yield self._case(f"{k}x{n} float16", awkward_rows(rng, 70, k), random_plain(rng, k, n, "float16"))

    def begin(self, case: Case) -> Any:
        return prepare_linear(case.inputs["weights"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        x = given(case.inputs["x"][stream_of_row(plan)])
        if implementation == IN_COMPANY:
            return {"y": linears(x, [state, state])[1]}
        return {"y": linear(x, state, HOW[implementation])}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"y": reference.linear(case.inputs["x"], case.inputs["weights"])}

    def error_limit(self, case: Case, reference_outputs: Outputs) -> Outputs:
        x = case.inputs["x"]
        return {"y": reference.error_limit(x, np.zeros(x.shape), case.inputs["weights"], reference_outputs["y"])}

    def limits(self) -> list[str]:
        return [
            "outputs beyond 2560 of one layer: columns are computed in blocks of 128 that do not meet",
            f"rows beyond 530: rows are computed in passes of at most {MOST_ROWS}",
        ]

    @staticmethod
    def _case(label: str, x: np.ndarray, weights: Linear) -> Case:
        return Case(label, (1,) * len(x), {"x": x, "weights": weights})


def all_formats() -> list[tuple[str, float]]:
    """Every codebook with every width it has."""
    return [(codebook, bits) for codebook in CODEBOOKS for bits in WIDTHS if codebook == "mul1" or bits == int(bits)]


def adversarial_rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """float32 rows, random, and by turns large, saturating, tiny, subnormal, cancelling, equal, sparse and zero."""
    x = rng.standard_normal((rows, width)).astype(np.float32)
    for i in range(1, rows, 2):
        kind = i // 2 % 9
        if kind < 4:
            x[i] *= np.array([300, 1e30, 1e-6, 1e-39], np.float32)[kind]
        elif kind == 4:
            x[i, width // 2 :] = -x[i, : width - width // 2]
        elif kind == 5:
            x[i] = 0.1
        elif kind == 6:
            x[i, rng.permutation(width)[1:]] = 0
        elif kind == 7:
            x[i] = 0
        else:
            x[i] = np.where(rng.random(width) < 0.5, 1, -1) * np.float32(2.0) ** rng.integers(-20, 8, width)
    return x


def awkward_rows(rng: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """float32 rows, most of them adversarial, those of `non_finite_rows` somewhere among them."""
    strange = non_finite_rows(rng, width)
    return np.concatenate([adversarial_rows(rng, rows - len(strange), width), strange])[rng.permutation(rows)]


def non_finite_rows(rng: np.random.Generator, width: int) -> np.ndarray:
    """float32 [4, width]: with one NaN, with one infinite value, with two of opposite signs, and of nothing but NaN."""
    x = rng.standard_normal((4, width)).astype(np.float32)
    x[0, width // 3] = np.nan
    x[1, width // 2] = -np.inf
    x[2, 0], x[2, -1] = np.inf, -np.inf
    x[3] = np.nan
    return x


def random_trellis(
    rng: np.random.Generator, inputs: int, outputs: int, codebook: str, bits: float, bias: bool = False
) -> Exl3Linear:
    """A layer of random tiles, padded to blocks of 128, with scales of mixed size and sign."""
    k, n = -(-inputs // 128) * 128, -(-outputs // 128) * 128
    trellis = rng.integers(-(2**15), 2**15, (k // 16, n // 16, int(16 * bits)), dtype=np.int16)
    suh = (rng.standard_normal(k) / np.sqrt(k)).astype(np.float16)
    svh = (rng.choice([-1, 1], n) * rng.uniform(0.25, 2, n)).astype(np.float16)
    added = rng.standard_normal(outputs).astype(np.float16) if bias else None
    return Exl3Linear(f"{codebook}-{bits}", trellis, suh, svh, added, bits, codebook, inputs, outputs)


def random_plain(rng: np.random.Generator, inputs: int, outputs: int, kind: str) -> PlainLinear:
    """A plain layer whose weights are exactly of the kind: float16, bfloat16 or float32."""
    weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
    if kind == "float16":
        weight = weight.astype(np.float16).astype(np.float32)
    elif kind == "bfloat16":
        weight = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return PlainLinear(kind, weight, rng.standard_normal(outputs).astype(np.float32))


register(LinearOp())
