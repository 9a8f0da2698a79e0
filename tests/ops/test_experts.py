"""The router's choice, and the experts against a composition of single linears, byte by byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.errors import CheckpointError
from isobit.ops import set_threads
from isobit.ops.experts import cpu
from isobit.ops.experts.contract import plain_experts, trellis_experts
from isobit.ops.experts.cpu import experts, prepare_experts, route
from isobit.ops.experts.product import IN_PANELS, ROW_BY_ROW
from isobit.ops.linear import parallel
from isobit.ops.linear.contract import adversarial_rows, random_trellis
from isobit.ops.linear.cpu import linear, prepare_linear

from . import plain

HOSTS = {
    "8 of one width": lambda rng: trellis_experts(rng, 8, 128, 128),
    "mixed and padded": lambda rng: trellis_experts(rng, 11, 160, 96, (3, 2.5), 300),
    "plain": lambda rng: plain_experts(rng, 3, 72, 40),
}


@pytest.fixture(autouse=True)
def two_threads():
    set_threads(2)
    yield
    set_threads(2)


def prepare(host):
    return prepare_experts(host.gate, host.up, host.down, *host.shared, host.shared_expert_gate)


def some_rows(rng, rows, host, chosen):
    x = np.clip(adversarial_rows(rng, rows, host.gate[0].in_features), -1e9, 1e9)
    ids = np.stack([np.sort(rng.permutation(len(host.gate))[:chosen]) for _ in range(rows)]).astype(np.int32)
    return x, ids, rng.uniform(0, 1, (rows, chosen)).astype(np.float32)


def one_expert(x, gate, up, down):
    gates, ups = (linear(x, prepare_linear(layer)) for layer in (gate, up))
    silus = np.array([plain.silu(g) for g in gates.ravel()], np.float32).reshape(gates.shape)
    return linear(silus * ups, prepare_linear(down))


def as_defined(x, ids, weights, host):
    """docs/arithmetic.md, *experts*, for one row at a time."""
    count = len(host.gate)
    size = -(-count // 4)
    y = np.empty(x.shape, np.float32)
    for row in range(len(x)):
        shards = np.zeros((4, x.shape[1]))
        for e, weight in zip(ids[row], weights[row], strict=True):
            output = one_expert(x[row : row + 1], host.gate[e], host.up[e], host.down[e])
            shards[e // size] += (weight * output[0]).astype(np.float64)
        total = shards[0] + shards[1]
        total = total + shards[2]
        total = total + shards[3]
        logit = linear(x[row : row + 1], prepare_linear(host.shared_expert_gate))[0, 0]
        shared = np.float32(plain.sigmoid(logit)) * one_expert(x[row : row + 1], *host.shared)[0]
        y[row] = (total + shared.astype(np.float64)).astype(np.float32)
    return y


@pytest.mark.parametrize("name", HOSTS)
def test_bytes_are_those_of_the_definition(name):
    rng = np.random.default_rng(1)
    host = HOSTS[name](rng)
    x, ids, weights = some_rows(rng, 9, host, 3)
    expected = as_defined(x, ids, weights, host)
    handle = prepare(host)
    assert experts(x, ids, weights, handle).tobytes() == expected.tobytes()
    for how in (ROW_BY_ROW, IN_PANELS):
        assert experts(x, ids, weights, handle, how).tobytes() == expected.tobytes()


PREPARED = {}


def prepared(name):
    if name not in PREPARED:
        host = HOSTS[name](np.random.default_rng(2))
        PREPARED[name] = host, prepare(host)
    return PREPARED[name]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(HOSTS)), st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_its_company(name, rows, chosen, seed):
    rng = np.random.default_rng(seed)
    host, handle = prepared(name)
    x, ids, weights = some_rows(rng, rows, host, chosen)
    set_threads(1 + seed % 2)
    together = experts(x, ids, weights, handle)
    some = rng.permutation(rows)[: rng.integers(1, rows + 1)]
    assert experts(x[some], ids[some], weights[some], handle).tobytes() == together[some].tobytes()
    assert experts(x[:1], ids[:1], weights[:1], handle).tobytes() == together[:1].tobytes()


def test_small_passes_change_nothing(monkeypatch):
    rng = np.random.default_rng(3)
    host, handle = prepared("8 of one width")
    x, ids, weights = some_rows(rng, 90, host, 2)
    expected = experts(x, ids, weights, handle)
    monkeypatch.setattr(cpu, "MOST_PASS_ROWS", 5)
    assert experts(x, ids, weights, handle).tobytes() == expected.tobytes()
    monkeypatch.setattr(cpu, "MOST_ROWS", 17)
    assert experts(x, ids, weights, handle).tobytes() == expected.tobytes()
    monkeypatch.setattr(cpu, "MOST_PAIR_BYTES", 1)
    assert experts(x, ids, weights, handle).tobytes() == expected.tobytes()


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 16])
def test_any_number_of_parts_gives_the_same(parts, monkeypatch):
    rng = np.random.default_rng(4)
    host, handle = prepared("mixed and padded")
    x, ids, weights = some_rows(rng, 40, host, 3)
    expected = experts(x, ids, weights, handle)
    monkeypatch.setattr(parallel, "threads", lambda: parts)
    monkeypatch.setattr(parallel, "LONG_WORK", 0)
    for rows in (1, 5, 40):
        assert experts(x[:rows], ids[:rows], weights[:rows], handle).tobytes() == expected[:rows].tobytes()


def test_no_rows_give_no_rows():
    host, handle = prepared("plain")
    x, ids, weights = some_rows(np.random.default_rng(5), 1, host, 2)
    assert experts(x[:0], ids[:0], weights[:0], handle).shape == (0, 72)


def test_layers_that_do_not_fit_are_refused():
    rng = np.random.default_rng(6)
    host = trellis_experts(rng, 2, 128, 128)
    wide = random_trellis(rng, 128, 256, "mul1", 3)
    with pytest.raises(CheckpointError, match="expected 128 and 128"):
        prepare_experts(host.gate, [host.up[0], wide], host.down, *host.shared, host.shared_expert_gate)
    with pytest.raises(CheckpointError, match="2 gate, 2 up and 1 down"):
        prepare_experts(host.gate, host.up, host.down[:1], *host.shared, host.shared_expert_gate)
    with pytest.raises(CheckpointError, match="expected 128 and 1"):
        prepare_experts(host.gate, host.up, host.down, *host.shared, wide)


def softmax_as_defined(row):
    p = [np.float32(plain.exp(np.float32(logit - row.max()))) for logit in row]
    sums = [np.float32(0)] * 32
    for i, value in enumerate(p):
        sums[i % 32] = np.float32(sums[i % 32] + value)
    for half in (16, 8, 4, 2, 1):
        sums[:half] = [np.float32(sums[i] + sums[i + half]) for i in range(half)]
    return [np.float32(value / sums[0]) for value in p]


@pytest.mark.parametrize(("count", "chosen"), [(8, 2), (33, 4), (512, 10)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route_is_as_defined(count, chosen, renormalise):
    logits = np.random.default_rng(7).standard_normal((12, count)).astype(np.float32)
    logits[1] = 0.5
    logits[2] = np.round(logits[2])
    ids, weights = route(logits, chosen, renormalise)
    for row in range(len(logits)):
        p = softmax_as_defined(logits[row])
        expected = sorted(sorted(range(count), key=lambda e: (-p[e], e))[:chosen])
        assert ids[row].tolist() == expected
        kept = [p[e] for e in expected]
        if renormalise:
            total = np.float32(0)
            for value in kept:
                total = np.float32(total + value)
            kept = [np.float32(value / total) for value in kept]
        assert weights[row].tobytes() == np.array(kept, np.float32).tobytes()


def test_equal_logits_go_to_the_lower_ids():
    ids, weights = route(np.zeros((3, 40), np.float32), 4, True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert (weights == 0.25).all()


def test_route_gives_distinct_ascending_ids_even_for_logits_that_are_not_finite():
    logits = np.random.default_rng(8).standard_normal((6, 20)).astype(np.float32)
    logits[0], logits[1, ::2], logits[2, 3], logits[3, 5], logits[4] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    ids, _ = route(logits, 7, True)
    assert (np.diff(ids, axis=1) > 0).all()
    assert ids.min() >= 0
    assert ids.max() < 20


def test_route_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="9 of 8"):
        route(np.zeros((1, 8), np.float32), 9, True)
