"""The row contract of the n-gram embedding on CUDA: the CPU's bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isobit.cuda import memory
from isobit.ops.batch import Batch
from isobit.ops.cases import given, rows_of_plan, stream_of_row
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.delta_rule.cuda import BY_ROW_COUNT, CONV_CHUNK, FEW_ROWS, MANY_ROWS, MOST_FEW_ROWS
from isobit.ops.delta_rule.cuda_contract import LentPool, guarded
from isobit.ops.device_cases import DeviceState, on_device, to_host
from isobit.ops.journaled import JournaledOp
from isobit.ops.ngram_embedding import contract, cuda

IMPLEMENTATIONS = {"few_rows": FEW_ROWS, "many_rows": MANY_ROWS, "by_row_count": BY_ROW_COUNT}


class NgramIds(contract.NgramIds):
    """The hash, which stays on the host."""

    implementations: tuple[str, ...] = ("cpu", "cuda")

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation == "cpu":
            return super().compute("cpu", case, state, plan, batch, journal)
        tokens = given(rows_of_plan(plan, case.inputs["tokens"]))
        return {"ids": cuda.ngram_ids(tokens, state, case.inputs["table"], contract.END_TOKEN, batch, journal)}


class NgramGather(contract.NgramGather):
    """Rows of a table on the host and of one on the device."""

    implementations: tuple[str, ...] = ("cpu", "host_table", "device_table")

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return super().call("one_thread", case, state, plan)
        table = case.inputs["table"]
        if implementation == "device_table":
            table = replace(table, shards=(memory.to_device(np.concatenate(table.shards)),))
        return to_host({"rows": cuda.ngram_gather(given(case.inputs["ids"][stream_of_row(plan)]), table)})


class PleInject(DeviceState, contract.PleInject):
    """The injection, its convolution row by row and by chunks of rows."""

    implementations: tuple[str, ...] = ("cpu", *IMPLEMENTATIONS)
    row_edges = (MOST_FEW_ROWS, CONV_CHUNK[MANY_ROWS])

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation == "cpu":
            return super().compute("one_thread", case, state, plan, batch, journal)
        inputs, pool = case.inputs, state[1]
        norms = inputs["norm_key"], inputs["norm_query"], inputs["norm_conv"]
        count, dilation = inputs["streams"][0].shape[1], inputs["dilation"]
        handle = cuda.prepare_ple(*norms, inputs["conv_weight"], count, dilation, 1e-6)
        streams = guarded(rows_of_plan(plan, inputs["streams"]))
        key, value = (on_device(rows_of_plan(plan, inputs[name])) for name in ("key", "value"))
        with LentPool(pool, journal) as (moving, written):
            how = IMPLEMENTATIONS[implementation]
            cuda.ple_inject(streams, key, value, handle, moving, batch, written, how)
        return to_host({"streams": streams})

    def device_state(self, case: Case, state: Any) -> dict[str, Any]:
        return {"rows": state[1]}


register(NgramIds(), device="cuda")
register(JournaledOp(NgramIds()), device="cuda")
register(NgramGather(), device="cuda")
register(PleInject(), device="cuda")
register(JournaledOp(PleInject()), device="cuda")
