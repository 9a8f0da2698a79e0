"""The n-gram embedding on CUDA, emulated: its contract, the checkpoint's rows, cuts of a stream."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the optional package torch")

from isobit.checkpoint.trellis import dequantize_ngram_rows
from isobit.contract.gates import GATES
from isobit.contract.plans import Sizes
from isobit.contract.run import cases_of, run_gate
from isobit.cuda import memory
from isobit.ops.delta_rule.cuda import FEW_ROWS, MANY_ROWS
from isobit.ops.journaled import JournaledOp
from isobit.ops.ngram_embedding import cpu, cuda, cuda_contract
from isobit.ops.ngram_embedding.contract import make_table
from tests.ops.test_ngram_embedding import segments

pytestmark = pytest.mark.usefixtures("emulated_cuda")

f32 = np.float32
SIZES = Sizes((1, 3, 8, 17), 3)
BOTH = pytest.mark.parametrize("how", [FEW_ROWS, MANY_ROWS])


def problems(op, cases):
    for case, implementation, gate in itertools.product(cases, op.implementations, GATES):
        if problem := run_gate(gate, op, implementation, case, SIZES):
            yield f"{case.label}, {implementation}, {gate}: {problem}"


def test_ids_keep_their_contract():
    op = cuda_contract.NgramIds()
    assert not list(problems(op, cases_of(op, wide=False)[:2]))


def test_rows_keep_their_contract():
    op = cuda_contract.NgramGather()
    chosen = [case for case in cases_of(op, wide=False) if case.label.split(",")[0] in ("3", "float16", "bfloat16")]
    assert len(chosen) == 3
    assert not list(problems(op, chosen))


def test_injection_keeps_its_contract():
    op = cuda_contract.PleInject()
    assert not list(problems(op, cases_of(op, wide=False)[2:]))


def test_journals_keep_their_contract():
    op = JournaledOp(cuda_contract.PleInject())
    assert not list(problems(op, cases_of(op, wide=False)))


def test_a_float32_table_widens_exactly_on_the_device():
    table = make_table(np.random.default_rng(4), 3, 2, 12, "float32", 10**6, bias=False)
    ids = np.arange(12).reshape(3, 4)
    on_device = replace(table, shards=(memory.to_device(table.shards[0]),))
    assert memory.to_host(cuda.ngram_gather(ids, on_device)).tobytes() == table.shards[0][:12].tobytes()


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_quantized_rows_are_those_of_the_checkpoint_format(bits):
    table = make_table(np.random.default_rng(bits), 3, 2, 160, str(bits), 50)
    ids = np.arange(4 * 9).reshape(9, 4) * 5
    stored = np.concatenate(table.shards)[ids.ravel()]
    bias = np.tile(table.head_bias, (9, 1))
    found = memory.to_host(cuda.ngram_gather(ids, table))
    assert found.tobytes() == dequantize_ngram_rows(stored, bits, bias).tobytes()


class Injection:
    """Random constants, inputs of one stream on the host, and a pool that is not empty."""

    def __init__(self, rows, streams=4, hidden=40, dilation=3):
        rng, wide = np.random.default_rng(rows), streams * hidden
        norms = (0.3 * rng.standard_normal((3, wide))).astype(f32)
        conv_weight = rng.standard_normal((wide, 4)).astype(f32)
        self.handle = cuda.prepare_ple(*norms, conv_weight, streams, dilation, 1e-6)
        self.on_cpu = cpu.prepare_ple(*norms, conv_weight, streams, dilation, 1e-6)
        self.streams = rng.standard_normal((rows, streams, hidden)).astype(f32)
        self.key = rng.standard_normal((rows, wide)).astype(f32)
        self.value = rng.standard_normal((rows, hidden)).astype(f32)
        self.pool = rng.standard_normal((3, 3 * dilation, wide)).astype(f32)

    def run(self, how, pool, batch, rows=slice(None)):
        """The streams of input rows `rows` afterwards; the pool, a tensor, moves on."""
        streams, key, value = (memory.to_device(x[rows]) for x in (self.streams, self.key, self.value))
        cuda.ple_inject(streams, key, value, self.handle, pool, batch, None, how)
        return memory.to_host(streams)


@BOTH
def test_any_cut_of_a_stream_beside_others_gives_the_cpus_bytes(how):
    layer = Injection(45)
    whole, whole_pool = layer.streams.copy(), layer.pool.copy()
    cpu.ple_inject(whole, layer.key, layer.value, layer.on_cpu, whole_pool, segments((2, 45)))
    for cuts in ((0, 45), (0, 16, 17, 20, 45), (0, 1, 12, 44, 45)):
        pool = memory.to_device(layer.pool)
        parts = []
        for first, last in itertools.pairwise(cuts):
            batch = segments((0, 2), (2, last - first))
            parts.append(layer.run(how, pool, batch, np.r_[:2, first:last])[2:])
        assert np.concatenate(parts).tobytes() == whole.tobytes()
        assert memory.to_host(pool)[2].tobytes() == whole_pool[2].tobytes()
