"""What each gate sees, on ops whose defects are known; here the gates are tested, not the kernels."""

import itertools

import numpy as np
import pytest

from isobit.contract.gates import GATES, acceptable, on_threads
from isobit.contract.plans import Sizes
from isobit.ops import threads
from isobit.ops.contract import Case
from tests.contract.toy import Doubling, RunningSum

SIZES = Sizes((2, 3, 5, 33), 4)


def problem(gate, op, implementation=None):
    (case,) = op.cases(np.random.default_rng(0), full=False)
    return GATES[gate](op, implementation or op.implementations[-1], case, np.random.default_rng(1), SIZES)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", [Doubling(), RunningSum()])
def test_a_sound_op_is_green(gate, op):
    assert problem(gate, op) is None


def spoiled_doubling(compute):
    return type("Spoiled", (Doubling,), {"compute": lambda self, implementation, x, out: compute(x, out)})()


def spoiled_sum(advance):
    return type("Spoiled", (RunningSum,), {"advance": lambda self, *arguments: advance(*arguments)})()


def add_last_bit(x, out):
    out[...] = 2 * x
    out.view(np.int32)[...] ^= 1


def test_reference_sees_one_bit_beyond_the_limit():
    assert "the reference" in problem("reference", spoiled_doubling(add_last_bit))


def test_reference_sees_nan():
    assert "nan" in problem("reference", spoiled_doubling(lambda x, out: out.fill(np.nan)))


def test_reference_sees_outputs_that_it_does_not_know():
    class More(Doubling):
        def call(self, *arguments):
            return {**super().call(*arguments), "z": np.zeros(20)}

    assert "the op ['y', 'z']" in problem("reference", More())


def test_reference_sees_limits_that_limit_nothing():
    class Lax(Doubling):
        def error_limit(self, case, reference):
            return {"y": np.full(reference["y"].shape, np.inf)}

    assert "100% of y has no error limit" in problem("reference", Lax())


def test_acceptable_values():
    huge, inf, nan = 1e40, np.inf, np.nan
    actual = np.array([1, inf, inf, inf, nan, nan, 1, -inf, inf], np.float32)
    expected = np.array([1, inf, huge, 5, nan, 5, nan, inf, -huge])
    good = [True, True, True, False, True, False, False, False, False]
    assert acceptable(actual, expected, np.zeros(())).tolist() == good


def test_no_limit_makes_an_infinite_value_finite():
    actual = np.array([5, -np.inf, np.nan, np.inf], np.float32)
    assert acceptable(actual, np.full(4, np.inf), np.full(4, np.inf)).tolist() == [False, False, False, True]


def test_rows_sees_dependence_on_the_batch_size():
    def compute(x, out):
        (add_last_bit if len(x) == 5 else lambda x, out: np.multiply(2, x, out=out))(x, out)

    assert "call of 5 rows" in problem("rows", spoiled_doubling(compute))


def test_rows_sees_the_kernels_own_edge():
    def compute(x, out):
        np.multiply(2, x, out=out)
        if len(x) == 101:
            add_last_bit(x, out)

    op = spoiled_doubling(compute)
    assert problem("rows", op) is None
    op.row_edges = (100,)
    assert "call of 101 rows" in problem("rows", op)


def test_rows_sees_a_place_in_the_batch():
    def compute(x, out):
        np.multiply(2, x, out=out)
        if len(x) == SIZES.places:
            out[3] += 1

    assert "call of 4 rows" in problem("rows", spoiled_doubling(compute))


def test_rows_sees_the_number_of_threads():
    with on_threads(2):
        if threads() < 2:
            pytest.skip("needs two threads: NUMBA_NUM_THREADS is 1")

    def compute(x, out):
        np.multiply(2, x, out=out)
        if threads() == 2:
            add_last_bit(x, out)

    assert "2 threads" in problem("rows", spoiled_doubling(compute))


def test_rows_sees_stale_state():
    def advance(state, slot, x, out):
        out[...] = state[slot] + np.cumsum(x, axis=0)
        state[slot] = out[0]

    assert problem("rows", spoiled_sum(advance))


def test_rows_sees_a_state_that_only_the_end_shows():
    def advance(state, slot, x, out):
        RunningSum().advance(state, slot, x, out)
        if len(x) == 40:
            state[slot] += 1

    assert "state sums" in problem("rows", spoiled_sum(advance))


def test_replaces_sees_the_last_bit():
    class Other(Doubling):
        def compute(self, implementation, x, out):
            super().compute(implementation, x, out)
            if implementation == "other":
                add_last_bit(x, out)

    assert "differs from oracle" in problem("replaces", Other())
    assert problem("replaces", Other(), "oracle") is None


def test_nan_equals_any_other_nan():
    class OtherNan(Doubling):
        def compute(self, implementation, x, out):
            out.view(np.uint32)[...] = 0x7FC00000 if implementation == "oracle" else 0xFFC00001

    assert problem("replaces", OtherNan()) is None


def test_hygiene_sees_an_unwritten_element():
    def compute(x, out):
        np.multiply(2, x[:-1], out=out[:-1])

    assert "memory held before" in problem("hygiene", spoiled_doubling(compute))


@pytest.mark.parametrize("rows", [5, 6, 20])
def test_hygiene_sees_bytes_that_change_from_call_to_call(rows):
    calls = itertools.count()

    def compute(x, out):
        (add_last_bit if next(calls) % 2 else lambda x, out: np.multiply(2, x, out=out))(x, out)

    op = spoiled_doubling(compute)
    case = Case(f"{rows} rows", (1,) * rows, {"x": np.random.default_rng(0).standard_normal((rows, 5), np.float32)})
    assert "or on the run" in GATES["hygiene"](op, "other", case, np.random.default_rng(1), SIZES)


def test_hygiene_sees_a_changed_input():
    def compute(x, out):
        np.multiply(2, x, out=out)
        x[-1] = 0

    assert "changed an input" in problem("hygiene", spoiled_doubling(compute))


def memory_of(array):
    """The guarded memory that the array lies in, and where it begins there."""
    return array.base, array.ctypes.data - array.base.ctypes.data


@pytest.mark.parametrize(("offset", "words"), [(-1, "wrote before"), (0, "wrote past the end")])
def test_hygiene_sees_writes_around_the_output(offset, words):
    def compute(x, out):
        np.multiply(2, x, out=out)
        raw, start = memory_of(out)
        raw[start + offset if offset < 0 else start + out.nbytes] ^= 1

    assert words in problem("hygiene", spoiled_doubling(compute))


def test_hygiene_sees_reads_past_the_input():
    def compute(x, out):
        np.multiply(2, x, out=out)
        raw, start = memory_of(x)
        out[0, 0] += raw[start + x.nbytes]

    assert "memory held before" in problem("hygiene", spoiled_doubling(compute))


def test_hygiene_sees_a_strangers_state_written():
    def advance(state, slot, x, out):
        RunningSum().advance(state, slot, x, out)
        state[0] = slot

    assert "is written for streams" in problem("hygiene", spoiled_sum(advance))
