"""The router and the experts on CUDA, emulated: their contract, their definition, tiles, launches that never change."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the optional package torch")

from isobit.contract.gates import GATES
from isobit.contract.plans import Sizes
from isobit.contract.run import cases_of, run_gate
from isobit.cuda import compile as compiler
from isobit.cuda import kernels, memory
from isobit.errors import CheckpointError
from isobit.ops.experts import cpu, cuda, cuda_contract
from isobit.ops.experts.contract import plain_experts, trellis_experts
from isobit.ops.experts.cuda_shapes import Products, Shape, even_blocks
from isobit.ops.linear import cpu as linear_cpu
from isobit.ops.linear.contract import random_trellis
from isobit.ops.linear.cuda import linear, prepare_linear
from tests.ops import plain
from tests.ops.test_experts import some_rows

pytestmark = pytest.mark.usefixtures("emulated_cuda")

SIZES = Sizes((9,), 0)
HOW = (cuda.FEW_ROWS, cuda.MANY_ROWS)


def prepare(host, module=cuda):
    return module.prepare_experts(host.gate, host.up, host.down, *host.shared, host.shared_expert_gate)


def compute(inputs, handle, how):
    return memory.to_host(cuda.experts(*map(memory.to_device, inputs), handle, how))


def problems(op, cases, implementations, gates):
    for case, implementation, gate in itertools.product(cases, implementations, gates):
        if problem := run_gate(gate, op, implementation, case, SIZES):
            yield f"{case.label}, {implementation}, {gate}: {problem}"


def test_route_keeps_its_contract():
    op = cuda_contract.RouteOp()
    assert not list(problems(op, cases_of(op, wide=False)[2:], op.implementations[1:], GATES))


@pytest.mark.parametrize(
    ("label", "gates"),
    [
        ("8 experts, 2 chosen", ["rows", "replaces"]),
        ("mixed widths, padded sizes", ["reference"]),
        ("plain, an empty shard", GATES),
        ("plain beside trellis layers", ["reference", "hygiene"]),
    ],
)
def test_experts_keep_their_contract(label, gates):
    op = cuda_contract.ExpertsOp()
    (case,) = (case for case in cases_of(op, wide=False) if case.label == label)
    assert not list(problems(op, [case], ["few_rows", "many_rows"], gates))


def one_expert(x, *layers):
    gates, ups = (memory.to_host(linear(memory.to_device(x), prepare_linear(layer))) for layer in layers[:2])
    silus = np.array([plain.silu(g) for g in gates.ravel()], np.float32).reshape(gates.shape)
    return memory.to_host(linear(memory.to_device(silus * ups), prepare_linear(layers[2])))


def test_bytes_are_those_of_single_linear_layers():
    host = trellis_experts(np.random.default_rng(12), 5, 128, 256)
    x, ids, weights = some_rows(np.random.default_rng(13), 3, host, 3)
    outputs = {e: one_expert(x, host.gate[e], host.up[e], host.down[e]) for e in range(5)}
    shared = one_expert(x, *host.shared)
    logits = linear_cpu.linear(x, linear_cpu.prepare_linear(host.shared_expert_gate))
    expected = np.empty_like(x)
    for row in range(3):
        shards = np.zeros((4, x.shape[1]))
        for e, weight in zip(ids[row], weights[row], strict=True):
            shards[e // 2] += (weight * outputs[e][row]).astype(np.float64)
        total = ((shards[0] + shards[1]) + shards[2]) + shards[3]
        term = np.float32(plain.sigmoid(logits[row, 0])) * shared[row]
        expected[row] = (total + term.astype(np.float64)).astype(np.float32)
    for how in HOW:
        assert compute((x, ids, weights), prepare(host), how).tobytes() == expected.tobytes()


def test_plain_experts_have_the_bytes_of_the_cpu():
    host = plain_experts(np.random.default_rng(1), 5, 72, 40)
    inputs = some_rows(np.random.default_rng(2), 11, host, 3)
    expected = cpu.experts(*inputs, prepare(host, cpu))
    for how in HOW:
        assert compute(inputs, prepare(host), how).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("experts", "chosen", "hidden"), [(9, 7, 50), (13, 8, 20), (5, 1, 150)])
def test_any_number_of_terms_and_rows_of_any_width_have_the_bytes_of_the_cpu(experts, chosen, hidden):
    host = plain_experts(np.random.default_rng(19), experts, hidden, 24)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(20), 5, host, chosen)
    expected = cpu.experts(*inputs, prepare(host, cpu))
    for rows in (5, 3):
        few = compute([array[:rows] for array in inputs], handle, cuda.FEW_ROWS)
        assert few.tobytes() == expected[:rows].tobytes()
    assert compute(inputs, handle, cuda.MANY_ROWS).tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [8, 9, 64, 65, 130])
def test_tiles_of_every_size_give_the_bytes_of_a_row_alone(rows):
    host = trellis_experts(np.random.default_rng(3), 1, 128, 128)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(rows), rows, host, 1)
    together = [compute(inputs, handle, how) for how in HOW]
    assert together[0].tobytes() == together[1].tobytes()
    last = [array[-1:] for array in inputs]
    assert compute(last, handle, cuda.FEW_ROWS).tobytes() == together[0][-1:].tobytes()


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        (Shape(7, 4, 1, 3, 28), Shape(14, 2, 1, 3, 28)),
        (Shape(5, 1, 2, 3, 28), Shape(20, 1, 1, 3, 28)),
        (Shape(3, 3, 1, 2, 28), Shape(5, 4, 1, 3, 28)),
        (Shape(4, 1, 1, 2, 32), Shape(16, 1, 4, 2, 32)),
    ],
)
def test_few_rows_have_the_same_bytes_however_warps_share_columns(monkeypatch, gate_up, down):
    host = trellis_experts(np.random.default_rng(15), 3, 384, 256, (3, 4))
    handle, inputs = prepare(host), some_rows(np.random.default_rng(16), 3, host, 2)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    shapes = {"multiply_gate_up": gate_up, "multiply_down": down}
    monkeypatch.setattr(cuda, "few_shape", lambda name, products, fused: shapes[name])
    for _ in range(2):
        assert compute(inputs, handle, cuda.FEW_ROWS).tobytes() == expected.tobytes()


def test_plain_layers_beside_trellis_layers_end_with_other_turns(monkeypatch):
    host = cuda_contract.mixed_experts(np.random.default_rng(21), 7, 384, 136)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(22), 4, host, 3)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda, "few_shape", lambda name, products, fused: Shape(7, 4, 1, 3, 28))
    assert compute(inputs, handle, cuda.FEW_ROWS).tobytes() == expected.tobytes()


def test_an_idle_warp_computes_the_gate_where_the_shared_expert_has_fewer_columns_than_others(monkeypatch):
    host = trellis_experts(np.random.default_rng(17), 3, 128, 256, (3, 4), 96)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(18), 2, host, 2)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda, "few_shape", lambda name, products, fused: Shape(7, 1, 1, 3, 28))
    assert compute(inputs, handle, cuda.FEW_ROWS).tobytes() == expected.tobytes()


@pytest.mark.parametrize("enough_blocks", [1, 1024])
def test_rows_that_are_not_fused_have_the_same_bytes_in_any_number_of_blocks(monkeypatch, enough_blocks):
    host = trellis_experts(np.random.default_rng(15), 3, 384, 256, (3, 4))
    handle, inputs = prepare(host), some_rows(np.random.default_rng(16), 10, host, 2)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda, "ENOUGH_BLOCKS", enough_blocks)
    for _ in range(2):
        assert compute(inputs, handle, cuda.FEW_ROWS).tobytes() == expected.tobytes()


def test_real_layers_of_few_rows_fill_every_multiprocessor_evenly():
    for rows, least in ((1, (7, 14)), (2, (13, 26)), (3, (19, 38)), (4, (25, 50))):
        tiles = 10 * rows + 1
        gate_up = Products(2 * tiles, 40, 20, 128, False, 5184 * rows + 4736)
        down = Products(tiles, 160, 5, 128, False, 0)
        for products, columns in ((gate_up, least[0]), (down, least[1])):
            shape = even_blocks(products, 132, 227 << 10)
            blocks = -(-products.groups * shape.slices(products) // 132)
            assert blocks * shape.warps <= 28
            assert blocks * (shape.shared_bytes(products) + (2 << 10)) <= 227 << 10
            assert blocks * shape.columns <= 1.08 * columns


def test_shapes_fit_wide_tiles_and_little_shared_memory():
    products = Products(22, 40, 40, 256, True, 41 << 10)
    for shared_bytes in (99 << 10, 163 << 10, 227 << 10):
        assert even_blocks(products, 132, shared_bytes).shared_bytes(products) <= shared_bytes


def test_small_passes_change_nothing(monkeypatch):
    host = plain_experts(np.random.default_rng(4), 4, 48, 32)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(5), 23, host, 2)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    monkeypatch.setattr(cuda, "MOST_SCRATCH_BYTES", 1)
    assert compute(inputs, handle, cuda.MANY_ROWS).tobytes() == expected.tobytes()


def test_launches_of_few_rows_depend_on_their_number_alone(monkeypatch):
    host = plain_experts(np.random.default_rng(6), 6, 48, 32)
    handle, launches = prepare(host), []
    launch = kernels.Kernel.__call__

    def noted(kernel, grid, block, *arguments, shared=0, early=False):
        launches[-1].append((kernel, grid, block, shared))
        launch(kernel, grid, block, *arguments, shared=shared, early=early)

    monkeypatch.setattr(kernels.Kernel, "__call__", noted)
    for seed in range(3):
        launches.append([])
        compute(some_rows(np.random.default_rng(seed), 7, host, 2), handle, cuda.BY_ROW_COUNT)
    assert launches[0] == launches[1] == launches[2]
    assert len(launches[0]) <= 5


@pytest.mark.usefixtures("cuda_compiler")
@pytest.mark.parametrize("checking", [{}, compiler.CHECKING_MACROS])
def test_products_of_warpgroups_compile(checking):
    handle = prepare(trellis_experts(np.random.default_rng(14), 1, 128, 128))
    macros = {**handle.layers.macros, "ROW_TILE": cuda.WARPGROUPS_ROW_TILE, "WARPGROUPS": 1, **checking}
    assert compiler.binary(cuda.MANY_PRODUCTS, macros, "sm_90a")


def test_copies_that_racecheck_can_follow_change_no_byte(monkeypatch):
    host = trellis_experts(np.random.default_rng(14), 2, 128, 128)
    handle, inputs = prepare(host), some_rows(np.random.default_rng(15), 5, host, 2)
    expected = compute(inputs, handle, cuda.MANY_ROWS)
    load = kernels.load
    monkeypatch.setattr(kernels, "load", lambda *names, **macros: load(*names, COPIES_ONCE=1, **macros))
    assert compute(inputs, handle, cuda.MANY_ROWS).tobytes() == expected.tobytes()


def test_no_rows_give_no_rows():
    host = plain_experts(np.random.default_rng(7), 2, 48, 32)
    x, ids, weights = some_rows(np.random.default_rng(8), 1, host, 2)
    assert compute((x[:0], ids[:0], weights[:0]), prepare(host), cuda.BY_ROW_COUNT).shape == (0, 48)
    assert cuda.route(memory.to_device(x[:0]), 3, True)[0].shape == (0, 3)


def test_layers_that_do_not_fit_are_refused():
    rng = np.random.default_rng(9)
    host = trellis_experts(rng, 2, 128, 128)
    wide = random_trellis(rng, 128, 256, "mul1", 3)
    with pytest.raises(CheckpointError, match="expected 128 and 128"):
        cuda.prepare_experts(host.gate, [host.up[0], wide], host.down, *host.shared, host.shared_expert_gate)
    with pytest.raises(CheckpointError, match="2 gate, 2 up and 1 down"):
        cuda.prepare_experts(host.gate, host.up, host.down[:1], *host.shared, host.shared_expert_gate)
    host.gate[1].suh[3] = np.inf
    with pytest.raises(CheckpointError, match="suh holds NaN or infinite values"):
        prepare(host)


def test_route_gives_distinct_ascending_ids_even_for_logits_that_are_not_finite():
    logits = np.random.default_rng(10).standard_normal((6, 40)).astype(np.float32)
    logits[0], logits[1, ::2], logits[2, 3], logits[3, 5], logits[4] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    ids, _ = cuda.route(memory.to_device(logits), 7, True)
    assert np.array_equal(memory.to_host(ids), cpu.route(logits, 7, True)[0])


@pytest.mark.parametrize("chosen", [1, 33, 64])
def test_route_chooses_any_number_among_many_equals(chosen):
    logits = np.zeros((5, 64), np.float32)
    logits[1:, 50:] = 1
    logits[2:] = np.arange(64) // 40
    logits[3] = np.random.default_rng(11).standard_normal(64)
    expected = cpu.route(logits, chosen, True)
    for how in HOW:
        ids, weights = cuda.route(memory.to_device(logits), chosen, True, how)
        assert memory.to_host(ids).tobytes() == expected[0].tobytes()
        assert memory.to_host(weights).tobytes() == expected[1].tobytes()


def test_route_breaks_ties_that_only_the_division_by_the_sum_makes():
    rng = np.random.default_rng(5)
    logits = rng.uniform(-9, -1, (64, 512)).astype(np.float32)
    for row in logits:
        near = rng.choice(512, 22, replace=False)
        row[near] = np.float32(0.5) + rng.integers(0, 9, 22).astype(np.float32) * np.float32(2**-24)
    ids, weights = cuda.route(memory.to_device(logits), 10, False)
    expected_ids, expected_weights = cpu.route(logits, 10, False)
    assert len(np.unique(np.sort(logits)[:, -10:])) > len(np.unique(expected_weights[0])) > 1
    assert memory.to_host(ids).tobytes() == expected_ids.tobytes()
    assert memory.to_host(weights).tobytes() == expected_weights.tobytes()


def test_route_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="9 of 8"):
        cuda.route(memory.zeros((1, 8)), 9, True)
