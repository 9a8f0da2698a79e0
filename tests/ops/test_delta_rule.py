"""The Gated DeltaNet: its definition, any cut of a stream, transformers' modules."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.errors import IsobitError
from isobit.ops.batch import Batch
from isobit.ops.delta_rule.cpu import causal_conv, delta_rule, gated_norm, prepare_delta
from isobit.ops.work import forced_pieces
from tests.ops import plain

f32 = np.float32
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 40
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def segments(*pieces):
    """A batch of (slot, rows) segments."""
    slots, counts = zip(*pieces, strict=True)
    starts = np.cumsum([0, *counts], dtype=np.int32)
    none = np.zeros(len(slots), np.int32)
    return Batch(np.array(slots, np.int32), starts, none, np.zeros((len(slots), 1), np.int32))


class Layer:
    """Random constants, inputs of one stream, and a pool of states that are not empty."""

    def __init__(self, seed, rows, gate="sigmoid"):
        rng = np.random.default_rng(seed)
        self.conv_weight = rng.standard_normal((CHANNELS, 4)).astype(f32)
        self.a_log, self.dt_bias = rng.uniform(-3, 1, (2, VALUE_HEADS)).astype(f32)
        self.norm_weight = rng.standard_normal(VALUE_DIM).astype(f32)
        constants = self.conv_weight, self.a_log, self.dt_bias, self.norm_weight
        self.handle = prepare_delta(*constants, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, 1e-6, gate)
        self.x = rng.standard_normal((rows, CHANNELS)).astype(f32)
        self.a, self.b = rng.standard_normal((2, rows, VALUE_HEADS)).astype(f32)
        self.z = rng.standard_normal((rows, VALUE_HEADS * VALUE_DIM)).astype(f32)
        self.conv_pool = rng.standard_normal((3, 3, CHANNELS)).astype(f32)
        self.state_pool = rng.standard_normal((3, VALUE_HEADS, KEY_DIM, VALUE_DIM)).astype(f32)

    def run(self, pools, batch, rows):
        """Convolution, recurrence and gated norm of input rows `rows`."""
        conv_pool, state_pool = pools
        qkv = causal_conv(self.x[rows], self.handle, conv_pool, batch)
        mixed = delta_rule(qkv, self.a[rows], self.b[rows], self.handle, state_pool, batch)
        return gated_norm(mixed, self.z[rows], self.handle)

    def pools(self):
        return self.conv_pool.copy(), self.state_pool.copy()


def test_convolution_is_the_definition_also_before_the_stream_has_its_taps():
    layer = Layer(1, 6)
    pools = layer.pools()
    y = causal_conv(layer.x, layer.handle, pools[0], segments((2, 6)))
    history = np.concatenate([layer.conv_pool[2], layer.x])
    for row in range(6):
        for channel in range(0, CHANNELS, 37):
            total = plain.chain(layer.conv_weight[channel], history[row : row + 4, channel])
            assert y[row, channel] == f32(plain.silu(total))
    assert pools[0][2].tobytes() == layer.x[-3:].tobytes()
    assert pools[0][:2].tobytes() == layer.conv_pool[:2].tobytes()


def test_recurrence_is_the_definition_rounding_by_rounding():
    layer = Layer(2, 3)
    pools = layer.pools()
    o = delta_rule(layer.x, layer.a, layer.b, layer.handle, pools[1], segments((1, 3)))
    keys = KEY_HEADS * KEY_DIM
    for head in (0, VALUE_HEADS - 1):
        key_head = head * KEY_HEADS // VALUE_HEADS
        state = layer.state_pool[1, head].copy()
        for row in range(3):
            q, k = (layer.x[row, first + key_head * KEY_DIM :][:KEY_DIM] for first in (0, keys))
            q, k = (x * f32(plain.rsqrt(f32(plain.lane_dot(x, x) + f32(1e-6)))) for x in (q, k))
            q = q * f32(1 / np.sqrt(KEY_DIM))
            v = layer.x[row, 2 * keys + head * VALUE_DIM :][:VALUE_DIM]
            rate = f32(plain.softplus(f32(layer.a[row, head] + layer.dt_bias[head])))
            state = state * f32(plain.exp(f32(-f32(plain.exp(layer.a_log[head])) * rate)))
            remembered = np.array([plain.chain(state[:, column], k) for column in range(VALUE_DIM)], f32)
            change = f32(plain.sigmoid(layer.b[row, head])) * (v - remembered)
            for i, column in np.ndindex(state.shape):
                state[i, column] = plain.fma(k[i], change[column], state[i, column])
            read = np.array([plain.chain(state[:, column], q) for column in range(VALUE_DIM)], f32)
            assert o[row, head * VALUE_DIM :][:VALUE_DIM].tobytes() == read.tobytes()
        assert pools[1][1, head].tobytes() == state.tobytes()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(1, 11), max_size=5),
    neighbour=st.integers(0, 4),
    pieces=st.integers(1, 4),
)
def test_any_cut_and_any_neighbour_gives_the_bytes_of_single_rows(seed, cuts, neighbour, pieces):
    rows = 12
    layer, stranger = Layer(seed, rows), Layer(seed + 1, 4)
    single = layer.pools()
    alone = np.concatenate([layer.run(single, segments((0, 1)), slice(row, row + 1)) for row in range(rows)])

    pools = layer.pools()
    edges = sorted({0, rows, *cuts})
    pieces_of_stream = []
    with forced_pieces(pieces):
        for first, last in itertools.pairwise(edges):
            shared = Layer(seed, rows)
            shared.x, shared.a, shared.b, shared.z = (
                np.concatenate([getattr(stranger, name)[:neighbour], getattr(layer, name)[first:last]])
                for name in ("x", "a", "b", "z")
            )
            batch = segments((2, neighbour), (0, last - first)) if neighbour else segments((0, last - first))
            pieces_of_stream.append(shared.run(pools, batch, slice(None))[neighbour:])
    assert np.concatenate(pieces_of_stream).tobytes() == alone.tobytes()
    assert pools[0][:2].tobytes() == single[0][:2].tobytes()
    assert pools[1][:2].tobytes() == single[1][:2].tobytes()


def test_decay_from_large_gates_clears_the_state_without_nan():
    layer = Layer(3, 2)
    layer.a[:] = f32(1e4)
    pools = layer.pools()
    o = delta_rule(layer.x, layer.a, layer.b, layer.handle, pools[1], segments((0, 2)))
    assert np.isfinite(o).all()
    fresh = np.zeros_like(layer.state_pool)
    assert o.tobytes() == delta_rule(layer.x, layer.a, layer.b, layer.handle, fresh, segments((0, 2))).tobytes()


def test_an_unknown_gate_is_refused_by_name():
    with pytest.raises(IsobitError, match="output_gate_type 'tanh'"):
        Layer(4, 1, gate="tanh")


@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_agrees_with_transformers(gate):
    torch = pytest.importorskip("torch", reason="needs the optional package torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="needs transformers")
    layer = Layer(5, 20, gate)

    def tensor(array):
        return torch.from_numpy(np.ascontiguousarray(array))[None]

    conv_pool, state_pool = np.zeros_like(layer.conv_pool), layer.state_pool.copy()
    batch = segments((1, 20))
    qkv = causal_conv(layer.x, layer.handle, conv_pool, batch)
    weight = torch.from_numpy(layer.conv_weight)
    convolved = modeling.causal_conv1d_fn(tensor(layer.x.T), weight, activation="silu")
    np.testing.assert_allclose(qkv, convolved[0].numpy().T, rtol=1e-5, atol=1e-6)

    q, k, v = np.split(qkv, [KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM], axis=1)
    decay = -torch.exp(torch.from_numpy(layer.a_log)) * torch.nn.functional.softplus(
        tensor(layer.a) + torch.from_numpy(layer.dt_bias)
    )
    expected, state = modeling.torch_recurrent_gated_delta_rule(
        tensor(q.reshape(20, KEY_HEADS, KEY_DIM)),
        tensor(k.reshape(20, KEY_HEADS, KEY_DIM)),
        tensor(v.reshape(20, VALUE_HEADS, VALUE_DIM)),
        decay,
        torch.sigmoid(tensor(layer.b)),
        initial_state=torch.from_numpy(layer.state_pool[1:2]),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    mixed = delta_rule(qkv, layer.a, layer.b, layer.handle, state_pool, batch)
    np.testing.assert_allclose(mixed, expected[0].reshape(20, -1).numpy(), rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(state_pool[1], state[0].numpy(), rtol=1e-4, atol=2e-6)

    module = modeling.Qwen4ExpTextRMSNormGated(VALUE_DIM, eps=1e-6, activation=gate)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(layer.norm_weight))
        gated = module(torch.from_numpy(mixed.reshape(-1, VALUE_DIM)), torch.from_numpy(layer.z.reshape(-1, VALUE_DIM)))
    ours = gated_norm(mixed, layer.z, layer.handle)
    np.testing.assert_allclose(ours, gated.numpy().reshape(20, -1), rtol=1e-5, atol=1e-6)
