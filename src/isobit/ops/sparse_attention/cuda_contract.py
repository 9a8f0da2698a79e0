"""The row contract of sparse attention on CUDA: writes and selections have the CPU's bytes, reads have their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isobit.cuda import memory
from isobit.ops.batch import AttentionCache, Selection
from isobit.ops.cases import SMALLEST, UNIT, rows_of_plan
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.device_cases import DeviceState, on_device, to_host
from isobit.ops.rows.cuda import split_columns
from isobit.ops.sparse_attention import contract, cuda, reference
from isobit.ops.sparse_attention.contract import HALF_SMALLEST, HALF_UNIT, Shape, lengths, product_roundings

STEP_ERROR = 17 * 2.0**-22  # of a tensor core's sum of 16 products and one more term, relative to the largest of these
LOWER_SMALLEST = 2.0**-40  # half the smallest half, at the scale of the weights
SUFFIXES = {"few_rows": "few", "many_rows": "many"}


@dataclass
class State(contract.State):
    """The host's state, which the CPU's implementation changes, and the device's, which the others change."""

    device: Any  # the layer on the device
    device_cache: AttentionCache
    is_on_host: bool = False

    def live_cache(self) -> AttentionCache:
        return self.cache if self.is_on_host else self.device_cache

    def fetched(self) -> contract.State:
        """What lies on the device, as the host's arrays."""
        arrays = to_host(pools_of(self.device_cache))
        return contract.State(self.handle, AttentionCache(**arrays), self.pages)


def pools_of(cache: AttentionCache) -> dict[str, Any]:
    return {name: getattr(cache, name) for name in ("keys", "values", "index_raw", "index_pooled")}


def placed_state(case: Case, state: contract.State) -> State:
    """The state that a CPU contract begins with, on the device as well."""
    shape, (q_norm, k_norm, index_q_norm, index_k_norm) = case.inputs["shape"], case.inputs["norms"]
    handle = cuda.prepare_attention(
        q_norm, k_norm, index_q_norm, index_k_norm, shape.heads, shape.kv_heads, shape.head_dim, shape.index_heads,
        shape.index_dim, shape.budget, shape.block, shape.rotary_dim, contract.THETA, state.handle.positions,
        contract.EPS,
    )  # fmt: skip
    pools = {name: guarded(pool) for name, pool in pools_of(state.cache).items()}
    return State(state.handle, state.cache, state.pages, handle, AttentionCache(**pools))


def guarded(pool: np.ndarray) -> torch.Tensor:
    """A copy on the device where op outputs come from; bits of halves become halves."""
    source = memory.to_device(pool.view(np.float16) if pool.dtype == np.uint16 else pool)
    copy = memory.empty(source.shape, source.dtype)
    copy.copy_(source)
    return copy


class OnDevice(DeviceState):
    """What the contracts below share: state on the device."""

    def begin(self, case: Case) -> State:
        return placed_state(case, super().begin(case))  # type: ignore[misc]

    def device_state(self, case: Case, state: State) -> dict[str, Any]:
        cache = state.live_cache()
        return {"keys": cache.keys, "values": cache.values, "raw": cache.index_raw, "pooled": cache.index_pooled}


class AttentionWrite(OnDevice, contract.AttentionWrite):
    """The one kernel that writes, for any number of rows."""

    implementations: tuple[str, ...] = ("cpu", "cuda")

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            state.is_on_host = True
            return contract.AttentionWrite.call(self, implementation, case, state, plan)
        k, v, index_k = (on_device(rows_of_plan(plan, case.inputs[name])) for name in ("k", "v", "index_k"))
        cuda.attention_write(k, v, index_k, state.device, state.device_cache, contract.batch_of(case, state, plan))
        fetched = state.fetched()
        written = [self._written(case, fetched, span) for span in plan]
        return {name: np.concatenate([rows[name] for rows in written]) for name in ("key", "value", "raw", "pooled")}


def select(implementation: str, *arguments: Any, **options: Any) -> Selection:
    """The selection by one implementation, looked up when it is called."""
    suffix = SUFFIXES.get(implementation)
    function = getattr(cuda, f"select_{suffix}") if suffix else cuda.attention_select
    return function(*arguments, **options)


def read(implementation: str, *arguments: Any) -> torch.Tensor:
    suffix = SUFFIXES.get(implementation)
    function = getattr(cuda, f"read_{suffix}") if suffix else cuda.attention_read
    return function(*arguments)


