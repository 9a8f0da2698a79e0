"""The RMS norm on CUDA: the CPU's bytes, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.ops.norm import cpu, cuda  # noqa: E402
from isobit.ops.norm.cuda_contract import Norm  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SIZES = Sizes((2, 9, 65), 3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", Norm.implementations)
def test_gates(implementation, gate):
    op = Norm()
    for case in cases_of(op, wide=False)[-4:]:
        assert GATES[gate](op, implementation, case, np.random.default_rng(3), SIZES) is None


@pytest.mark.parametrize("width", [512, 513, 2560, 3072, 3073])
def test_groups_that_fit_in_registers_and_larger_ones_have_the_cpus_bytes(width):
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((2, 2, width)).astype(np.float32), rng.standard_normal(2 * width).astype(np.float32)
    expected = cpu.group_norm(x, weight, 2, 1e-6).tobytes()
    for how in (cuda.FEW_ROWS, cuda.MANY_ROWS):
        found = cuda.group_norm(memory.to_device(x), memory.to_device(weight), 2, 1e-6, how)
        assert memory.to_host(found).tobytes() == expected


def test_a_weight_on_the_host_is_uploaded_once_and_forgotten_with_its_array():
    weight = np.random.default_rng(0).standard_normal(8).astype(np.float32)
    placed = cuda.on_device(weight)
    assert cuda.on_device(weight) is placed
    assert memory.to_host(placed).tobytes() == weight.tobytes()
    kept = len(cuda._placed)
    del weight
    assert len(cuda._placed) == kept - 1


def test_no_rows():
    assert cuda.norm(memory.zeros((0, 8)), memory.zeros((8,)), 1e-6).shape == (0, 8)
