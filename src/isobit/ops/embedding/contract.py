"""The row contract of embedding."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.checkpoint.weights import PlainEmbedding, QuantizedEmbedding
from isobit.ops.cases import given, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.embedding import reference
from isobit.ops.embedding.cpu import embed, prepare_embedding

ROUNDING = 2.0**-24
VOCABULARY = 37


class Embedding:
    """Every row is its own stream."""

    name = "embedding"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        ids = rng.integers(0, VOCABULARY, 23).astype(np.int32)
        hidden_sizes = (96, 300, 2560) if full else (96, 300)
        for hidden in hidden_sizes:
            values = _adversarial(rng, (VOCABULARY, hidden))
            yield self._case(f"float32 {hidden}", ids, PlainEmbedding("embed", values, hidden))
            halves = np.clip(values, -65504, 65504).astype(np.float16)
            yield self._case(f"float16 {hidden}", ids, PlainEmbedding("embed", halves, hidden))
            upper = (values.view(np.uint32) >> 16).astype(np.uint16)
            yield self._case(f"bfloat16 {hidden}", ids, PlainEmbedding("embed", upper, hidden, bfloat16=True))
            for bits in range(1, 9):
                yield self._case(f"{bits} bits {hidden}", ids, _quantized(rng, bits, hidden))

    def begin(self, case: Case) -> Any:
        return prepare_embedding(case.inputs["weights"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        return {"rows": embed(given(case.inputs["ids"][stream_of_row(plan)]), state)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"rows": reference.embed(case.inputs["ids"], case.inputs["weights"])}

    def error_limit(self, case: Case, reference_rows: Outputs) -> Outputs:
        weights = case.inputs["weights"]
        if isinstance(weights, PlainEmbedding):
            return {"rows": np.zeros(())}
        terms = reference.scaled_codebook_values(case.inputs["ids"], weights)
        # Eight additions and three products a value, each within half a unit of the sum of all magnitudes.
        limit = (
            12 * ROUNDING * np.abs(terms).sum(axis=-1, keepdims=True) / 16 * np.abs(weights.signs.astype(np.float64))
        )
        return {"rows": limit.reshape(len(limit), -1)[:, : weights.hidden] + 2.0**-149}

    def limits(self) -> list[str]:
        return ["tables of 37 rows: a row's bytes do not depend on how many others there are"]

    @staticmethod
    def _case(label: str, ids: np.ndarray, weights: PlainEmbedding | QuantizedEmbedding) -> Case:
        return Case(label, (1,) * len(ids), {"ids": ids, "weights": weights})


def _adversarial(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rows of random values, and of large, tiny, subnormal, equal and zero ones."""
    values = rng.standard_normal(shape).astype(np.float32)
    scales = np.array([1, 6e4, 6e-5, 6e-8, 1e-40, 0], np.float32)
    values *= scales[np.arange(shape[0]) % len(scales), None]
    values[-1] = np.float32(0.1)
    return values


def _quantized(rng: np.random.Generator, bits: int, hidden: int) -> QuantizedEmbedding:
    groups = -(-hidden // 256)
    rings = rng.integers(-(2**15), 2**15, (VOCABULARY, groups, 1 + 16 * bits)).astype(np.int16)
    scales = rng.choice(np.array([1, -0.3, 60000, 6e-8, 6e-5, 0]), (VOCABULARY, groups)).astype(np.float16)
    rings[..., 0] = scales.view(np.int16)
    signs = rng.choice(np.array([1, -1, 1.5]), (groups, 256)).astype(np.float16)
    return QuantizedEmbedding("embed", rings.reshape(VOCABULARY, -1), signs, bits, hidden)


register(Embedding())
