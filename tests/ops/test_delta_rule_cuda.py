"""The Gated DeltaNet on CUDA, emulated: its contract, its definition, cuts of a stream and journals."""

import itertools

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the optional package torch")

from isobit.contract.gates import GATES
from isobit.contract.plans import Sizes
from isobit.contract.run import cases_of, run_gate
from isobit.cuda import memory
from isobit.errors import IsobitError
from isobit.ops.delta_rule import cpu, cuda, cuda_contract
from isobit.ops.journaled import JournaledOp
from tests.ops import plain
from tests.ops.test_delta_rule import segments

pytestmark = pytest.mark.usefixtures("emulated_cuda")

f32 = np.float32
SIZES = Sizes((1, 3, 8, 17), 3)
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 8, 64, 24
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
BOTH = pytest.mark.parametrize("how", [cuda.FEW_ROWS, cuda.MANY_ROWS])


def problems(op, cases):
    for case, implementation, gate in itertools.product(cases, op.implementations, GATES):
        if problem := run_gate(gate, op, implementation, case, SIZES):
            yield f"{case.label}, {implementation}, {gate}: {problem}"


@pytest.mark.parametrize("op", [cuda_contract.CausalConv(), cuda_contract.GatedNorm()], ids=lambda op: op.name)
def test_convolution_and_gated_norm_keep_their_contract(op):
    assert not list(problems(op, cases_of(op, wide=False)))


def test_recurrence_keeps_its_contract():
    op = cuda_contract.DeltaRule()
    assert not list(problems(op, cases_of(op, wide=False)[2:]))


@pytest.mark.parametrize("op", [cuda_contract.CausalConv(), cuda_contract.DeltaRule()], ids=lambda op: op.name)
def test_journals_keep_their_contract(op):
    journaled = JournaledOp(op)
    assert not list(problems(journaled, cases_of(journaled, wide=False)[1:]))


class Layer:
    """Random constants, inputs of one stream on the host, and a pool of states that are not empty."""

    def __init__(self, rows):
        rng = np.random.default_rng(rows)
        self.a_log, self.dt_bias = rng.uniform(-3, 1, (2, VALUE_HEADS)).astype(f32)
        constants = np.zeros((CHANNELS, 4), f32), self.a_log, self.dt_bias, np.ones(VALUE_DIM, f32)
        sizes = KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
        self.handle = cuda.prepare_delta(*constants, *sizes, 1e-6, "silu")
        self.on_cpu = cpu.prepare_delta(*constants, *sizes, 1e-6, "silu")
        self.qkv = rng.standard_normal((rows, CHANNELS)).astype(f32)
        self.a, self.b = rng.standard_normal((2, rows, VALUE_HEADS)).astype(f32)
        self.pool = rng.standard_normal((3, VALUE_HEADS, KEY_DIM, VALUE_DIM)).astype(f32)

    def run(self, how, pool, batch, rows=slice(None)):
        """The outputs of input rows `rows`; the pool, a tensor, moves on."""
        inputs = (memory.to_device(x[rows]) for x in (self.qkv, self.a, self.b))
        return memory.to_host(cuda.delta_rule(*inputs, self.handle, pool, batch, None, how))


def sum_of_pieces(a, b):
    """a, b [k]: the sum of products over k in eight pieces."""
    pieces = [plain.chain(*(np.concatenate(x.reshape(-1, 8, 4)[:, piece]) for x in (a, b))) for piece in range(8)]
    for half in (4, 2, 1):
        pieces = [f32(pieces[i] + pieces[i + half]) for i in range(half)]
    return pieces[0]


@BOTH
def test_recurrence_is_the_definition_rounding_by_rounding(how):
    layer = Layer(3)
    pool = memory.to_device(layer.pool)
    o = layer.run(how, pool, segments((1, 3)))
    for head, column in ((0, 0), (VALUE_HEADS - 1, VALUE_DIM - 1)):
        state, key_head = layer.pool[1, head, :, column].copy(), head * KEY_HEADS // VALUE_HEADS
        for row in range(3):
            heads = layer.qkv[row, : 2 * KEY_HEADS * KEY_DIM].reshape(2, KEY_HEADS, KEY_DIM)[:, key_head]
            q, k = (x * f32(plain.rsqrt(f32(plain.lane_dot(x, x) + f32(1e-6)))) for x in heads)
            q = q * f32(1 / np.sqrt(KEY_DIM))
            v = layer.qkv[row, 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column]
            rate = f32(plain.exp(layer.a_log[head]))
            decay = f32(plain.exp(-rate * f32(plain.softplus(layer.a[row, head] + layer.dt_bias[head]))))
            m, p = sum_of_pieces(state, k), sum_of_pieces(state, q)
            d = f32(plain.sigmoid(layer.b[row, head])) * (v - decay * m)
            state = np.array([plain.fma(k[i], d, state[i] * decay) for i in range(KEY_DIM)], f32)
            assert o[row, head * VALUE_DIM + column] == f32(plain.fma(d, plain.lane_dot(k, q), decay * p))
        assert memory.to_host(pool)[1, head, :, column].tobytes() == state.tobytes()


@BOTH
def test_any_cut_of_a_stream_beside_others_gives_the_same_bytes(how):
    layer = Layer(37)
    whole_pool = memory.to_device(layer.pool)
    whole = layer.run(how, whole_pool, segments((2, 37)))
    for cuts in ((0, 8, 16, 37), (0, 1, 10, 36, 37)):
        pool = memory.to_device(layer.pool)
        parts = []
        for first, last in itertools.pairwise(cuts):
            batch = segments((0, 3), (2, last - first))
            rows = np.r_[:3, first:last]
            parts.append(layer.run(how, pool, batch, rows)[3:])
        assert np.concatenate(parts).tobytes() == whole.tobytes()
        assert memory.to_host(pool)[2].tobytes() == memory.to_host(whole_pool)[2].tobytes()


def test_the_cpus_values_are_near():
    layer = Layer(37)
    o = layer.run(cuda.BY_ROW_COUNT, memory.to_device(layer.pool), segments((2, 37)))
    expected = cpu.delta_rule(layer.qkv, layer.a, layer.b, layer.on_cpu, layer.pool.copy(), segments((2, 37)))
    np.testing.assert_allclose(o, expected, rtol=2e-5, atol=2e-6)


def test_sizes_that_the_kernels_do_not_take_are_named():
    none = np.zeros(1, f32)
    with pytest.raises(IsobitError, match="linear_key_head_dim 6 and linear_value_head_dim 8 must be multiples of 4"):
        cuda.prepare_delta(np.zeros((20, 4), f32), none, none, none, 1, 1, 6, 8, 1e-6, "silu")
