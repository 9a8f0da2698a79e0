"""Sampling on CUDA: the CPU's tokens, exact sums, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.ops.sample import Draw, cpu, cuda  # noqa: E402
from isobit.ops.sample.cuda_contract import Sample, TopLogprobs  # noqa: E402
from isobit.ops.scalar import exp64, log64  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SIZES = Sizes((3, 17), 2)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", [Sample(), TopLogprobs()], ids=lambda op: op.name)
def test_gates(op, gate):
    for case in cases_of(op, wide=False)[3:6:2]:
        for implementation in op.implementations:
            assert GATES[gate](op, implementation, case, np.random.default_rng(3), SIZES) is None


def hard_logits(kind: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Rows that fill few bins, or one, or whose values share most of their bits, and ordinary ones."""
    rows = (
        rng.standard_normal(width) * 3,
        rng.standard_normal(width) * 0.01 + 20,
        rng.integers(0, 4, width),
        rng.choice([1e30, 1e-30, -1e-38, 0, -0.0, 1e-45], width),
        np.full(width, -5),
        np.where(rng.random(width) < 0.5, 3, 3 + rng.integers(0, 3, width) * 2.0**-22),
        -np.abs(rng.standard_normal(width)) * 1e3,
    )
    return rows[kind].astype(np.float32)


DRAWS = (
    {},
    {"temperature": 0.0},
    {"temperature": 2.5, "top_p": 0.9},
    {"temperature": 1e4, "top_p": 0.999, "min_p": 0.05},
    {"top_k": 1500, "top_p": 0.5},
    {"top_k": 2700, "min_p": 0.5},
    {"top_k": 5, "min_p": 1.0},
    {"top_p": 0.0},
    {"top_p": -1.0, "min_p": 1.5},
)


@pytest.mark.parametrize("width", [3, 2049, 4500])
def test_tokens_and_order_are_the_cpus(width):
    rng = np.random.default_rng(width)
    logits = np.stack([hard_logits(kind, width, rng) for kind in range(7) for _ in DRAWS])
    draws = [Draw(**draw, seed=int(rng.integers(2**63)), position=7 * i) for i in range(7) for draw in DRAWS]
    expected, found = cpu.sample(logits, draws), cuda.sample(logits, draws)
    assert memory.to_host(found.tokens).tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(memory.to_host(found.logprob), expected.logprob, rtol=1e-12, atol=1e-12)
    for count in (1, 20, min(width, 2048)):
        ids, _ = cuda.top_logprobs(logits, count)
        assert np.array_equal(memory.to_host(ids), cpu.top_logprobs(logits, count)[0])


def test_a_logprob_is_that_of_the_exact_sum():
    logits = (np.random.default_rng(1).standard_normal((2, 3000)) * 9).astype(np.float32)
    found = memory.to_host(cuda.sample(logits, [Draw(temperature=0.0)] * 2).logprob)
    for row, values in enumerate(logits.astype(np.float64)):
        terms = [Fraction(exp64(value - values.max())) for value in values]
        total = sum(Fraction(int(term * 2**72), 2**72) for term in terms)
        assert found[row] == 0.0 - log64(float(total))


def test_the_largest_probability_is_exact_and_a_bad_row_stands_alone():
    logits = np.zeros((3, 2100), np.float32)
    logits[1, 2099] = np.nan
    logits[2, 5] = np.inf
    samples = cuda.sample(logits, [Draw(temperature=0.0)] * 3)
    assert memory.to_host(samples.tokens).tolist() == [0, -1, -1]
    assert memory.to_host(samples.finite).tolist() == [True, False, False]
    assert memory.to_host(samples.logprob)[0] == -log64(2100.0)
    ids, logprobs = cuda.top_logprobs(logits, 3)
    assert memory.to_host(ids).tolist() == [[0, 1, 2], [-1] * 3, [-1] * 3]
    assert np.isnan(memory.to_host(logprobs)[1:]).all()


def test_limits_are_errors():
    with pytest.raises(ValueError, match="at most 2048"):
        cuda.top_logprobs(np.zeros((1, 4000), np.float32), 3000)
    with pytest.raises(ValueError, match="expected 1 to"):
        cuda.sample(np.zeros((1, 0), np.float32), [Draw()])


def test_no_rows_and_no_ids():
    assert cuda.sample(np.zeros((0, 9), np.float32), []).tokens.shape == (0,)
    assert cuda.top_logprobs(np.zeros((2, 9), np.float32), 0)[0].shape == (2, 0)
