"""Token embeddings on CUDA: the CPU's bytes, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.checkpoint.weights import PlainEmbedding  # noqa: E402
from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.errors import CheckpointError  # noqa: E402
from isobit.ops.embedding import cpu, cuda  # noqa: E402
from isobit.ops.embedding.contract import VOCABULARY  # noqa: E402
from isobit.ops.embedding.cuda_contract import Embedding  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

CASES = {case.label: case for case in cases_of(Embedding(), wide=False)}
FEW = ("float32 96", "float16 300", "bfloat16 300", "1 bits 300", "3 bits 300", "5 bits 96", "8 bits 300")


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("label", FEW)
def test_gates(label, gate):
    op = Embedding()
    for implementation in op.implementations:
        assert GATES[gate](op, implementation, CASES[label], np.random.default_rng(3), Sizes((2, 9), 3)) is None


def test_columns_past_the_hidden_size_are_dropped():
    stored = np.random.default_rng(0).standard_normal((4, 20)).astype(np.float16)
    weights = PlainEmbedding("embed", stored, 12)
    ids = np.array([3, 0], np.int32)
    found = memory.to_host(cuda.embed(ids, cuda.prepare_embedding(weights)))
    assert found.tobytes() == cpu.embed(ids, cpu.prepare_embedding(weights)).tobytes()


@pytest.mark.parametrize("label", ["float16 96", "2 bits 96"])
@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_an_id_outside_the_table_is_an_error_on_the_host_and_nan_on_the_device(label, wrong):
    handle = cuda.prepare_embedding(CASES[label].inputs["weights"])
    ids = np.array([1, wrong], np.int32)
    with pytest.raises(IndexError, match=f"table of {VOCABULARY} rows"):
        cuda.embed(ids, handle)
    found = memory.to_host(cuda.embed(memory.to_device(ids), handle))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_tensors_that_do_not_fit_are_an_error():
    with pytest.raises(CheckpointError, match="expected"):
        cuda.prepare_embedding(PlainEmbedding("embed", np.zeros((4, 8), np.float16), 9))


def test_no_rows_and_bytes():
    handle = cuda.prepare_embedding(CASES["2 bits 96"].inputs["weights"])
    assert cuda.embed(np.empty(0, np.int32), handle).shape == (0, 96)
    assert handle.nbytes == VOCABULARY * 33 * 2 + 256 * 4
