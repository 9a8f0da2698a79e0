"""Row movement on CUDA: the CPU's bytes, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.ops.batch import Batch  # noqa: E402
from isobit.ops.journaled import JournaledOp  # noqa: E402
from isobit.ops.rows import cpu, cuda  # noqa: E402
from isobit.ops.rows.cuda_contract import MoveRows, ShiftRows  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SIZES = Sizes((2, 7), 3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", [ShiftRows(), JournaledOp(ShiftRows()), MoveRows()], ids=lambda op: op.name)
def test_gates(op, gate):
    for case in cases_of(op, wide=False):
        for implementation in op.implementations:
            assert GATES[gate](op, implementation, case, np.random.default_rng(3), SIZES) is None


def test_floats_lie_on_the_device_and_whole_numbers_on_the_host():
    for dtype in ("float32", np.float32, torch.float32, "float16"):
        made = cuda.zeros((2, 3), dtype)
        assert isinstance(made, torch.Tensor)
        assert not memory.to_host(made).any()
    made = cuda.zeros((2, 3), "int32")
    assert isinstance(made, np.ndarray)
    assert made.dtype == np.int32


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_rows_are_taken_put_and_filled_by_host_indices(count, dtype):
    rng = np.random.default_rng(count)
    x = rng.integers(0, 100, (9, 2, 3)).astype(dtype)
    pool = x.copy() if dtype == np.int32 else memory.to_device(x)
    chosen = rng.permutation(9)[:count].tolist()
    assert np.array_equal(cuda.to_host(cuda.take_rows(pool, chosen)), x[chosen])
    values = rng.integers(0, 100, (count, 2, 3)).astype(dtype)
    expected = x.copy()
    cuda.put_rows(pool, chosen, values)
    cpu.put_rows(expected, chosen, values)
    cuda.fill_rows(pool, chosen[:1], 7)
    cpu.fill_rows(expected, chosen[:1], 7)
    assert np.array_equal(cuda.to_host(pool), expected)


@pytest.mark.parametrize("count", [3, 8])
def test_of_equal_indices_the_last_counts(count):
    values = np.arange(count, dtype=np.float32)[:, None]
    pool = cuda.zeros((8, 1), "float32")
    cuda.put_rows(pool, [*range(count - 1), 0], values)
    assert memory.to_host(pool)[0] == count - 1


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_outside_the_rows_is_an_error(index):
    pool = cuda.zeros((3, 2), "float32")
    for move in (
        lambda: cuda.take_rows(pool, [index]),
        lambda: cuda.put_rows(pool, [index], pool[:1]),
        lambda: cuda.fill_rows(pool, [index], 0),
    ):
        with pytest.raises(IndexError, match="outside an array of 3 rows"):
            move()


def test_a_pool_on_the_host_is_shifted_there():
    batch = Batch(
        np.array([1], np.int32), np.array([0, 2], np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    )
    last = np.array([[5], [6]], np.int32)
    found = cuda.shift_rows(np.array([[1], [2]], np.int32), last, batch)
    assert found.tolist() == [[6], [1]]
    assert last.tolist() == [[5], [2]]


def test_elements_of_two_bytes_are_refused():
    one = np.zeros(1, np.int32)
    rows = cuda.zeros((2, 4), "float16")
    with pytest.raises(ValueError, match="expected of 4 bytes"):
        cuda.shift_rows(rows, rows, Batch(one, np.array([0, 2], np.int32), one, one[:, None]))
