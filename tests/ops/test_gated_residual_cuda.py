"""Gated residual streams on CUDA, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import memory  # noqa: E402
from isobit.ops.gated_residual import cuda, cuda_contract  # noqa: E402
from isobit.ops.gated_residual.cuda_contract import GatedRead, GatedWrite  # noqa: E402
from isobit.ops.norm.cpu import group_norm  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SIZES = Sizes((2, 9), 0)


class SmallGatedRead(GatedRead):
    """Without the larger row counts at which kernels change: the contract runs those."""

    row_edges = ()


CASES = cases_of(GatedRead(), wide=False)
WHOLE, LAYERS = CASES[-2], CASES[1]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", ["layer_by_layer", "few_rows", "many_rows"])
def test_gates_of_whole_reads(implementation, gate):
    assert GATES[gate](SmallGatedRead(), implementation, WHOLE, np.random.default_rng(3), SIZES) is None


def test_a_read_after_a_write_that_found_the_norms_gives_the_same_bytes():
    rng = np.random.default_rng(3)
    assert GATES["replaces"](SmallGatedRead(), cuda_contract.NORMED_WRITES, WHOLE, rng, SIZES) is None


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_reads_layer_by_layer(gate):
    assert GATES[gate](SmallGatedRead(), "by_row_count", LAYERS, np.random.default_rng(3), SIZES) is None


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", GatedWrite.implementations)
def test_gates_of_writes(implementation, gate):
    op = GatedWrite()
    for case in cases_of(op, wide=False):
        assert GATES[gate](op, implementation, case, np.random.default_rng(3), Sizes((2, 65), 3)) is None


def read(case, rows: np.ndarray, how: int) -> list[bytes]:
    site = GatedRead().begin(case)
    found = cuda.gated_read(memory.to_device(case.inputs["streams"][rows]), site, how=how)
    return [memory.to_host(part).tobytes() for part in found if part is not None]


@pytest.mark.parametrize(("case", "rows"), [(WHOLE, 66), (WHOLE, 17), (CASES[-1], 9)])
def test_rows_past_a_tile_and_columns_past_a_group_are_read_the_same_in_every_way(case, rows):
    chosen = np.arange(rows) % len(case.rows)
    expected = read(case, chosen, cuda.LAYER_BY_LAYER)
    assert read(case, chosen, cuda.MANY_ROWS) == expected
    if rows <= cuda.MOST_FEW_ROWS:
        assert read(case, chosen, cuda.FEW_ROWS) == expected


def test_which_sites_are_read_whole():
    op = GatedRead()
    assert op.begin(WHOLE).inject_at is not None
    site = op.begin(LAYERS)
    assert site.inject_at is None
    with pytest.raises(KeyError):
        cuda.gated_read(memory.to_device(LAYERS.inputs["streams"]), site, how=cuda.FEW_ROWS)


def test_little_shared_memory_changes_how_many_rows_are_read_but_no_byte(monkeypatch):
    rows = np.arange(66) % len(WHOLE.rows)
    expected = read(WHOLE, rows, cuda.BY_ROW_COUNT)
    monkeypatch.setattr(cuda, "_shared_memory", lambda: 99 << 10)
    monkeypatch.setattr(cuda, "_read_many_rows", None)
    assert read(WHOLE, rows, cuda.BY_ROW_COUNT) == expected


@pytest.mark.parametrize("width", [40, 3200])
def test_the_norms_of_a_write_are_those_of_a_norm(width):
    rng = np.random.default_rng(width)
    streams, y = rng.standard_normal((3, 2, width)), rng.standard_normal((3, width))
    placed, injection, added = (
        memory.to_device(array.astype(np.float32)) for array in (streams, rng.standard_normal((3, 2)), y)
    )
    inverse = memory.to_host(cuda.gated_write_normed(placed, injection, added, 1e-6))
    written = memory.to_host(placed)
    normed = group_norm(written, np.zeros(2 * width, np.float32), 2, np.float32(1e-6))
    assert (written * inverse[:, :, None]).tobytes() == normed.tobytes()


def test_no_rows():
    mixed, injection = cuda.gated_read(memory.zeros((0, 4, 144)), GatedRead().begin(WHOLE))
    assert mixed.shape == (0, 144)
    assert injection.shape == (0, 4)
    assert cuda.expand_streams(memory.zeros((0, 8)), 3).shape == (0, 3, 8)
