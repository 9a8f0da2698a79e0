"""The row contract of the Gated DeltaNet: its convolution, its recurrence, its gated norm."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from isobit.ops.batch import Batch
from isobit.ops.cases import (
    SMALLEST,
    UNIT,
    batch_of_plan,
    given,
    pool_of_streams,
    rows_of_kinds,
    rows_of_plan,
    stream_lengths,
    stream_of_row,
    streams_of_kinds,
)
from isobit.ops.contract import Case, Outputs, Span, register
from isobit.ops.convolution import convolve
from isobit.ops.delta_rule import reference
from isobit.ops.delta_rule.cpu import Delta, causal_conv, delta_rule, gated_norm, prepare_delta
from isobit.ops.journaled import JournaledOp, last_rows
from isobit.ops.work import forced_pieces

PIECES = {"one_thread": 1, "three_threads": 3}


class CausalConv:
    """The depthwise convolution, dilated as the n-gram embedding has it and not."""

    name = "causal_conv"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = ((1, 4, 1), (40, 4, 1), (70, 4, 3), (33, 2, 2)) + (((10240, 4, 1), (10240, 4, 3)) if full else ())
        for number, (channels, taps, dilation) in enumerate(shapes):
            streams = stream_lengths(number, full)
            inputs = {
                "x": streams_of_kinds(rng, streams, channels),
                "before": [rows_of_kinds(rng, dilation * (taps - 1), channels) for _ in streams],
                "weight": rng.standard_normal((channels, taps)).astype(np.float32),
                "dilation": dilation,
            }
            yield Case(f"{channels} channels, {taps} taps, dilation {dilation}", streams, inputs)

    def begin(self, case: Case) -> tuple[Delta, np.ndarray]:
        zeros = np.zeros(1, np.float32)
        handle = prepare_delta(case.inputs["weight"], zeros, zeros, zeros, 1, 1, 1, 1, 1e-6, "sigmoid")
        return handle, pool_of_streams(case.inputs["before"])

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        return self.compute(implementation, case, state, plan, batch_of_plan(plan, len(case.rows)), None)

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        handle, pool = state
        x = given(rows_of_plan(plan, case.inputs["x"]))
        with forced_pieces(PIECES[implementation]):
            if case.inputs["dilation"] == 1:
                return {"y": causal_conv(x, handle, pool, batch, journal)}
            return {"y": convolve(x, given(handle.conv_weight), case.inputs["dilation"], pool, batch, journal)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"rows": state[1]}

    def reference(self, case: Case) -> Outputs:
        return {"y": self._convolved(case, case.inputs["x"], case.inputs["before"], case.inputs["weight"])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """The chain's roundings against the sum of absolute products, through silu, whose slope is at most 1.1."""
        x, before = ([np.abs(rows) for rows in case.inputs[name]] for name in ("x", "before"))
        total = self._convolved(case, x, before, np.abs(case.inputs["weight"]))
        taps = case.inputs["weight"].shape[1]
        return {"y": (1.1 * total + 1) * taps * UNIT + np.abs(reference["y"]) * 8 * UNIT}

    def states(self, case: Case) -> np.ndarray:
        pairs = zip(case.inputs["before"], case.inputs["x"], strict=True)
        return np.concatenate([last_rows(before, x) for before, x in pairs]).astype(np.float64)

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        return np.zeros(())

    def limits(self) -> list[str]:
        return ["products above float32's range become infinite"]

    def _convolved(self, case: Case, x: Sequence[np.ndarray], before: Sequence[np.ndarray], weight) -> np.ndarray:
        pairs = zip(x, before, strict=True)
        return np.concatenate([reference.causal_conv(x, weight, rows, case.inputs["dilation"]) for x, rows in pairs])


