"""Gated residual streams on CUDA, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.compare import first_difference  # noqa: E402
from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import cases_of  # noqa: E402
from isobit.cuda import kernels, memory  # noqa: E402
from isobit.ops.contract import Span  # noqa: E402
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


def read(case, rows: np.ndarray, how: int) -> dict[str, np.ndarray]:
    site = GatedRead().begin(case)
    found = cuda.gated_read(memory.to_device(case.inputs["streams"][rows]), site, how=how)
    return {name: memory.to_host(part) for name, part in zip("mi", found, strict=True) if part is not None}


@pytest.mark.parametrize(("case", "rows"), [(WHOLE, 105), (WHOLE, 17), (CASES[-1], 9)])
def test_rows_past_a_tile_and_columns_past_a_group_are_read_the_same_in_every_way(case, rows, monkeypatch):
    chosen = np.arange(rows) % len(case.rows)
    expected = read(case, chosen, cuda.LAYER_BY_LAYER)
    with monkeypatch.context() as few_processors:
        few_processors.setattr(memory, "multiprocessors", lambda: 2)
        assert first_difference(read(case, chosen, cuda.MANY_ROWS), expected) is None
    if rows <= cuda.MOST_FEW_ROWS:
        assert first_difference(read(case, chosen, cuda.FEW_ROWS), expected) is None


@pytest.mark.parametrize(("streams", "hidden"), [(3, 176), (4, 1280)])
def test_inputs_that_end_within_a_stage_and_inputs_in_shards_are_read_the_same_in_every_way(streams, hidden):
    case = GatedRead._half_case(np.random.default_rng(hidden), streams, hidden, 24, True)
    chosen = np.arange(9) % len(case.rows)
    expected = read(case, chosen, cuda.LAYER_BY_LAYER)
    assert first_difference(read(case, chosen, cuda.MANY_ROWS), expected) is None


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names: list[str] = []
    launch = kernels.Kernel.__call__

    def noted(kernel, *arguments, **how):
        names.append(kernel.name)
        launch(kernel, *arguments, **how)

    monkeypatch.setattr(kernels.Kernel, "__call__", noted)
    return names


# Shards of whole streams, one shard of all streams, shards that divide streams.
@pytest.mark.parametrize(("streams", "hidden", "is_short"), [(4, 1280, True), (3, 176, True), (3, 1408, False)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_up_to_eight_rows_are_normed_where_they_are_multiplied_if_shards_are_whole_streams(
    launched, streams, hidden, is_short, rows
):
    case = GatedRead._half_case(np.random.default_rng(hidden), streams, hidden, 24, True)
    chosen = np.arange(rows) % len(case.rows)
    expected = read(case, chosen, cuda.LAYER_BY_LAYER)
    launched.clear()
    found = read(case, chosen, cuda.FEW_ROWS)
    longer = [] if rows * 2 * (4 if hidden >= 1280 else 1) <= cuda.MOST_OWN_TERMS else ["finish_down"]
    assert launched == [*(["down_few"] if is_short else ["norm_streams", "few_rows_plain"]), *longer, "mix_few"]
    assert first_difference(found, expected) is None


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_a_write_and_read_of_few_rows_are_two_or_three_launches_and_the_bytes_of_two_calls(launched, rows):
    case = GatedRead._half_case(np.random.default_rng(rows), 4, 1280, 24, True)
    site, rng = GatedRead().begin(case), np.random.default_rng(rows)
    before = case.inputs["streams"][:rows]
    injection, y = (
        memory.to_device(rng.standard_normal((rows, width)).astype(np.float32)) for width in (4, before.shape[2])
    )
    streams, apart = memory.to_device(before), memory.to_device(before)
    cuda.gated_write(apart, injection, y)
    expected = (*cuda.gated_read(apart, site, how=cuda.LAYER_BY_LAYER), apart)
    launched.clear()
    found = (*cuda.gated_write_read(streams, injection, y, site), streams)
    assert launched == ["down_few", *(["finish_down"] if rows > 4 else []), "mix_few"]
    for one, other in zip(found, expected, strict=True):
        assert memory.to_host(one).tobytes() == memory.to_host(other).tobytes()


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
    assert first_difference(read(WHOLE, rows, cuda.BY_ROW_COUNT), expected) is None


def test_little_shared_memory_lengthens_the_read_of_few_rows_but_changes_no_byte(monkeypatch, launched):
    chosen = np.arange(2)
    expected = read(WHOLE, chosen, cuda.FEW_ROWS)
    monkeypatch.setattr(cuda, "_shared_memory", lambda: 8 << 10)
    assert first_difference(read(WHOLE, chosen, cuda.FEW_ROWS), expected) is None
    assert launched == ["down_few", "mix_few", "norm_streams", "few_rows_plain", "mix_few"]


# The last has outputs for a warp's second tile, and for a second block of the smaller shapes.
@pytest.mark.parametrize(("case", "rows"), [(WHOLE, 40), (CASES[-1], 9)])
@pytest.mark.parametrize("shape", cuda.DOWN_SHAPES)
def test_the_shape_of_a_block_of_down_changes_no_byte(shape, case, rows, monkeypatch):
    chosen = np.arange(rows) % len(case.rows)
    expected = read(case, chosen, cuda.FEW_ROWS)
    monkeypatch.setattr(cuda, "down_shape", lambda *sizes: shape)
    assert first_difference(read(case, chosen, cuda.MANY_ROWS), expected) is None


def test_blocks_of_down_are_small_where_there_are_multiprocessors_for_them(monkeypatch):
    monkeypatch.setattr(memory, "multiprocessors", lambda: 132)
    shapes = [cuda.down_shape(rows, 4, 336) for rows in (65, 512, 513, 1024, 1025, 6144)]
    assert [cuda.DOWN_SHAPES.index(shape) for shape in shapes] == [0, 0, 1, 1, 2, 2]


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


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_a_write_and_the_read_after_it(gate):
    op = cuda_contract.GatedWriteRead()
    op.row_edges = ()
    cases = cases_of(op, wide=False)
    for case in (cases[1], cases[-2]):
        assert GATES[gate](op, "joined", case, np.random.default_rng(3), Sizes((9,), 0)) is None


# Sites whose layers are read whole, and sites whose layers are not halves.
@pytest.mark.parametrize("place", [-2, 0])
@pytest.mark.parametrize("rows", [3, 66])
def test_a_write_and_read_of_few_and_of_many_rows_give_the_bytes_of_two_calls(rows, place):
    case = cases_of(cuda_contract.GatedWriteRead(), wide=False)[place]
    plan = [Span(row % len(case.rows), 0, 1) for row in range(rows)]
    op = cuda_contract.GatedWriteRead()
    apart, joined = (op.call(how, case, op.begin(case), plan) for how in op.implementations)
    assert first_difference(apart, joined) is None
