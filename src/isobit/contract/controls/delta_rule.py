"""Defects of the Gated DeltaNet: its convolution, its recurrence, its gated norm."""

import numpy as np

from isobit.contract.controls.journal import plant_journal_defects
from isobit.contract.controls.planted import Call, as_halves, evens_first, plant, run_and_lend, unwritten
from isobit.ops.contract import Outputs

CHUNK = 8


def value_columns(call: Call) -> int:
    """How many of the channels are values; they come last."""
    heads, _, value_dim = call.case.inputs["state"].shape[1:]
    return heads * value_dim


def keys_permuted(call: Call) -> Outputs:
    """The chains over k run from the last key dimension to the first."""
    state, key_heads = call.case.inputs["state"], call.case.inputs["key_heads"]
    key_dim, values = state.shape[2], value_columns(call)

    def reverse(row: np.ndarray) -> np.ndarray:
        keys = row[:, :-values].reshape(len(row), 2 * key_heads, key_dim)[:, :, ::-1]
        return np.concatenate([keys.reshape(len(row), -1), row[:, -values:]], axis=1)

    return call.replay(
        "permuted",
        qkv=[reverse(rows) for rows in call.case.inputs["qkv"]],
        state=np.ascontiguousarray(state[:, :, ::-1]),
    )


def stale_rows(call: Call) -> Outputs:
    """A segment shorter than the taps leaves the pool's newest row as it was."""
    (pool,) = call.state_arrays().values()
    before = pool.copy()
    outputs = call.run()
    for span in call.plan:
        slot = len(call.case.rows) - span.stream
        if span.count < pool.shape[1]:
            pool[slot, -1] = before[slot, -1]
    return outputs


@plant("causal_conv", "reference", "the taps are applied newest first")
def taps_reversed(call: Call) -> Outputs:
    return call.replay(weight=np.ascontiguousarray(call.case.inputs["weight"][:, ::-1]))


@plant("causal_conv", "reference", "the oldest tap is left out")
def oldest_tap_left_out(call: Call) -> Outputs:
    weight = call.case.inputs["weight"].copy()
    weight[:, 0] = 0
    return call.replay(weight=weight)


@plant("delta_rule", "reference", "the state does not decay")
def no_decay(call: Call) -> Outputs:
    return call.replay(a_log=np.full_like(call.case.inputs["a_log"], -100))


@plant("delta_rule", "reference", "beta is always 1")
def no_beta(call: Call) -> Outputs:
    return call.replay(b=[np.full_like(b, 100) for b in call.case.inputs["b"]])


@plant("delta_rule", "reference", "the state is read before the row is written")
def read_before_write(call: Call) -> Outputs:
    b = [np.full_like(rows, -100) for rows in call.case.inputs["b"]]
    return call.replay("unwritten", b=b)


@plant("gated_norm", "reference", "the weight multiplies as 1 + w")
def one_plus_weight(call: Call) -> Outputs:
    return call.replay(weight=call.case.inputs["weight"] + np.float32(1))


@plant("gated_norm", "reference", "the other gate is taken")
def other_gate(call: Call) -> Outputs:
    return call.replay(gate="silu" if call.case.inputs["gate"] == "sigmoid" else "sigmoid")


@plant("causal_conv", "rows", "a segment of several rows starts from an empty pool")
def empty_start(call: Call) -> Outputs:
    (pool,) = call.state_arrays().values()
    for span in call.plan:
        if span.count > 1:
            pool[len(call.case.rows) - span.stream] = 0
    return call.run()


@plant("causal_conv", "rows", "a segment shorter than the taps leaves a stale row")
def stale_row(call: Call) -> Outputs:
    return stale_rows(call)


@plant("delta_rule", "rows", "the state is rounded to half between chunks of 8 rows")
def rounded_between_chunks(call: Call) -> Outputs:
    outputs = call.run()
    (pool,) = call.state_arrays().values()
    for span in call.plan:
        if span.count >= CHUNK:
            slot = len(call.case.rows) - span.stream
            pool[slot] = as_halves(pool[slot])
    return outputs


@plant("delta_rule", "rows", "segments of at least 8 rows take the chains in another order")
def order_by_segment(call: Call) -> Outputs:
    return keys_permuted(call) if max(span.count for span in call.plan) >= CHUNK else call.run()


@plant("gated_norm", "rows", "a row of a batch is gated by the row before")
def gate_of_the_row_before(call: Call) -> Outputs:
    z = call.case.inputs["z"]
    outputs, shifted = call.run(), call.replay("shifted", z=np.ascontiguousarray(np.roll(z, 1, axis=0)))
    return {"y": np.concatenate([outputs["y"][:1], shifted["y"][1:]])}