class DeltaRule:
    """The recurrence over streams of several lengths, from states that are not empty."""

    name = "delta_rule"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = ((1, 2, 32, 32), (2, 4, 8, 40), (1, 3, 16, 8)) + (((2, 6, 128, 128),) if full else ())
        for number, (key_heads, value_heads, key_dim, value_dim) in enumerate(shapes):
            channels = 2 * key_heads * key_dim + value_heads * value_dim
            largest, streams = (3.0, 1e15)[number % 2], stream_lengths(number, full)
            inputs = {
                "qkv": streams_of_kinds(rng, streams, channels, largest=largest),
                "a": streams_of_kinds(rng, streams, value_heads, largest=30),
                "b": streams_of_kinds(rng, streams, value_heads, largest=30),
                "state": rng.standard_normal((len(streams), value_heads, key_dim, value_dim)).astype(np.float32),
                "a_log": rng.uniform(-4, 2, value_heads).astype(np.float32),
                "dt_bias": rng.standard_normal(value_heads).astype(np.float32),
                "key_heads": key_heads,
            }
            label = f"{key_heads} key heads of {key_dim}, {value_heads} value heads of {value_dim}, up to {largest}"
            yield Case(label, streams, inputs)

    def begin(self, case: Case) -> Any:
        value_heads, key_dim, value_dim = case.inputs["state"].shape[1:]
        key_heads = case.inputs["key_heads"]
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        handle = prepare_delta(
            np.zeros((channels, 4), np.float32),
            case.inputs["a_log"],
            case.inputs["dt_bias"],
            np.ones(value_dim, np.float32),
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            1e-6,
            "sigmoid",
        )
        return handle, pool_of_streams(list(case.inputs["state"]))

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        return self.compute(implementation, case, state, plan, batch_of_plan(plan, len(case.rows)), None)

    def compute(
        self, implementation: str, case: Case, state: Any, plan: Sequence[Span], batch: Batch, journal: Any
    ) -> Outputs:
        handle, pool = state
        qkv, a, b = (given(rows_of_plan(plan, case.inputs[name])) for name in ("qkv", "a", "b"))
        with forced_pieces(PIECES[implementation]):
            return {"o": delta_rule(qkv, a, b, handle, pool, batch, journal)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {"recurrent": state[1]}

    def reference(self, case: Case) -> Outputs:
        states = case.inputs["state"]
        return {"o": np.concatenate([self._run(case, i, 0, rows, states[i])[0] for i, rows in enumerate(case.rows)])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        """A row's step never stretches a state column, so its errors decay with it and add up; |q| = 1/sqrt(dk)."""
        states, errors = self._states(case)
        key_dim, rounding = states.shape[2], self._rounding(case)
        read = (errors + np.linalg.norm(states, axis=2) * rounding) / np.sqrt(key_dim)
        return {"o": read.reshape(len(errors), -1) + SMALLEST}

    def states(self, case: Case) -> np.ndarray:
        return self._states(case)[0]

    def states_limit(self, case: Case, states: np.ndarray) -> np.ndarray:
        return self._states(case)[1][:, :, None, :] + SMALLEST

    def limits(self) -> list[str]:
        return ["key and value dims that are no multiple of 8; values above 1e15, whose squares overflow"]

    def _run(self, case: Case, stream: int, first: int, last: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        qkv, a, b = (case.inputs[name][stream][first:last] for name in ("qkv", "a", "b"))
        a_log, dt_bias, key_heads = (case.inputs[name] for name in ("a_log", "dt_bias", "key_heads"))
        return reference.delta_rule(qkv, a, b, a_log, dt_bias, state, key_heads)

    def _rounding(self, case: Case) -> float:
        """The relative error of one row's step."""
        return (case.inputs["state"].shape[2] / 4 + 16) * UNIT

    def _states(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """The state after every row [rows, Hv, dk, dv], and a bound of the error of its columns' length."""
        return case.once("states", lambda: self._all_states(case))

    def _all_states(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        pairs = [pair for stream in range(len(case.rows)) for pair in self._states_of_stream(case, stream)]
        return np.array([state for state, _ in pairs]), np.array([error for _, error in pairs])

    def _states_of_stream(self, case: Case, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """After each row the state [Hv, dk, dv] and a bound of the error of its columns' length [Hv, dv]."""
        state = case.inputs["state"][stream].astype(np.float64)
        value_heads, _, value_dim = state.shape
        error = np.zeros((value_heads, value_dim))
        for row in range(case.rows[stream]):
            value = np.abs(case.inputs["qkv"][stream][row, -value_heads * value_dim :].astype(np.float64))
            size = np.linalg.norm(state, axis=1) + value.reshape(error.shape)
            _, state = self._run(case, stream, row, row + 1, state)
            error = error * self._decay(case, stream, row)[:, None] + size * self._rounding(case)
            yield state, error

    def _decay(self, case: Case, stream: int, row: int) -> np.ndarray:
        a_log, dt_bias = (case.inputs[name].astype(np.float64) for name in ("a_log", "dt_bias"))
        return np.exp(-np.exp(a_log) * np.logaddexp(0, case.inputs["a"][stream][row] + dt_bias))


class GatedNorm:
    """The norm of each head with both gates."""

    name = "gated_norm"
    implementations = tuple(PIECES)

    def cases(self, rng: np.random.Generator, full: bool) -> Iterator[Case]:
        shapes = ((2, 32, "sigmoid"), (3, 40, "silu"), (1, 8, "sigmoid")) + (((48, 128, "silu"),) if full else ())
        for heads, width, gate in shapes:
            inputs = {
                "x": rows_of_kinds(rng, 24, heads * width),
                "z": rows_of_kinds(rng, 24, heads * width, largest=100)[rng.permutation(24)],
                "weight": rng.standard_normal(width).astype(np.float32),
                "gate": gate,
            }
            yield Case(f"{heads} heads of {width}, {gate}", (1,) * 24, inputs)

    def begin(self, case: Case) -> Delta:
        weight, zeros = case.inputs["weight"], np.zeros(1, np.float32)
        width = len(weight)
        return prepare_delta(
            np.zeros((3 * width, 4), np.float32), zeros, zeros, weight, 1, 1, width, width, 1e-6, case.inputs["gate"]
        )

    def call(self, implementation: str, case: Case, state: Any, plan: Sequence[Span]) -> Outputs:
        rows = stream_of_row(plan)
        with forced_pieces(PIECES[implementation]):
            return {"y": gated_norm(given(case.inputs["x"][rows]), given(case.inputs["z"][rows]), state)}

    def final_state(self, case: Case, state: Any) -> Outputs:
        return {}

    def reference(self, case: Case) -> Outputs:
        inputs = case.inputs
        return {"y": reference.gated_norm(inputs["x"], inputs["z"], inputs["weight"], 1e-6, inputs["gate"])}

    def error_limit(self, case: Case, reference: Outputs) -> Outputs:
        width = len(case.inputs["weight"])
        return {"y": np.abs(reference["y"]) * (width / 32 + 20) * UNIT + 1e-44}

    def limits(self) -> list[str]:
        return ["heads whose sum of squares is above float32's range (|x| from about 1e17 on) come out as zero"]


register(CausalConv())
register(JournaledOp(CausalConv()))
register(DeltaRule())
register(JournaledOp(DeltaRule()))
register(GatedNorm())
