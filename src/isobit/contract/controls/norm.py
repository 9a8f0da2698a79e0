"""Defects of the RMS norm."""

import numpy as np

from isobit.contract.controls.planted import Call, evens_first, overrun, plant, rebuffered, unwritten
from isobit.ops.contract import Outputs
from isobit.ops.lanes import LANES


def summed_evens_first(call: Call) -> Outputs:
    """Each row's squares are summed with the even elements in the first lanes."""
    x, weight = call.case.inputs["x"], call.case.inputs["weight"]
    order, back = evens_first(x.shape[-1])
    permuted = np.ascontiguousarray(x[..., order]), weight.reshape(x.shape[1:])[:, order].ravel()
    y = call.replay("evens first", x=permuted[0], weight=permuted[1])["y"]
    return {"y": np.ascontiguousarray(y[..., back])}


@plant("norm", "reference", "eps is left out")
def no_eps(call: Call) -> Outputs:
    return call.replay(eps=0.0)


@plant("norm", "reference", "the weight multiplies as w, not as 1 + w")
def plain_weight(call: Call) -> Outputs:
    return call.replay(weight=call.case.inputs["weight"] - np.float32(1))


@plant("norm", "reference", "the mean is taken over whole vectors of 32")
def padded_mean(call: Call) -> Outputs:
    width = call.case.inputs["x"].shape[-1]
    padded = -(-width // LANES) * LANES
    return {"y": call.run()["y"] * np.float32(np.sqrt(padded / width))}


@plant("norm", "rows", "more than 8 rows are summed with the even elements in the first lanes")
def order_by_row_count(call: Call) -> Outputs:
    return summed_evens_first(call) if call.rows > 8 else call.run()


@plant("norm", "rows", "the second thread's half is summed with the even elements in the first lanes")
def order_by_thread(call: Call) -> Outputs:
    outputs, other = call.run(), summed_evens_first(call)
    half = (call.rows + 1) // 2
    return {"y": np.concatenate([outputs["y"][:half], other["y"][half:]])}


@plant("norm", "replaces", "the squares are summed with the even elements in the first lanes")
def evens_in_the_first_lanes(call: Call) -> Outputs:
    return summed_evens_first(call)


@plant("norm", "replaces", "x * inverse * (1 + w) as the sum of two products")
def weight_applied_late(call: Call) -> Outputs:
    weight = call.case.inputs["weight"]
    normed = call.replay("no weight", weight=np.zeros_like(weight))["y"]
    return {"y": normed + normed * weight.reshape(normed.shape[1:])}


@plant("norm", "hygiene", "elements past the last whole vector of 32 are not written")
def tail_unwritten(call: Call) -> Outputs:
    y = call.run()["y"]
    return {"y": unwritten(y, ..., slice(y.shape[-1] // LANES * LANES, None))}


@plant("norm", "hygiene", "a whole vector is written where the row ends within one")
def tail_overrun(call: Call) -> Outputs:
    y = rebuffered(call.run()["y"])
    overrun(y, 4 * (-y.shape[-1] % LANES))
    return {"y": y}