@plant("gated_norm", "rows", "batches of more than 16 rows are gated in half precision")
def half_gate_in_batches(call: Call) -> Outputs:
    outputs = call.run()
    return outputs if call.rows <= 16 else {"y": as_halves(outputs["y"])}


@plant("causal_conv", "replaces", "the sum is rounded to half before silu's last step")
def rounded_twice(call: Call) -> Outputs:
    return {"y": as_halves(call.run()["y"])}


@plant("causal_conv", "replaces", "the taps are summed newest first")
def newest_first(call: Call) -> Outputs:
    """Computed from whole windows; the sound op then only applies silu."""
    inputs, outputs = call.case.inputs, call.run()
    pre_activations = []
    for x, before in zip(inputs["x"], inputs["before"], strict=True):
        history, taps = np.concatenate([before, x]), inputs["weight"].shape[1]
        total = np.zeros_like(x)
        with np.errstate(all="ignore"):
            for tap in reversed(range(taps)):
                total += inputs["weight"][:, tap] * history[tap * inputs["dilation"] :][: len(x)]
        pre_activations.append(total)
    ones = np.ones((inputs["weight"].shape[0], 1), np.float32)
    empty = [np.zeros((0, x.shape[1]), np.float32) for x in inputs["x"]]
    activated = call.replay("activated", x=pre_activations, weight=ones, before=empty)["y"]
    return {"y": np.where(np.isfinite(activated), activated, outputs["y"])}


@plant("delta_rule", "replaces", "the chains over k run from the last dimension to the first")
def other_chain_order(call: Call) -> Outputs:
    return keys_permuted(call)


@plant("delta_rule", "replaces", "the output is rounded to half")
def half_output(call: Call) -> Outputs:
    return {"o": as_halves(call.run()["o"])}


@plant("delta_rule", "replaces", "the state is kept in half precision")
def half_state(call: Call) -> Outputs:
    outputs = call.run()
    (pool,) = call.state_arrays().values()
    pool[...] = as_halves(pool)
    return outputs


@plant("gated_norm", "replaces", "the gate is multiplied before the weight")
def gate_before_weight(call: Call) -> Outputs:
    weight = call.case.inputs["weight"]
    ungated = call.replay("unweighted", weight=np.ones_like(weight))["y"]
    with np.errstate(all="ignore"):
        return {"y": ungated * np.tile(weight, ungated.shape[1] // weight.size)}


@plant("gated_norm", "replaces", "the squares are summed with the even elements in the first lanes")
def summed_evens_first(call: Call) -> Outputs:
    inputs = call.case.inputs
    order, back = evens_first(inputs["weight"].size)

    def permuted(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows.reshape(len(rows), -1, columns.size)[:, :, columns]).reshape(rows.shape)

    x, z = (permuted(inputs[name], order) for name in ("x", "z"))
    y = call.replay("evens first", x=x, z=z, weight=inputs["weight"][order])["y"]
    return {"y": permuted(y, back)}


@plant("causal_conv", "hygiene", "columns past the last whole block of 32 are not written")
def last_columns_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, ..., slice(y.shape[1] // 32 * 32, None))}


@plant("causal_conv", "hygiene", "the chain starts from what the output held")
def accumulating_chain(call: Call) -> Outputs:
    y = call.run()["y"]
    buffer = unwritten(y, ...)
    with np.errstate(all="ignore"):
        buffer += y
    return {"y": buffer}


@plant("delta_rule", "hygiene", "one element of the slot before is written too")
def state_of_another_slot(call: Call) -> Outputs:
    outputs = call.run()
    (pool,) = call.state_arrays().values()
    for span in call.plan:
        pool[len(call.case.rows) - span.stream - 1, 0, 0, 0] += np.float32(1)
    return outputs


@plant("delta_rule", "hygiene", "q is normed in place")
def normed_in_place(call: Call) -> Outputs:
    outputs, lent = run_and_lend(call)
    lent[0][:, : call.case.inputs["state"].shape[2]] *= np.float32(0.5)
    return outputs


@plant("gated_norm", "hygiene", "the last head of the last row is not written")
def last_head_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, -1, slice(-call.case.inputs["weight"].size, None))}


@plant("gated_norm", "hygiene", "z becomes its gate in place")
def gate_in_place(call: Call) -> Outputs:
    outputs, (_, z) = run_and_lend(call)
    z[...] = np.float32(0.5)
    return outputs


plant_journal_defects("causal_conv_journal")
plant_journal_defects("delta_rule_journal")
