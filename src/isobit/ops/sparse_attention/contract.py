"""The row contract of sparse attention: writing, selecting and reading each alone, and all three in a row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from isobit.ops.batch import PAGE_ROWS, AttentionCache, Batch, Selection
from isobit.ops.cases import SMALLEST, UNIT, batch_of_plan, given, in_place, rows_of_kinds, rows_of_plan, stream_lengths
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.sparse_attention import reference
from isobit.ops.sparse_attention.cpu import (
    MANY_ROWS,
    TOGETHER,
    Attention,
    attention_cache,
    attention_read,
    attention_select,
    attention_write,
    prepare_attention,
    select_together,
)

THETA, EPS = 1e4, 1e-6
HALF_UNIT, HALF_SMALLEST = 2.0**-11, 2.0**-25  # half a step of binary16: relative, and below its normal range
Select = Callable[..., Selection]
SELECTS: dict[str, Select] = {
    "few_rows": lambda *arguments, **options: select_together(1, *arguments, **options),
    "many_rows": lambda *arguments, **options: select_together(TOGETHER, *arguments, **options),
    "by_row_count": attention_select,
}


@dataclass(frozen=True)
class Shape:
    """An attention layer, and how many rows its streams hold before a case begins."""

    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    budget: int
    block: int
    rotary_dim: int
    before: int

    @property
    def label(self) -> str:
        return (
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, index {self.index_heads} of {self.index_dim}, "
            f"budget {self.budget} in blocks of {self.block}, from position {self.before}"
        )

    @property
    def kept(self) -> int:
        return self.budget // self.block


SHAPES = (
    Shape(2, 1, 8, 1, 8, 8, 2, 4, 0),
    Shape(4, 2, 40, 2, 36, 16, 4, 16, 61),
    Shape(3, 1, 32, 3, 64, 512, 4, 32, 700),
    Shape(2, 2, 64, 1, 32, 8, 8, 0, 190),
)
WIDE = Shape(24, 2, 256, 4, 128, 2048, 4, 64, 2500)


def shapes(full: bool) -> tuple[Shape, ...]:
    return (*SHAPES, WIDE) if full else SHAPES


@dataclass
class State:
    """A prepared layer, its pools, and which pages each stream owns: int32 [streams, pages of a stream]."""

    handle: Attention
    cache: AttentionCache
    pages: np.ndarray

    def places(self, stream: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(pool page, row in the page) of a stream's positions."""
        return self.pages[stream, positions // PAGE_ROWS], positions % PAGE_ROWS


def begin(case: Case) -> State:
    """Pools full of NaN, in which streams own pages in no order and some pages belong to nobody."""
    inputs, shape = case.inputs, case.inputs["shape"]
    per_stream = -(-(shape.before + max(case.rows)) // PAGE_ROWS)
    pages = np.random.default_rng(5).permutation(len(case.rows) * per_stream + 2).astype(np.int32)
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.index_heads, shape.index_dim
    choice = shape.budget, shape.block, shape.rotary_dim
    positions = per_stream * PAGE_ROWS
    q_norm, k_norm, index_q_norm, index_k_norm = inputs["norms"]
    handle = prepare_attention(
        q_norm, k_norm, index_q_norm, index_k_norm, *sizes, *choice, theta=THETA, positions=positions, eps=EPS
    )
    new = attention_cache(handle, len(pages))
    cache = AttentionCache(*(in_place(pool) for pool in (new.keys, new.values, new.index_raw, new.index_pooled)))
    state = State(handle, cache, pages[: len(case.rows) * per_stream].reshape(len(case.rows), per_stream))
    for pool in pools(state).values():
        pool.view(np.uint8)[...] = 0xFF
    return state


def batch_of(case: Case, state: State, plan: Sequence[Span]) -> Batch:
    batch = batch_of_plan(plan, len(case.rows))
    pages = np.ascontiguousarray(state.pages[[span.stream for span in plan]])
    return replace(batch, first=batch.first + np.int32(case.inputs["shape"].before), pages=pages)


def pools(state: State) -> Outputs:
    cache = state.cache
    return {"keys": cache.keys, "values": cache.values, "raw": cache.index_raw, "pooled": cache.index_pooled}


def norm_weights(rng: np.random.Generator, shape: Shape) -> list[np.ndarray]:
    widths = (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim)
    return [(rng.standard_normal(width) / 4).astype(np.float32) for width in widths]


def positions_of(case: Case, stream: int) -> np.ndarray:
    first = case.inputs["shape"].before
    return np.arange(first, first + case.rows[stream])


def rotated(case: Case, x: np.ndarray, weight: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """x [n, heads * d] -> float64 [n, heads, d]."""
    heads = x.reshape(len(x), x.shape[1] // len(weight), len(weight))
    return reference.norm_and_rotate(heads, weight, EPS, positions, case.inputs["shape"].rotary_dim, THETA)


def norm_roundings(width: int) -> float:
    """The relative error of a normed and rotated row, in the norm of a rotated pair."""
    return (width / 64 + 13) * UNIT


def product_roundings(width: int) -> float:
    """The error of the product of a normed and rotated query with a key, relative to their lengths."""
    return norm_roundings(width) + (width / 32 + 6) * UNIT


def pair_norms(x: np.ndarray, rotary_dim: int) -> np.ndarray:
    """|x|, where both elements of a rotated pair have the pair's Euclidean norm, times sqrt(2)."""
    half_dim = rotary_dim // 2
    pairs = np.sqrt(2) * np.hypot(x[..., :half_dim], x[..., half_dim:rotary_dim])
    return np.concatenate([pairs, pairs, np.abs(x[..., rotary_dim:])], axis=-1)


def lengths(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


class AttentionWrite:
    """What rows leave in the pools: keys, values, and the pooled keys of the blocks that they finish."""

    name = "attention_write"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, shape in enumerate(shapes(full)):
            shape = replace(shape, before=shape.before // shape.block * shape.block)
            streams = stream_lengths(number, full)
            widths = {
                "k": shape.kv_heads * shape.head_dim,
                "v": shape.kv_heads * shape.head_dim,
                "index_k": shape.index_dim,
            }
            inputs = {
                name: [rows_of_kinds(rng, rows, width)[rng.permutation(rows)] for rows in streams]
                for name, width in widths.items()
            }
            yield Case(shape.label, streams, {"shape": shape, "norms": norm_weights(rng, shape), **inputs})

    def begin(self, case: Case) -> State:
        return begin(case)

    def call(self, implementation: str, case: Case, state: State, plan: Sequence[Span]) -> Outputs:
        k, v, index_k = (given(rows_of_plan(plan, case.inputs[name])) for name in ("k", "v", "index_k"))
        attention_write(k, v, index_k, state.handle, state.cache, batch_of(case, state, plan))
        written = [self._written(case, state, span) for span in plan]
        return {name: np.concatenate([rows[name] for rows in written]) for name in ("key", "value", "raw", "pooled")}

    def _written(self, case: Case, state: State, span: Span) -> Outputs:
        """What the pools hold at a span's rows; the pooled key at the rows that finish a block, else zeros."""
        shape, cache = case.inputs["shape"], state.cache
        positions = case.inputs["shape"].before + np.arange(span.first, span.first + span.count)
        pages, rows = state.places(span.stream, positions)
        pooled = cache.index_pooled[pages, rows // shape.block]
        pooled[(positions + 1) % shape.block != 0] = 0
        key, value = (pool[pages, rows].view(np.float16).astype(np.float32) for pool in (cache.keys, cache.values))
        flat = (span.count, -1)
        return {
            "key": key.reshape(flat),
            "value": value.reshape(flat),
            "raw": cache.index_raw[pages, rows],
            "pooled": pooled,
        }

    def final_state(self, case: Case, state: State) -> Outputs:
        return pools(state)

    def reference(self, case: Case) -> Outputs:
        inputs = case.inputs
        streams = range(len(case.rows))
        keys = [rotated(case, inputs["k"][i], inputs["norms"][1], positions_of(case, i)) for i in streams]
        return {
            "key": np.concatenate(
                [np.clip(k, -reference.HALF_MAX, reference.HALF_MAX).reshape(len(k), -1) for k in keys]
            ),
            "value": reference.half(np.concatenate(inputs["v"])),
            "raw": np.concatenate(inputs["index_k"]),
            "pooled": np.concatenate([self._pooled(case, i)[0] for i in streams]),
        }

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """Half a step of binary16 for keys; a block's mean is off by its roundings, which the norm then magnifies."""
        shape = case.inputs["shape"]
        heads = reference["key"].reshape(len(reference["key"]), -1, shape.head_dim)
        sizes = pair_norms(heads, shape.rotary_dim)
        key = HALF_UNIT * np.abs(heads) + HALF_SMALLEST + norm_roundings(shape.head_dim) * sizes
        pooled = np.concatenate([self._pooled(case, i)[1] for i in range(len(case.rows))])
        return {
            "key": key.reshape(reference["key"].shape),
            "value": np.zeros(()),
            "raw": np.zeros(()),
            "pooled": pooled,
        }

    def limits(self) -> list[str]:
        return ["index keys above 1e15, whose squares overflow; blocks that divide no page are refused"]

    def _pooled(self, case: Case, stream: int) -> tuple[np.ndarray, np.ndarray]:
        """(pooled keys, their error limits), float64 [rows, di]: zeros at rows that finish no block."""
        shape, index_k, weight = case.inputs["shape"], case.inputs["index_k"][stream], case.inputs["norms"][3]
        finished = np.flatnonzero((positions_of(case, stream) + 1) % shape.block == 0)
        pooled, limits = np.zeros((2, len(index_k), shape.index_dim))
        if len(finished):
            first_positions = shape.before + finished + 1 - shape.block
            means = reference.block_means(index_k, shape.block)
            pooled[finished] = rotated(case, means, weight, first_positions)[:, 0]
            mean_error = reference.block_means(np.abs(index_k), shape.block) * (shape.block + 1) * UNIT + SMALLEST
            limits[finished] = pooled_limit(shape, means, mean_error, weight)
        return pooled, limits


def pooled_limit(shape: Shape, means: np.ndarray, mean_error: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The error of normed and rotated means [n, di] whose own error is at most mean_error."""
    inverse = 1 / np.sqrt(np.mean(means * means, axis=-1, keepdims=True) + EPS)
    stretch = (lengths(means) * lengths(mean_error))[:, None] * inverse**2 / shape.index_dim
    normed = means * inverse
    error = np.abs(1 + weight) * (mean_error * inverse + np.abs(normed) * (stretch + norm_roundings(shape.index_dim)))
    size = np.abs(normed * (1 + weight)) * norm_roundings(shape.index_dim)
    return pair_norms(error + size, shape.rotary_dim) * 1.5 + 4 * SMALLEST * inverse


class AttentionSelect:
    """Scores and chosen blocks over given pooled keys, some of them of blocks that rows have yet to finish."""

    name = "attention_select"
    implementations: tuple[str, ...] = tuple(SELECTS)
    row_edges: tuple[int, ...] = (TOGETHER, MANY_ROWS)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, shape in enumerate(shapes(full)):
            shape = replace(shape, before=(0, 61, 2300, 190, 9000)[number])
            streams = stream_lengths(number, full)
            blocks = (shape.before + max(streams)) // shape.block + 1
            inputs = {
                "index_q": [rows_of_kinds(rng, rows, shape.index_heads * shape.index_dim) for rows in streams],
                "pooled": rows_of_kinds(rng, len(streams) * blocks, shape.index_dim).reshape(len(streams), blocks, -1),
            }
            yield Case(shape.label, streams, {"shape": shape, "norms": norm_weights(rng, shape), **inputs})

    def begin(self, case: Case) -> State:
        state, block = begin(case), case.inputs["shape"].block
        for stream, pooled in enumerate(case.inputs["pooled"]):
            inside = np.arange(min(len(pooled), state.pages.shape[1] * PAGE_ROWS // block)) * block
            pages, rows = state.places(stream, inside)
            state.cache.index_pooled[pages, rows // block] = pooled[: len(inside)]
        return state

    def call(self, implementation: str, case: Case, state: State, plan: Sequence[Span]) -> Outputs:
        select, batch = SELECTS[implementation], batch_of(case, state, plan)
        index_q = given(rows_of_plan(plan, case.inputs["index_q"]))
        plain = select(index_q, state.handle, state.cache, batch)
        traced = select(index_q, state.handle, state.cache, batch, keep_scores=True)
        scores = np.full((batch.rows, self._most_blocks(case)), -1, np.float32)
        for row, values in zip(scores, traced.scores or [], strict=True):
            row[: len(values)] = values
        return {
            "blocks": plain.blocks, "counts": plain.counts, "traced_blocks": traced.blocks, "scores": scores,
        }  # fmt: skip

    def final_state(self, case: Case, state: State) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        shape, most = case.inputs["shape"], self._most_blocks(case)
        rows = sum(case.rows)
        blocks, scores = np.full((rows, shape.kept), -1), np.full((rows, most), -1.0)
        counts = np.zeros(rows, np.int64)
        for row, (values, _) in enumerate(self._rows(case)):
            chosen = reference.best_blocks(values, shape.kept)
            blocks[row, : len(chosen)], counts[row], scores[row, : len(values)] = chosen, len(chosen), values
        return {"blocks": blocks, "counts": counts, "traced_blocks": blocks, "scores": scores}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """A choice that the scores' errors could change has no limit."""
        scores, blocks = np.zeros(reference["scores"].shape), np.zeros(reference["blocks"].shape)
        for row, (values, errors) in enumerate(self._rows(case)):
            scores[row, : len(values)] = errors
            if not is_certain(values, errors, case.inputs["shape"].kept):
                blocks[row] = np.inf
        return {"blocks": blocks, "counts": np.zeros(()), "traced_blocks": blocks, "scores": scores}

    def limits(self) -> list[str]:
        return ["more than 65,536 blocks a stream"]

    def _most_blocks(self, case: Case) -> int:
        return (case.inputs["shape"].before + max(case.rows)) // case.inputs["shape"].block

    def _rows(self, case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
        """(scores, their error limits) of every row."""
        return case.once("rows", lambda: list(self._scored_rows(case)))

    def _scored_rows(self, case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        shape, weight = case.inputs["shape"], case.inputs["norms"][2]
        for stream, index_q in enumerate(case.inputs["index_q"]):
            positions = positions_of(case, stream)
            for position, queries in zip(positions, rotated(case, index_q, weight, positions), strict=True):
                pooled = case.inputs["pooled"][stream][: (position + 1) // shape.block].astype(np.float64)
                errors = score_limits(queries, pooled, np.zeros(len(pooled)))
                yield reference.block_scores(queries, pooled), errors


def score_limits(queries: np.ndarray, pooled: np.ndarray, key_errors: np.ndarray) -> np.ndarray:
    """How far the blocks' scores may be off: nothing where every head's product is surely negative."""
    width = pooled.shape[1]
    relative = product_roundings(width) * lengths(pooled) + key_errors
    head_errors = lengths(queries)[:, None] * relative + SMALLEST * width
    products = queries @ pooled.T
    surely_zero = (products <= -head_errors) | (lengths(queries)[:, None] * lengths(pooled) == 0)
    return np.where(surely_zero, 0, head_errors + np.abs(products) * 8 * UNIT).sum(axis=0) / np.sqrt(width)


def is_certain(scores: np.ndarray, errors: np.ndarray, kept: int) -> bool:
    """Whether no errors within the limits can change which blocks are the best."""
    chosen = reference.best_blocks(scores, kept)
    others = np.setdiff1d(np.arange(len(scores)), chosen)
    if not len(others):
        return True
    return (scores - errors)[chosen].min() >= (scores + errors)[others].max()


def read_row(
    case: Case, q_gate: np.ndarray, position: int, keys: np.ndarray, values: np.ndarray, key_errors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(output, its error limit), float64 [heads * hd], of one row that reads these keys [n, kv_heads, hd]."""
    shape = case.inputs["shape"]
    q, gate = np.split(q_gate.reshape(shape.heads, 2 * shape.head_dim), 2, axis=-1)
    queries = rotated(case, q.reshape(1, -1), case.inputs["norms"][0], np.array([position]))[0]
    weights, out = reference.attend(queries, keys, values)
    score_errors = reference.by_key_head(np.abs(queries), key_errors.transpose(1, 2, 0))
    roundings = product_roundings(shape.head_dim) * lengths(queries)[:, None]
    score_errors += reference.by_key_head(roundings, lengths(keys).T[:, None])
    below_max = np.log(weights.max(axis=1, keepdims=True) / np.maximum(weights, 1e-300))
    relative = score_errors / np.sqrt(shape.head_dim) + (below_max + 300 + 4 * len(keys) / 256) * UNIT
    relative = np.expm1(np.minimum(1.1 * relative, 500))
    error = reference.by_key_head(weights * relative, np.abs(values).transpose(1, 0, 2))
    error += np.abs(out) * np.sum(weights * relative, axis=1, keepdims=True)
    opened = reference.sigmoid(gate)
    limit = error * opened + np.abs(out * opened) * 8 * UNIT + SMALLEST * len(keys) * (1 + np.abs(values).max())
    return (out * opened).ravel(), limit.ravel()


class AttentionRead:
    """Reading given keys and values by given selections."""

    name = "attention_read"
    implementations: tuple[str, ...] = ("cpu",)
    read_row = staticmethod(read_row)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, shape in enumerate(shapes(full)):
            streams = stream_lengths(number, full)
            held = shape.before + max(streams), shape.kv_heads, shape.head_dim
            inputs = {
                "q_gate": [rows_of_kinds(rng, rows, shape.heads * 2 * shape.head_dim, largest=50) for rows in streams],
                "keys": [rows_of_kinds(rng, *held, largest=20).astype(np.float16) for _ in streams],
                "values": [rows_of_kinds(rng, *held, largest=1e4).astype(np.float16) for _ in streams],
                "choices": rng.random((len(streams), max(streams), held[0] // shape.block + 1)),
            }
            yield Case(shape.label, streams, {"shape": shape, "norms": norm_weights(rng, shape), **inputs})

    def begin(self, case: Case) -> State:
        state = begin(case)
        for stream in range(len(case.rows)):
            places = state.places(stream, np.arange(len(case.inputs["keys"][stream])))
            state.cache.keys[places] = case.inputs["keys"][stream].view(np.uint16)
            state.cache.values[places] = case.inputs["values"][stream].view(np.uint16)
        return state

    def call(self, implementation: str, case: Case, state: State, plan: Sequence[Span]) -> Outputs:
        batch = batch_of(case, state, plan)
        blocks, counts = self.choices(case, plan)
        selection = Selection(given(blocks), given(counts))
        q_gate = given(rows_of_plan(plan, case.inputs["q_gate"]))
        return {"y": attention_read(q_gate, selection, state.handle, state.cache, batch)}

    def final_state(self, case: Case, state: State) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"y": np.array([y for y, _ in self._rows(case)])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"y": np.array([limit for _, limit in self._rows(case)])}

    def limits(self) -> list[str]:
        return ["budgets above 2,048; scores above about 1e4, where float32 leaves softmax no digits"]

    def choices(self, case: Case, plan: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """The blocks that each row of the plan reads, int32 [R, kept], and how many they are, int32 [R]."""
        rows = [(span.stream, row) for span in plan for row in range(span.first, span.first + span.count)]
        blocks = np.full((len(rows), case.inputs["shape"].kept), -1, np.int32)
        counts = np.zeros(len(rows), np.int32)
        for at, (stream, row) in enumerate(rows):
            chosen = self._chosen(case, stream, row)
            blocks[at, : len(chosen)], counts[at] = chosen, len(chosen)
        return blocks, counts

    def _chosen(self, case: Case, stream: int, row: int) -> np.ndarray:
        shape = case.inputs["shape"]
        finished = (shape.before + row + 1) // shape.block
        return np.sort(np.argsort(case.inputs["choices"][stream][row, :finished])[: shape.kept])

    def _rows(self, case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
        """(output, its error limit) of every row."""
        return case.once("rows", lambda: list(self._read_rows(case)))

    def _read_rows(self, case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        shape = case.inputs["shape"]
        for stream, q_gate in enumerate(case.inputs["q_gate"]):
            for row, position in enumerate(positions_of(case, stream)):
                read = reference.read_positions(position, self._chosen(case, stream, row), shape.block)
                keys, values = (case.inputs[name][stream][read].astype(np.float64) for name in ("keys", "values"))
                yield self.read_row(case, q_gate[row], position, keys, values, np.zeros(keys.shape))


class SparseAttention:
    """Write, select and read in a row, as a layer does; the streams' caches are all that a later call sees."""

    name = "sparse_attention"
    implementations: tuple[str, ...] = tuple(SELECTS)
    row_edges: tuple[int, ...] = (TOGETHER, MANY_ROWS)
    read_row = staticmethod(read_row)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, shape in enumerate(shapes(full)):
            shape = replace(shape, before=0)
            streams = stream_lengths(number, full)
            widths = {
                "k": shape.kv_heads * shape.head_dim,
                "v": shape.kv_heads * shape.head_dim,
                "index_k": shape.index_dim,
                "index_q": shape.index_heads * shape.index_dim,
                "q_gate": shape.heads * 2 * shape.head_dim,
            }
            inputs = {
                name: [rows_of_kinds(rng, rows, width, largest=50) for rows in streams]
                for name, width in widths.items()
            }
            yield Case(shape.label, streams, {"shape": shape, "norms": norm_weights(rng, shape), **inputs})

    def begin(self, case: Case) -> State:
        return begin(case)

    def call(self, implementation: str, case: Case, state: State, plan: Sequence[Span]) -> Outputs:
        names = ("k", "v", "index_k", "index_q", "q_gate")
        k, v, index_k, index_q, q_gate = (given(rows_of_plan(plan, case.inputs[name])) for name in names)
        batch = batch_of(case, state, plan)
        attention_write(k, v, index_k, state.handle, state.cache, batch)
        selection = SELECTS[implementation](index_q, state.handle, state.cache, batch)
        return {"y": attention_read(q_gate, selection, state.handle, state.cache, batch)}

    def final_state(self, case: Case, state: State) -> Outputs:
        return pools(state)

    def reference(self, case: Case) -> Outputs:
        return {"y": np.array([y for y, _ in self._rows(case)])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"y": np.array([limit for _, limit in self._rows(case)])}

    def limits(self) -> list[str]:
        return ["rows whose selection float32 scores may change are held to the rows gate alone"]

    def _rows(self, case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
        """(output, its error limit) of every row."""
        streams = range(len(case.rows))
        return case.once("rows", lambda: [row for stream in streams for row in self._rows_of_stream(case, stream)])

    def _rows_of_stream(self, case: Case, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        inputs, shape, positions = case.inputs, case.inputs["shape"], positions_of(case, stream)
        _, k_norm, index_q_norm, index_k_norm = inputs["norms"]
        exact = rotated(case, inputs["k"][stream], k_norm, positions)
        keys, values = reference.half(exact), reference.half(inputs["v"][stream].reshape(exact.shape))
        key_errors = 2 * HALF_UNIT * np.abs(keys) + 2 * HALF_SMALLEST
        key_errors += norm_roundings(shape.head_dim) * pair_norms(exact, shape.rotary_dim)
        means = reference.block_means(inputs["index_k"][stream], shape.block)
        pooled = rotated(case, means, index_k_norm, np.arange(len(means)) * shape.block)[:, 0]
        mean_errors = reference.block_means(np.abs(inputs["index_k"][stream]), shape.block) * (shape.block + 1) * UNIT
        pooled_errors = lengths(pooled_limit(shape, means, mean_errors + SMALLEST, index_k_norm))
        queries = rotated(case, inputs["index_q"][stream], index_q_norm, positions)
        for row, position in enumerate(positions):
            finished = (position + 1) // shape.block
            scores = reference.block_scores(queries[row], pooled[:finished])
            errors = score_limits(queries[row], pooled[:finished], pooled_errors[:finished])
            read = reference.read_positions(position, reference.best_blocks(scores, shape.kept), shape.block)
            y, limit = self.read_row(
                case, inputs["q_gate"][stream][row], position, keys[read], values[read], key_errors[read]
            )
            yield y, limit if is_certain(scores, errors, shape.kept) else np.full(y.shape, np.inf)


register(AttentionWrite())
register(AttentionSelect())
register(AttentionRead())
register(SparseAttention())
