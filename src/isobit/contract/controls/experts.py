"""Defects of the mixture of experts: the router's choice, the order and the shards of the sum."""

from dataclasses import replace

import numpy as np

from isobit.checkpoint.weights import Linear, PlainLinear
from isobit.contract.controls.planted import (
    Call,
    as_halves,
    plant,
    run_and_lend,
    unwritten,
    with_weightless_neighbours,
)
from isobit.ops.contract import Outputs

MANY = 8
BLOCK = 128


def chosen_backwards(call: Call) -> Outputs:
    """The router sees the experts from the last to the first: sums and ties in the other order."""
    logits = call.case.inputs["logits"]
    outputs = call.replay("backwards", logits=np.ascontiguousarray(logits[:, ::-1]))
    ids = logits.shape[1] - 1 - outputs["ids"][:, ::-1]
    return {"ids": np.ascontiguousarray(ids), "weights": np.ascontiguousarray(outputs["weights"][:, ::-1])}


def summed_backwards(call: Call) -> Outputs:
    """The experts, and with them the shards, are summed from the last id to the first."""
    inputs = call.case.inputs
    host = inputs["host"]
    turned = replace(host, **{name: getattr(host, name)[::-1] for name in ("gate", "up", "down")})
    ids = np.ascontiguousarray(len(host.gate) - 1 - inputs["ids"][:, ::-1])
    weights = np.ascontiguousarray(inputs["weights"][:, ::-1])
    return call.replay("backwards", host=turned, ids=ids, weights=weights)


def summed_in_float32(call: Call, step: int = 1) -> Outputs:
    """The terms are added in float32, in ascending id (step 1) or in descending id (step -1), the shared one last."""
    inputs = call.case.inputs
    host, weights = inputs["host"], inputs["weights"]
    shared = call.replay("shared alone", weights=np.zeros_like(weights))["y"]
    routed_only = replace(host, shared=(*host.shared[:2], zeroed(host.shared[2])))
    total = np.zeros_like(shared)
    for choice in range(weights.shape[1])[::step]:
        one = np.zeros_like(weights)
        one[:, choice] = weights[:, choice]
        total = total + call.replay(f"choice {choice}", weights=one, host=routed_only)["y"]
    return {"y": total + shared}


def zeroed(weights: Linear) -> Linear:
    """A layer that gives zeros."""
    if isinstance(weights, PlainLinear):
        bias = None if weights.bias is None else np.zeros_like(weights.bias)
        return replace(weights, weight=np.zeros_like(weights.weight), bias=bias)
    return replace(weights, svh=np.zeros_like(weights.svh), bias=None)


def without_shared(call: Call) -> Outputs:
    """The routed experts alone."""
    host = call.case.inputs["host"]
    return call.replay(host=replace(host, shared=(*host.shared[:2], zeroed(host.shared[2]))))


@plant("route", "reference", "ties go to the higher id")
def ties_to_the_higher(call: Call) -> Outputs:
    return chosen_backwards(call)


@plant("route", "reference", "the weights are renormalised only when they should not be")
def other_renormalisation(call: Call) -> Outputs:
    return call.replay(renormalise=not call.case.inputs["renormalise"])


@plant("route", "reference", "ids come by descending weight")
def ids_by_weight(call: Call) -> Outputs:
    outputs = call.run()
    order = np.argsort(-outputs["weights"], axis=1, kind="stable")
    return {name: np.take_along_axis(values, order, axis=1) for name, values in outputs.items()}


@plant("experts", "reference", "the shared expert is left out")
def no_shared_expert(call: Call) -> Outputs:
    return without_shared(call)


@plant("experts", "reference", "gate and up are exchanged")
def gate_and_up_exchanged(call: Call) -> Outputs:
    host = call.case.inputs["host"]
    return call.replay(host=replace(host, gate=host.up, up=host.gate))


@plant("experts", "reference", "all experts weigh the same")
def no_weights(call: Call) -> Outputs:
    return call.replay(weights=np.ones_like(call.case.inputs["weights"]))


@plant("route", "rows", "batches of at least 8 rows break ties to the higher id")
def ties_by_row_count(call: Call) -> Outputs:
    return chosen_backwards(call) if call.rows >= MANY else call.run()


@plant("route", "rows", "all rows of a batch are sent to the experts of its first row")
def experts_of_the_first_row(call: Call) -> Outputs:
    outputs = call.run()
    outputs["ids"][:] = outputs["ids"][:1]
    return outputs


@plant("experts", "rows", "more than one row sum the experts in float32")
def order_by_row_count(call: Call) -> Outputs:
    return call.run() if call.rows == 1 else summed_in_float32(call)


@plant("experts", "rows", "an expert's second row gets its first row's weight")
def weight_of_the_first_row(call: Call) -> Outputs:
    inputs = call.case.inputs
    weights = inputs["weights"].copy()
    first_rows: dict[int, int] = {}
    for row in call.streams:
        first = first_rows.setdefault(int(inputs["ids"][row, 0]), int(row))
        weights[row, 0] = inputs["weights"][first, 0]
    return call.instead(weights=weights)


@plant("experts", "rows", "the row before has a part in a row, of weight zero")
def weightless_neighbour(call: Call) -> Outputs:
    return {"y": with_weightless_neighbours(call.run()["y"])}


@plant("route", "replaces", "probabilities are summed from the last expert to the first")
def summed_from_the_last(call: Call) -> Outputs:
    return chosen_backwards(call)


@plant("route", "replaces", "weights are rounded to half")
def half_weights(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "weights": as_halves(outputs["weights"])}


@plant("experts", "replaces", "the experts are summed from the last id to the first")
def experts_backwards(call: Call) -> Outputs:
    return summed_backwards(call)


@plant("experts", "replaces", "the experts are summed in float32")
def experts_in_float32(call: Call) -> Outputs:
    return summed_in_float32(call)


@plant("experts", "replaces", "the routed sum is rounded before the shared expert is added")
def rounded_before_shared(call: Call) -> Outputs:
    routed = without_shared(call)["y"]
    shared = call.replay("shared alone", weights=np.zeros_like(call.case.inputs["weights"]))["y"]
    return {"y": routed + shared}


@plant("experts", "replaces", "the output is rounded to half on its way")
def half_output(call: Call) -> Outputs:
    return {"y": as_halves(call.run()["y"])}


@plant("route", "hygiene", "the last chosen weight is not written")
def last_weight_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "weights": unwritten(outputs["weights"], ..., -1)}


@plant("route", "hygiene", "logits become probabilities in place")
def logits_in_place(call: Call) -> Outputs:
    outputs, (logits,) = run_and_lend(call)
    logits[...] = 0.5
    return outputs


@plant("experts", "hygiene", "experts add to the output in whichever order they end")
def unordered_experts(call: Call) -> Outputs:
    return call.run() if call.number % 2 else summed_in_float32(call, -1)


@plant("experts", "hygiene", "columns past the last whole block of 128 are not written")
def last_columns_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, ..., slice((y.shape[1] - 1) // BLOCK * BLOCK, None))}


@plant("experts", "hygiene", "weights are added up in place")
def weights_in_place(call: Call) -> Outputs:
    outputs, (_, _, weights) = run_and_lend(call)
    weights += 1
    return outputs