def on_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Tensors [n] as arrays, fetched together."""
    ends = np.cumsum([len(tensor) for tensor in tensors])
    return np.split(memory.to_host(torch.cat(list(tensors))), ends[:-1])


class AttentionSelect(OnDevice, contract.AttentionSelect):
    """Scoring by blocks alone and by tiles of rows; the CPU's bytes."""

    implementations: tuple[str, ...] = ("cpu", *SUFFIXES, "by_row_count")
    row_edges = (cuda.SCORE_TILE_ROWS, cuda.MOST_FEW_ROWS)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        if implementation == "cpu":
            return contract.AttentionSelect.call(self, "by_row_count", case, state, plan)
        batch = contract.batch_of(case, state, plan)
        arguments = on_device(rows_of_plan(plan, case.inputs["index_q"])), state.device, state.device_cache, batch
        plain = select(implementation, *arguments)
        traced = select(implementation, *arguments, keep_scores=True)
        scores = np.full((batch.rows, self._most_blocks(case)), -1, np.float32)
        for row, values in zip(scores, on_host(traced.scores or []), strict=True):
            row[: len(values)] = values
        return to_host(
            {"blocks": plain.blocks, "counts": plain.counts, "traced_blocks": traced.blocks, "scores": scores}
        )

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}


class AttentionRead(OnDevice, contract.AttentionRead):
    """Reading part by part in many blocks, and row by row in one."""

    implementations: tuple[str, ...] = (*SUFFIXES, "by_row_count")
    row_edges = (cuda.MOST_FEW_ROWS,)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        batch = contract.batch_of(case, state, plan)
        blocks, counts = self.choices(case, plan)
        selection = Selection(on_device(blocks), on_device(counts))
        q_gate = on_device(rows_of_plan(plan, case.inputs["q_gate"]))
        return to_host({"y": read(implementation, q_gate, selection, state.device, state.device_cache, batch)})

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    @staticmethod
    def read_row(case, q_gate, position, keys, values, key_errors):
        return read_row(case, q_gate, position, keys, values, key_errors)


class SparseAttention(OnDevice, contract.SparseAttention):
    """Write, select and read in a row, by few-row and many-row kernels."""

    implementations: tuple[str, ...] = (*SUFFIXES, "by_row_count")
    row_edges = (cuda.SCORE_TILE_ROWS, cuda.MOST_FEW_ROWS)

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        k, v, q_gate = (on_device(rows_of_plan(plan, case.inputs[name])) for name in ("k", "v", "q_gate"))
        index = [rows_of_plan(plan, case.inputs[name]) for name in ("index_q", "index_k")]
        # As in the model, both are columns of one array.
        index_q, index_k = split_columns(on_device(np.concatenate(index, axis=1)), index[0].shape[1])
        shared = state.device, state.device_cache, contract.batch_of(case, state, plan)
        cuda.attention_write(k, v, index_k, *shared)
        selection = select(implementation, index_q, *shared)
        return to_host({"y": read(implementation, q_gate, selection, *shared)})

    def final_state(self, case: Case, state: Any) -> Outputs:
        return DeviceState.final_state(self, case, state)

    @staticmethod
    def read_row(case, q_gate, position, keys, values, key_errors):
        return read_row(case, q_gate, position, keys, values, key_errors)


def read_row(
    case: Case, q_gate: np.ndarray, position: int, keys: np.ndarray, values: np.ndarray, key_errors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(output, its error limit), float64 [heads * hd], of one row that reads these keys [n, kv_heads, hd].

    Queries are off by half a step of binary16, products and weighted sums by what a tensor core cuts off in each of
    their steps, weights by half a step of their lower halves; the rest as on the CPU.
    """
    shape: Shape = case.inputs["shape"]
    q, gate = np.split(q_gate.reshape(shape.heads, 2 * shape.head_dim), 2, axis=-1)
    queries = contract.rotated(case, q.reshape(1, -1), case.inputs["norms"][0], np.array([position]))[0]
    weights, out = reference.attend(queries, keys, values)
    query_errors = HALF_UNIT * np.abs(queries) + HALF_SMALLEST
    score_errors = reference.by_key_head(np.abs(queries) + query_errors, key_errors.transpose(1, 2, 0))
    score_errors += reference.by_key_head(query_errors, np.abs(keys).transpose(1, 2, 0))
    roundings = product_roundings(shape.head_dim) + -(-shape.head_dim // 16) * STEP_ERROR
    score_errors += reference.by_key_head(roundings * lengths(queries)[:, None], lengths(keys).T[:, None])
    below_max = np.log(weights.max(axis=1, keepdims=True) / np.maximum(weights, 1e-300))
    chain = 2 * cuda.PART_KEYS / 16 * STEP_ERROR + (40 + 4 * len(keys) / cuda.PART_KEYS) * UNIT
    relative = score_errors / np.sqrt(shape.head_dim) + below_max * UNIT + chain
    relative = np.expm1(np.minimum(1.1 * relative, 500))
    lost = LOWER_SMALLEST * weights.max(axis=1, keepdims=True)
    error = reference.by_key_head(weights * relative + lost, np.abs(values).transpose(1, 0, 2))
    error += np.abs(out) * np.sum(weights * relative, axis=1, keepdims=True)
    opened = reference.sigmoid(gate)
    limit = error * opened + np.abs(out * opened) * 8 * UNIT + SMALLEST * len(keys) * (1 + np.abs(values).max())
    return (out * opened).ravel(), limit.ravel()


register(AttentionWrite(), device="cuda")
register(AttentionSelect(), device="cuda")
register(AttentionRead(), device="cuda")
register(SparseAttention(), device="cuda")
