"""The row contract of the n-gram embedding: ids, gather, injection."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.checkpoint.weights import NgramTable
from isobit.ops.batch import Batch
from isobit.ops.cases import (
    SMALLEST,
    UNIT,
    batch_of_plan,
    given,
    in_place,
    pool_of_streams,
    rows_of_plan,
    stream_lengths,
    stream_of_row,
    streams_of_kinds,
)
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.journaled import JournaledOp, last_rows
from isobit.ops.ngram_embedding import reference
from isobit.ops.ngram_embedding.cpu import ngram_gather, ngram_ids, ple_inject, prepare_ple
from isobit.ops.norm import reference as norm_reference
from isobit.ops.work import forced_pieces

PIECES = {"one_thread": 1, "three_threads": 3}
END_TOKEN = 3
GATHERED = 24


def make_table(
    rng: np.random.Generator,
    order: int,
    heads_an_order: int,
    width: int,
    stored: str,
    shard_rows: int,
    bias: bool = True,
) -> NgramTable:
    """A small random table; stored: "1" to "8" bits, "float16", "float32" or "bfloat16"."""
    heads = heads_an_order * (order - 1)
    sizes = np.array([prime for prime in range(60, 200) if all(prime % d for d in range(2, 15))][:heads], np.int64)
    rows = int(sizes.sum()) + 5
    values = rng.standard_normal((rows, width)).astype(np.float32)
    bits = int(stored) if stored.isdigit() else None
    if bits is not None:
        words = rng.integers(-(2**15), 2**15, (rows, 1 + width * bits // 16)).astype(np.int16)
        words[:, 0] = rng.uniform(0.01, 2, rows).astype(np.float16).view(np.int16)
    elif stored == "bfloat16":
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        words = values.astype(stored)
    return NgramTable(
        name="table",
        shards=tuple(words[first : first + shard_rows] for first in range(0, rows, shard_rows)),
        shard_rows=shard_rows,
        width=width,
        bits=bits,
        bfloat16=stored == "bfloat16",
        offsets=np.cumsum(np.concatenate([[0], sizes[:-1]])),
        sizes=sizes,
        multipliers=rng.integers(2**60, 2**63 - 1, order, dtype=np.int64) | 1,
        head_bias=rng.standard_normal((heads, width)).astype(np.float16) if bias else None,
    )


class NgramIds:
    """The hash, with end tokens on both sides of every cut; exact."""

    name = "ngram_ids"
    implementations: tuple[str, ...] = ("cpu",)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = ((3, 2, 6), (4, 2, 8), (2, 1, 5), (3, 8, 248320))
        for number, (order, heads_an_order, vocabulary) in enumerate(shapes):
            streams = stream_lengths(number, full)
            inputs = {
                "tokens": [rng.integers(0, vocabulary, rows).astype(np.int32) for rows in streams],
                "history": [rng.integers(0, vocabulary, order - 1).astype(np.int32) for _ in streams],
                "table": make_table(rng, order, heads_an_order, 16, "2", 1000),
            }
            yield Case(f"order {order}, {heads_an_order} heads, {vocabulary} tokens", streams, inputs)

    def begin(self, case: Case) -> Any:
        return pool_of_streams(case.inputs["history"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        return self.compute(implementation, case, state, plan, batch_of_plan(plan, len(case.rows)), None)

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        if implementation != "cpu":
            raise KeyError(implementation)
        tokens = given(rows_of_plan(plan, case.inputs["tokens"]))
        return {"ids": ngram_ids(tokens, state, case.inputs["table"], END_TOKEN, batch, journal)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"history": state}

    def reference(self, case: Case) -> Outputs:
        pairs = zip(case.inputs["tokens"], case.inputs["history"], strict=True)
        ids = [reference.ngram_ids(tokens, history, case.inputs["table"], END_TOKEN) for tokens, history in pairs]
        return {"ids": np.concatenate(ids)}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        return {"ids": np.zeros(())}

    def states(self, case: Case) -> np.ndarray:
        pairs = zip(case.inputs["history"], case.inputs["tokens"], strict=True)
        return np.concatenate([last_rows(history[::-1], tokens)[:, ::-1] for history, tokens in pairs])

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        return np.zeros(())

    def limits(self) -> list[str]:
        return ["tables of 2^53 rows and more, whose ids the report's float64 comparison could not tell apart"]


class NgramGather:
    """Every width of the ring codec and every plain format, in one shard and in several."""

    name = "ngram_gather"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        for number, stored in enumerate(("1", "2", "3", "4", "5", "6", "7", "8", "float16", "float32", "bfloat16")):
            shard_rows, bias = (100000, 70)[number % 2], number % 3 != 2
            table = make_table(rng, 3, 2, 160 if full else 16, stored, shard_rows, bias)
            ids = rng.integers(0, table.sizes, (GATHERED, table.heads)) + table.offsets
            ids[0], ids[1] = table.offsets, table.offsets + table.sizes - 1
            yield Case(
                f"{stored}, {len(table.shards)} shards, bias: {bias}", (1,) * GATHERED, {"ids": ids, "table": table}
            )

    def begin(self, case: Case) -> Any:
        return None

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        with forced_pieces(PIECES[implementation]):
            return {"rows": ngram_gather(given(case.inputs["ids"][stream_of_row(plan)]), case.inputs["table"])}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        return {"rows": reference.ngram_gather(case.inputs["ids"], case.inputs["table"])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        bias = case.inputs["table"].head_bias
        added = 0.0 if bias is None else np.abs(bias.astype(np.float64)).ravel()
        return {"rows": (2 * np.abs(reference["rows"]) + added) * UNIT + SMALLEST}

    def limits(self) -> list[str]:
        return ["rows wider than 160 values; a bias on unquantized rows is checked, though no known checkpoint has one"]


class PleInject:
    """The injection over streams of several lengths, some shorter than the dilated taps."""

    name = "ple_inject"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = ((4, 40, 4, 3), (2, 32, 4, 2), (3, 7, 2, 1)) + (((4, 2560, 4, 3),) if full else ())
        for number, (streams, hidden, taps, dilation) in enumerate(shapes):
            lengths, wide = stream_lengths(number, full), streams * hidden
            inputs = {
                "streams": streams_of_kinds(rng, lengths, streams, hidden),
                "key": streams_of_kinds(rng, lengths, wide),
                "value": streams_of_kinds(rng, lengths, hidden, largest=1e6),
                "before": [rng.standard_normal((dilation * (taps - 1), wide)).astype(np.float32) for _ in lengths],
                "conv_weight": rng.standard_normal((wide, taps)).astype(np.float32),
                "dilation": dilation,
                **{
                    name: (0.3 * rng.standard_normal(wide)).astype(np.float32)
                    for name in ("norm_key", "norm_query", "norm_conv")
                },
            }
            yield Case(f"{streams} streams of {hidden}, {taps} taps, dilation {dilation}", lengths, inputs)

    def begin(self, case: Case) -> Any:
        inputs = case.inputs
        handle = prepare_ple(
            inputs["norm_key"],
            inputs["norm_query"],
            inputs["norm_conv"],
            inputs["conv_weight"],
            inputs["streams"][0].shape[1],
            inputs["dilation"],
            1e-6,
        )
        return handle, pool_of_streams(inputs["before"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        return self.compute(implementation, case, state, plan, batch_of_plan(plan, len(case.rows)), None)

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        handle, pool = state
        streams = in_place(rows_of_plan(plan, case.inputs["streams"]))
        key, value = (given(rows_of_plan(plan, case.inputs[name])) for name in ("key", "value"))
        with forced_pieces(PIECES[implementation]):
            ple_inject(streams, key, value, handle, pool, batch, journal)
        return {"streams": streams}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"rows": state[1]}

    def reference(self, case: Case) -> Outputs:
        return {"streams": np.concatenate([after for after, _ in self._injected(case)])}

    def states(self, case: Case) -> np.ndarray:
        pairs = zip(case.inputs["before"], self._injected(case), strict=True)
        return np.concatenate([last_rows(before, normed) for before, (_, normed) in pairs])

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        limits = []
        for streams, key, value, before in self._streams(case):
            normed_error = self._errors(case, streams, key, value)[2]
            limits.append(last_rows(np.zeros(before.shape), normed_error))
        return np.concatenate(limits) + SMALLEST

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """Each step's error through the next step's slope; the gate's root has slope 500 and a jump of 0.002 at 0."""
        limits = [self._limit_of_stream(case, *arrays) for arrays in self._streams(case)]
        return {"streams": np.concatenate(limits) + np.abs(reference["streams"]) * 2 * UNIT + SMALLEST}

    def limits(self) -> list[str]:
        return ["where a normed key and stream are orthogonal to within rounding, the gate's sign may differ"]

    def _streams(self, case: Case) -> Iterator[tuple]:
        return zip(*(case.inputs[name] for name in ("streams", "key", "value", "before")), strict=True)

    def _injected(self, case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each stream the residual streams afterwards, and the rows that go into the pool."""
        names = "norm_key", "norm_query", "norm_conv", "conv_weight", "dilation"
        constants = {name: case.inputs[name] for name in names}
        for streams, key, value, before in self._streams(case):
            yield reference.ple_inject(streams, key, value, before=before, eps=1e-6, **constants)

    def _errors(self, case: Case, streams, key, value) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bounds of the gated values' error, of the normed values, and of the normed values' error."""
        inputs, (rows, count, hidden) = case.inputs, streams.shape
        shape = (count, hidden)
        norm_error = (hidden / 32 + 16) * UNIT
        keys = norm_reference.norm(key.reshape(streams.shape), inputs["norm_key"].reshape(shape), 1e-6)
        queries = norm_reference.norm(streams, inputs["norm_query"].reshape(shape), 1e-6)
        dot = np.abs((keys * queries).sum(axis=-1)) / np.sqrt(hidden)
        dot_error = np.abs(keys * queries).sum(axis=-1) / np.sqrt(hidden) * (2 * norm_error + (hidden / 32 + 8) * UNIT)
        dot_error += hidden * SMALLEST
        gate_error = np.minimum(500.0, 0.5 / np.sqrt(np.maximum(dot, 1e-6))) * dot_error + 0.002 * (dot <= dot_error)
        value = np.abs(value.astype(np.float64))[:, None, :]
        gated_error = value * (gate_error[:, :, None] / 4 + 8 * UNIT) + SMALLEST
        gain = np.abs(1 + inputs["norm_conv"].astype(np.float64)).reshape(shape)
        inverse = 1 / np.sqrt(np.mean(np.square(value / 4), axis=-1, keepdims=True) + 1e-6)
        largest = value * gain * inverse
        return gated_error, largest, (2 * gated_error * inverse * gain + largest * norm_error).reshape(rows, -1)

    def _limit_of_stream(self, case: Case, streams, key, value, before) -> np.ndarray:
        inputs, rows = case.inputs, len(streams)
        gated_error, largest, normed_error = self._errors(case, streams, key, value)
        weight, taps = np.abs(inputs["conv_weight"].astype(np.float64)), inputs["conv_weight"].shape[1]
        history = np.concatenate([np.zeros(before.shape), normed_error])
        magnitude = np.concatenate([np.abs(before.astype(np.float64)), largest.reshape(rows, -1)])
        carried = history + magnitude * (taps + 8) * UNIT
        chain = sum(weight[:, tap] * carried[tap * inputs["dilation"] :][:rows] for tap in range(taps))
        return gated_error + 1.1 * chain.reshape(streams.shape)


register(NgramIds())
register(JournaledOp(NgramIds()))
register(NgramGather())
register(PleInject())
register(JournaledOp(PleInject()))
