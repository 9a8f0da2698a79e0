"""The linear layer's CUDA kernels, on the emulator or, with ISOBIT_TEST_GPU=1, on a GPU."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from isobit.checkpoint.trellis import dequantize_inner
from isobit.checkpoint.weights import PlainLinear
from isobit.errors import CheckpointError
from isobit.ops.linear import cpu
from isobit.ops.linear.contract import adversarial_rows, all_formats, awkward_rows, random_plain, random_trellis

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'isobit[cuda]'")

from isobit.contract.controls import controls_of  # noqa: E402
from isobit.contract.gates import GATES  # noqa: E402
from isobit.contract.plans import Sizes  # noqa: E402
from isobit.contract.run import run_control  # noqa: E402
from isobit.cuda import kernels, memory  # noqa: E402
from isobit.ops.linear import cuda, cuda_dealt, cuda_layers, cuda_products, cuda_reference  # noqa: E402
from isobit.ops.linear.cuda_contract import AS_WIDE, GROUPED, CudaLinearOp  # noqa: E402

pytestmark = pytest.mark.usefixtures("emulated_cuda")

# Widths and codebooks are decoded apart, so that not every pair must be compiled here; the contract runs them all.
FORMATS = [(codebook, bits) for codebook, bits in all_formats() if codebook == "mul1" or bits in (3, 8)]
SIZES = Sizes((2, 9), 2)
CASES = {
    "padded, with bias": lambda rng: random_trellis(rng, 100, 150, "mul1", 3, bias=True),
    "4 shards": lambda rng: random_trellis(rng, 4100, 128, "mul1", 3),
    "in halves": lambda rng: random_trellis(rng, 512, 300, "mul1", 3, bias=True),
    "several turns": lambda rng: random_trellis(rng, 640, 128, "mcg", 4),
    "float16, in two parts": lambda rng: random_plain(rng, 70, 41, "float16"),
    "float16, whole rows": lambda rng: random_plain(rng, 64, 520, "float16"),
    "4 plain shards": lambda rng: random_plain(rng, 4100, 33, "float16"),
}


def rows_of(name: str, rows: int, some_rows=adversarial_rows):
    rng = np.random.default_rng(2)
    weights = CASES[name](rng)
    return some_rows(rng, rows, weights.in_features), weights


def on_host(x: np.ndarray, handle, how: int = cuda.BY_ROW_COUNT) -> np.ndarray:
    return memory.to_host(cuda.linear(memory.to_device(x), handle, how))


class SmallLinearOp(CudaLinearOp):
    """Without the larger row counts at which kernels change: the contract runs those."""

    row_edges = (8,)


@pytest.mark.parametrize("name", ["padded, with bias", "float16, in two parts"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("implementation", ["few_rows", "many_rows", "grouped"])
def test_gates(implementation, gate, name):
    op = SmallLinearOp()
    x, weights = rows_of(name, 10, awkward_rows)
    assert GATES[gate](op, implementation, op._case(name, x, weights), np.random.default_rng(3), SIZES) is None


class GroupedOp(CudaLinearOp):
    """Defects are planted around its first implementation."""

    implementations = (GROUPED,)
    row_edges = (8,)


@pytest.mark.parametrize("defect", ["a launch's later layer", "a launch's layer before"])
def test_defects_around_a_launch_of_several_layers_are_seen(defect):
    assert_seen(GroupedOp(), defect, "padded, with bias")


def assert_seen(op, defect, name):
    x, weights = rows_of(name, 10, awkward_rows)
    (control,) = (control for control in controls_of(op) if defect in control.defect)
    assert run_control(control, [op._case(name, x, weights)]).red


class WideOp(CudaLinearOp):
    """Defects are planted around the kernels of layers of many outputs."""

    implementations = (AS_WIDE,)
    row_edges = (8, 16)


@pytest.mark.parametrize("defect", ["goes on with the chains", "more than 8 rows resume a column"])
def test_defects_around_a_wide_layer_are_seen(defect):
    assert_seen(WideOp(), defect, "in halves")


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_a_wide_layer(gate):
    op = WideOp()
    x, weights = rows_of("in halves", 10, awkward_rows)
    assert GATES[gate](op, AS_WIDE, op._case("in halves", x, weights), np.random.default_rng(3), SIZES) is None


def test_a_narrow_layer_takes_the_kernels_of_wide_ones_where_asked(monkeypatch):
    x, weights = rows_of("in halves", 20)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    loaded, load = [], kernels.load

    def noted(source, name, **macros):
        loaded.append(name)
        return load(source, name, **macros)

    monkeypatch.setattr(kernels, "load", noted)
    for rows, kernel in ((1, "few_rows_dealt"), (16, "few_rows_dealt"), (20, "few_rows_wide")):
        loaded.clear()
        assert on_host(x[:rows], handle, cuda.AS_WIDE).tobytes() == expected[:rows].tobytes()
        assert sorted(loaded) == [kernel, "rotate_few"]


@pytest.mark.parametrize("name", CASES)
def test_values_and_bytes_of_every_kind(name):
    op = CudaLinearOp()
    x, weights = rows_of(name, 19, awkward_rows)
    case = op._case(name, x, weights)
    for gate in ("reference", "replaces"):
        assert GATES[gate](op, "many_rows", case, np.random.default_rng(3), SIZES) is None


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_every_format_decodes_to_its_values(codebook, bits):
    weights = random_trellis(np.random.default_rng(4), 128, 128, codebook, bits)
    decoded = memory.to_host(cuda.expanded(cuda.prepare_linear(weights)))
    assert decoded.tobytes() == np.ascontiguousarray(dequantize_inner(weights).T).tobytes()


@pytest.mark.parametrize(
    ("name", "rows"),
    [*(("several turns", rows) for rows in (1, 16, 17, 40, 64)), ("float16, in two parts", 64), ("4 plain shards", 40)],
)
def test_few_rows_have_the_bytes_of_many(name, rows):
    x, weights = rows_of(name, rows + 1)
    handle = cuda.prepare_linear(weights)
    many = on_host(x, handle, cuda.MANY_ROWS)
    assert on_host(x[:rows], handle, cuda.FEW_ROWS).tobytes() == many[:rows].tobytes()


SHAPES_OF_BLOCKS = [(1, 1, True), (2, 3, False), (3, 8, True), (4, 5, False), (5, 2, True), (1, 19, True)]


@pytest.mark.parametrize(("turns", "columns", "fused"), SHAPES_OF_BLOCKS)
def test_the_shape_of_a_block_changes_nothing(turns, columns, fused, monkeypatch):
    x, weights = rows_of("several turns", 3)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle)
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: cuda.FewRowsShape(columns, turns, fused))
    assert on_host(x, handle).tobytes() == expected.tobytes()


LONG_TURNS = [(2560, 2, 6), (2560, 3, 4), (2560, 5, 2), (6144, 2, 3)]


@pytest.mark.parametrize(("inputs", "turns", "columns"), LONG_TURNS)
def test_turns_of_256_inputs_change_nothing(inputs, turns, columns, monkeypatch):
    rng = np.random.default_rng(10)
    handle = cuda.prepare_linear(random_trellis(rng, inputs, 128, "mul1", 3, bias=True))
    x = adversarial_rows(rng, 1, inputs)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    shape = cuda.FewRowsShape(columns, turns, True, 2)
    assert shape in cuda.possible_shapes(handle.shards, handle.input_blocks, 1)
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: shape)
    for _ in range(2):
        assert on_host(x, handle).tobytes() == expected.tobytes()


@pytest.mark.parametrize("bits", [1, 1.5, 2.5, 8])
def test_turns_of_256_inputs_of_other_widths_change_nothing(bits, monkeypatch):
    rng = np.random.default_rng(9)
    handle = cuda.prepare_linear(random_trellis(rng, 512, 128, "mul1", bits))
    x = adversarial_rows(rng, 1, 512)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: cuda.FewRowsShape(3, 2, True, 2))
    assert on_host(x, handle).tobytes() == expected.tobytes()


SHAPES_OF_MANY = [(17, 2, 6), (29, 1, 5), (33, 1, 8), (40, 4, 3), (64, 5, 2)]


@pytest.mark.parametrize("name", ["several turns", "4 shards"])
@pytest.mark.parametrize(("rows", "turns", "columns"), SHAPES_OF_MANY)
def test_the_shape_of_a_block_of_many_rows_changes_nothing(name, rows, turns, columns, monkeypatch):
    x, weights = rows_of(name, rows)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    shape = cuda.FewRowsShape(columns, turns, False)
    assert shape in cuda.possible_shapes(handle.shards, handle.input_blocks, rows)
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: shape)
    for _ in range(2):
        assert on_host(x, handle).tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [17, 35])
def test_what_lies_behind_the_last_row_changes_nothing(rows, monkeypatch):
    x, weights = rows_of("several turns", rows)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    empty = memory.empty
    monkeypatch.setattr(memory, "empty", lambda *sizes: empty(*sizes).fill_(float("nan")))
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: cuda.FewRowsShape(3, 2, False))
    assert on_host(x, handle).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("rows", "columns", "fused"), [(11, 8, True), (1, 5, True), (1, 3, False), (4, 1, True)])
def test_layers_of_one_launch_have_the_bytes_of_each_alone(rows, columns, fused, monkeypatch):
    rng = np.random.default_rng(7)
    weights = [
        random_trellis(rng, 300, 300, "mul1", 3, bias=True),
        random_plain(rng, 300, 41, "float16"),
        random_trellis(rng, 300, 128, "mul1", 3),
        random_trellis(rng, 300, 200, "mul1", 4),
        random_trellis(rng, 300, 140, "mul1", 3),
        random_plain(rng, 300, 16, "float16"),
        random_plain(rng, 300, 520, "float16"),
        random_plain(rng, 300, 70, "float32"),
        random_plain(rng, 300, 5, "float16"),
    ]
    handles = [cuda.prepare_linear(layer) for layer in weights]
    assert sorted(cuda.groups_of(handles)) == [(0, 2, 4), (1, 5, 8), (3,), (6,), (7,)]
    x = memory.to_device(adversarial_rows(rng, rows, 300))
    alone = [memory.to_host(cuda.linear(x, handle)).tobytes() for handle in handles]
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: cuda.FewRowsShape(columns, 3, fused))
    for _ in range(2):
        assert [memory.to_host(y).tobytes() for y in cuda.linears(x, handles)] == alone
    assert all(are_zero(handle) for handle in handles if isinstance(handle, cuda_layers.TrellisLayer))


@pytest.mark.parametrize("rows", [65, 200, cuda.MOST_FEW_PLAIN_ROWS, cuda.MOST_FEW_PLAIN_ROWS + 1])
def test_plain_layers_of_some_rows_have_the_bytes_of_many_rows(rows, monkeypatch):
    rng = np.random.default_rng(10)
    weights = [
        random_plain(rng, 70, 41, "float16"),
        random_trellis(rng, 70, 128, "mul1", 3),
        random_plain(rng, 70, 600, "float16"),
        random_plain(rng, 70, 48, "float16"),
    ]
    x = adversarial_rows(rng, rows, 70)
    handles = [cuda.prepare_linear(layer) for layer in weights]
    expected = [on_host(x, handle, cuda.OWN_PRODUCT).tobytes() for handle in handles]
    launches = []
    launch = cuda._multiply_plain
    monkeypatch.setattr(
        cuda, "_multiply_plain", lambda x, layers, *rest: (launches.append(len(layers)), launch(x, layers, *rest))
    )
    assert [memory.to_host(y).tobytes() for y in cuda.linears(memory.to_device(x), handles)] == expected
    assert [on_host(x, handle).tobytes() for handle in handles] == expected
    assert sorted(launches) == ([1, 1, 1, 1, 2] if rows <= cuda.MOST_FEW_PLAIN_ROWS else [])


def test_plain_layers_with_shards_are_computed_as_many_rows_from_65_on(monkeypatch):
    x, weights = rows_of("4 plain shards", 66)
    handle = cuda.prepare_linear(weights)
    # Its counters have room for the blocks of 64 rows.
    monkeypatch.setattr(cuda, "_multiply_plain", None)
    assert on_host(x, handle).tobytes() == on_host(x, handle, cuda.OWN_PRODUCT).tobytes()


def are_zero(handle):
    """Whether what a call is to leave zero is."""
    return not memory.to_host(handle.counters).any() and not memory.to_host(handle.passed).any()


@pytest.mark.parametrize("rows", [1, cuda_layers.MOST_PASSED_ROWS, cuda_layers.MOST_PASSED_ROWS + 1])
@pytest.mark.parametrize("columns", [1, 6, 7, 16])
def test_blocks_that_pass_sums_on_change_nothing(rows, columns, monkeypatch):
    rng = np.random.default_rng(8)
    weights = random_trellis(rng, 128, 500, "mul1", 3, bias=True)
    handle = cuda.prepare_linear(weights)
    x = adversarial_rows(rng, rows, 128)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    fitting = min(columns, cuda.resident_warps(rows, 1))
    monkeypatch.setattr(cuda, "few_rows_shape", lambda *sizes: cuda.FewRowsShape(fitting, 1, True))
    for _ in range(2):
        assert on_host(x, handle).tobytes() == expected.tobytes()
    assert are_zero(handle)


def test_a_launch_has_no_more_layers_than_the_kernel_and_none_of_several_shards():
    rng = np.random.default_rng(9)
    small = [cuda.prepare_linear(random_trellis(rng, 128, 128, "mul1", 3)) for _ in range(5)]
    assert sorted(map(len, cuda.groups_of(small))) == [1, 4]
    sharded = [cuda.prepare_linear(random_trellis(rng, 4096, 128, "mul1", 3)) for _ in range(2)]
    assert cuda.groups_of(sharded) == [(0,), (1,)]


def test_layers_of_one_input_refuse_what_each_alone_refuses():
    rng = np.random.default_rng(9)
    handles = [cuda.prepare_linear(random_trellis(rng, 128, 128, "mul1", 3)) for _ in range(2)]
    with pytest.raises(ValueError, match="expected 128"):
        cuda.linears(memory.zeros((1, 256)), handles)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64])
def test_every_possible_block_fits_a_multiprocessor(rows, shards):
    chunks = 20 if shards == 1 else 48
    for shape in cuda.possible_shapes(shards, chunks, rows):
        assert shape.warps <= cuda.resident_warps(rows, shape.turn_blocks)
        assert shape.turns <= chunks // shards
        for twice_bits in (8, 16):
            assert cuda.shared_bytes(shape, shards, chunks, rows, twice_bits) <= 226 << 10


@pytest.mark.parametrize("rows", [4, 32, 64])
@pytest.mark.parametrize("columns", [(640,), (384,), (640, 384), (768,), (32,)])
def test_no_possible_shape_costs_less_than_the_chosen_one(columns, rows):
    chosen, possible = cuda.least_cost_shape(columns, 1, 20, rows, 132), cuda.possible_shapes(1, 20, rows)
    costs = {shape: cuda.few_rows_cycles(shape, columns, 1, 20, rows, 132) for shape in possible}
    assert costs[chosen] == min(costs.values())
    assert costs[chosen] < costs[cuda.FewRowsShape(1, 1, False)]


@pytest.mark.parametrize("rows", [3, 11, 17, 40])
def test_warps_with_columns_of_their_own_change_nothing(rows, monkeypatch):
    rng = np.random.default_rng(6)
    weights = random_trellis(rng, 384, 300, "mul1", 3, bias=True)
    x = adversarial_rows(rng, rows, 384)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle)
    monkeypatch.setattr(cuda, "WIDE_COLUMNS", 0)
    monkeypatch.setattr(cuda_dealt, "SHAPES", {})
    monkeypatch.setattr(memory, "multiprocessors", lambda: 1)
    single = {tiles: replace(wide, blocks=1) for tiles, wide in cuda.WIDE_SHAPES.items()}
    monkeypatch.setattr(cuda, "WIDE_SHAPES", single)
    for _ in range(2):
        assert on_host(x, handle).tobytes() == expected.tobytes()
    assert not memory.to_host(handle.counters).any()


@pytest.mark.parametrize("processors", [1, 1000])
@pytest.mark.parametrize("name", ["float16, in two parts", "4 plain shards", "4 shards"])
def test_the_number_of_multiprocessors_changes_nothing(name, processors, monkeypatch):
    x, weights = rows_of(name, 3)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(memory, "multiprocessors", lambda: processors)
    monkeypatch.setattr(cuda, "plain_shape", cache(cuda.plain_shape.__wrapped__))
    assert on_host(x, handle, cuda.FEW_ROWS).tobytes() == expected.tobytes()


DEALT_CASES = [
    (1, 3, 1280, cuda_dealt.DealtShape(4, 8, 9)),
    (3, 4, 1024, cuda_dealt.DealtShape(4, 8, 40)),
    (8, 3, 1280, cuda_dealt.DealtShape(5, 16, 3)),
    (11, 4, 1024, cuda_dealt.DealtShape(4, 8, 0)),
    (16, 3, 1024, cuda_dealt.DealtShape(24, 16, 6)),
    (1, 5, 1024, cuda_dealt.DealtShape(4, 16, 8)),
]


@pytest.mark.parametrize(("rows", "bits", "inputs", "shape"), DEALT_CASES)
def test_columns_dealt_to_warps_change_nothing(rows, bits, inputs, shape, monkeypatch):
    rng = np.random.default_rng(7)
    weights = random_trellis(rng, inputs, 300, "mul1", bits, bias=True)
    x = adversarial_rows(rng, rows, inputs)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle)
    monkeypatch.setattr(cuda, "CONTRACT_PROCESSORS", 3)
    monkeypatch.setattr(cuda_dealt, "SHAPES", {cuda_dealt.row_tiles(rows): (shape,)})
    assert cuda_dealt.dealt_shape(handle, rows) is shape
    for _ in range(2):
        assert on_host(x, handle, cuda.AS_WIDE).tobytes() == expected.tobytes()
    assert not memory.to_host(handle.counters).any()


def test_a_dealt_shape_that_does_not_fit_is_not_taken(monkeypatch):
    handle = cuda.prepare_linear(random_trellis(np.random.default_rng(8), 384, 128, "mul1", 8))
    whole, in_halves = cuda_dealt.DealtShape(4, 8, 0), cuda_dealt.DealtShape(4, 8, 8)
    large, odd = replace(whole, warps=72), replace(whole, chunk_tiles=16)
    monkeypatch.setattr(cuda_dealt, "SHAPES", {1: (in_halves, large, odd)})
    assert cuda_dealt.dealt_shape(handle, 1) is None
    monkeypatch.setattr(cuda_dealt, "SHAPES", {1: (in_halves, large, odd, whole)})
    assert cuda_dealt.dealt_shape(handle, 8) is whole
    assert cuda_dealt.dealt_shape(handle, 9) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_a_head_is_dealt_in_what_shared_memory_there_is(capability):
    for bits in (2, 3, 4, 5, 8):
        with kernels.rehearsal(capability):
            handle = cuda.prepare_linear(random_trellis(np.random.default_rng(8), 2560, 128, "mul1", bits))
            for rows in (1, 8, 16):
                shape = cuda_dealt.dealt_shape(handle, rows)
                if shape is not None:
                    assert shape.shared_bytes(handle, rows) <= memory.most_shared_bytes()
                if rows == 1 or (capability[0] == 9 and bits <= 4):
                    assert shape is not None
                if capability[0] == 9 and bits <= (5 if rows <= 8 else 4):
                    assert shape is cuda_dealt.SHAPES[cuda_dealt.row_tiles(rows)][0]


@pytest.fixture
def uncached_passes(monkeypatch):
    """The sizes of passes may be changed; gives the passes of every product from then on."""
    noted, passes = [], cuda_products._passes.__wrapped__

    def counted(*sizes):
        noted.append(passes(*sizes))
        return noted[-1]

    monkeypatch.setattr(cuda_products, "_passes", counted)
    return noted


def test_passes_of_few_rows_change_nothing(monkeypatch, uncached_passes):
    x, weights = rows_of("float16, in two parts", 200)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda_products, "PASS_ROWS", (128,))
    assert on_host(x, handle, cuda.MANY_ROWS).tobytes() == expected.tobytes()
    assert [len(passes) for passes in uncached_passes] == [1, 2]


@pytest.mark.parametrize("name", ["padded, with bias", "float16, whole rows"])
def test_passes_of_few_outputs_change_nothing(name, monkeypatch, uncached_passes):
    x, weights = rows_of(name, 70)
    handle = cuda.prepare_linear(weights)
    expected = on_host(x, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda_products, "SCRATCH_VALUES", 128 * 33)
    monkeypatch.setattr(cuda_products, "PASS_ROWS", (33,))
    assert on_host(x, handle, cuda.MANY_ROWS).tobytes() == expected.tobytes()
    alone, cut = uncached_passes
    assert len(alone) == 1
    assert {part.first_row for part in cut} == {0, 33, 66}
    assert len({part.first_output for part in cut}) > 1


def test_passes_cover_every_output_once():
    done = np.zeros((9000, 5000), np.int8)
    for part in cuda_products.passes(9000, 5000, 12):
        rows = slice(part.first_row, part.first_row + part.rows)
        done[rows, part.first_output : part.first_output + part.outputs] += 1
        assert part.rows <= part.stored_rows
        assert 12 * part.stored_rows * part.outputs <= cuda_products.SCRATCH_VALUES
    assert (done == 1).all()


def test_inputs_that_lie_off_16_bytes_are_read_whole():
    x, weights = rows_of("float16, whole rows", 4)
    handle = cuda.prepare_linear(weights)
    flat = memory.zeros((x.size + 1,))
    shifted = flat[1:].view(x.shape)
    shifted.copy_(memory.to_device(x))
    assert memory.to_host(cuda.linear(shifted, handle)).tobytes() == on_host(x, handle).tobytes()


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(150, 41, 37), (4100, 3, 2), (33, 130, 1)])
def test_weights_that_half_cannot_hold_have_the_bytes_of_the_cpu(kind, inputs, outputs, rows):
    rng = np.random.default_rng(5)
    weights = random_plain(rng, inputs, outputs, kind)
    weights = replace(weights, weight=weights.weight * np.float32(2.0**-30))
    x = adversarial_rows(rng, rows, inputs)
    handle = cuda.prepare_linear(weights)
    assert isinstance(handle, cuda_layers.FloatLayer)
    expected = cpu.linear(x, cpu.prepare_linear(weights)).tobytes()
    assert on_host(x, handle).tobytes() == expected
    assert on_host(x, handle, cuda.MANY_ROWS).tobytes() == expected


@pytest.mark.parametrize(("inputs", "outputs"), [(70, 41), (64, 528)])
@pytest.mark.parametrize("piece_bytes", [1, 5000, 64 << 20])
def test_plain_weights_are_placed_as_they_are(inputs, outputs, piece_bytes, monkeypatch):
    monkeypatch.setattr(cuda_layers, "PIECE_BYTES", piece_bytes)
    weights = random_plain(np.random.default_rng(13), inputs, outputs, "float16")
    stored = replace(weights, weight=weights.weight.astype(np.float16))
    bits = [cuda.prepare_linear(layer).fragments.view(torch.int16) for layer in (weights, stored)]
    assert torch.equal(*bits)
    tiles = bits[0].view(-1, bits[0].shape[1], 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6)
    placed = tiles.reshape(tiles.shape[0] * 16, -1).view(torch.float16).cpu().numpy()
    assert np.array_equal(placed[:outputs, :inputs], weights.weight)
    assert not placed[outputs:].any()
    assert not placed[:, inputs:].any()
    short = replace(weights, weight=weights.weight * np.float32(2.0**100), bias=None)
    short = replace(short, weight=(short.weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
    values = cuda.prepare_linear(short).weights.cpu().numpy().view(np.uint16)
    assert np.array_equal(values[:inputs, :outputs], short.weight.T.view(np.uint32) >> 16)
    assert not values[inputs:].any()
    assert not values[:, outputs:].any()


def test_two_parts_keep_the_inputs_to_22_bits():
    weights = PlainLinear("router", np.ones((1, 16), np.float32))
    x = np.zeros((1, 16), np.float32)
    x[0, 0], x[0, 1] = 1 + 2.0**-20, -1
    assert on_host(x, cuda.prepare_linear(weights))[0, 0] == np.float32(2.0**-20)


def test_counters_are_zero_after_a_call():
    x, weights = rows_of("4 shards", 3)
    handle = cuda.prepare_linear(weights)
    on_host(x, handle)
    assert not memory.to_host(handle.counters).any()


def test_no_rows_give_no_rows():
    _, weights = rows_of("padded, with bias", 1)
    assert on_host(np.empty((0, 100), np.float32), cuda.prepare_linear(weights)).shape == (0, 150)


def test_a_step_may_be_off_by_what_the_limit_says():
    x = np.ones((1, 16))
    limit = cuda_reference.step_chain_error(x, np.ones((16, 1)))
    assert limit[0, 0] > 16 * 2.0**-23


def test_rows_of_another_type_or_width_are_refused():
    _, weights = rows_of("padded, with bias", 1)
    handle = cuda.prepare_linear(weights)
    with pytest.raises(TypeError):
        cuda.linear(memory.zeros((2, 100), torch.float64), handle)
    with pytest.raises(TypeError):
        cuda.linear(memory.zeros((100, 2)).T, handle)
    with pytest.raises(ValueError, match="expected 100"):
        cuda.linear(memory.zeros((1, 101)), handle)


def test_tensors_that_do_not_fit_are_refused():
    weights = random_trellis(np.random.default_rng(8), 128, 128, "mul1", 3)
    with pytest.raises(CheckpointError, match="suh"):
        cuda.prepare_linear(replace(weights, suh=weights.suh[:-1]))
    with pytest.raises(CheckpointError, match="weight holds NaN"):
        cuda.prepare_linear(PlainLinear("mlp", np.array([[1.0, np.nan]], np.float32)))
