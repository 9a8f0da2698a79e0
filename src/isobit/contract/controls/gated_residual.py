"""Defects of the gated residual streams."""

from typing import Any

import numpy as np

from isobit.contract.controls.planted import Call, overrun, plant, rebuffered, run_and_lend, unwritten
from isobit.ops.contract import Outputs


def streams_reversed(call: Call) -> Outputs:
    """The streams are normed, mixed and summed from the last to the first."""
    return call.replay("streams reversed", **mirrored(call, 0))


def hidden_reversed(call: Call) -> Outputs:
    """All sums over a stream's elements run from the last to the first."""
    outputs = call.replay("hidden reversed", **mirrored(call, 1))
    return {**outputs, "mixed": np.ascontiguousarray(outputs["mixed"][:, ::-1])}


def mirrored(call: Call, axis: int) -> dict[str, np.ndarray | None]:
    """The inputs with the order of streams (axis 0) or of the elements of each (axis 1) reversed throughout."""
    inputs = call.case.inputs
    _, count, hidden = inputs["streams"].shape

    def mirror(array: np.ndarray, before: int = 0) -> np.ndarray:
        split = array.reshape(*array.shape[:before], count, hidden, -1)
        return np.ascontiguousarray(np.flip(split, before + axis)).reshape(array.shape)

    return {
        "streams": mirror(inputs["streams"], 1),
        "norm_weight": mirror(inputs["norm_weight"]),
        "down": mirror(inputs["down"], 1),
        "up": mirror(inputs["up"]),
        "inject": None if inputs["inject"] is None else mirror(inputs["inject"], 1),
    }


def unfused(call: Call) -> Outputs:
    """The product of injection and y is rounded before it is added."""
    outputs, inputs, rows = call.run(), call.case.inputs, call.streams
    with np.errstate(all="ignore"):
        product = inputs["injection"][rows][:, :, None] * inputs["y"][rows][:, None, :]
        return {**outputs, "written": inputs["streams"][rows] + product}


def written_before(call: Call, **changes: Any) -> Outputs:
    """A write and a read of which the write is the sound one, and the read sees other writes."""
    return {**call.replay(**changes), "written": call.run()["written"]}


@plant("gated_read", "reference", "every stream is normed with the weights of the one before")
def weights_of_another_stream(call: Call) -> Outputs:
    hidden = call.case.inputs["streams"].shape[2]
    return call.replay(norm_weight=np.roll(call.case.inputs["norm_weight"], hidden))


@plant("gated_read", "reference", "the low-rank values are not divided by the number of streams")
def undivided(call: Call) -> Outputs:
    return call.replay(down=call.case.inputs["down"] * np.float32(call.case.inputs["streams"].shape[1]))


@plant("gated_write", "reference", "the last stream is not written")
def last_stream_not_written(call: Call) -> Outputs:
    outputs = call.run()
    outputs["written"][:, -1] = call.case.inputs["streams"][call.streams, -1]
    return outputs


@plant("gated_write", "reference", "the streams share one injection")
def one_injection(call: Call) -> Outputs:
    injection = call.case.inputs["injection"]
    return call.replay(injection=np.ascontiguousarray(np.repeat(injection[:, :1], injection.shape[1], axis=1)))


@plant("gated_read", "rows", "more than 8 rows sum the streams from the last to the first")
def order_by_row_count(call: Call) -> Outputs:
    return streams_reversed(call) if call.rows > 8 else call.run()


@plant("gated_read", "rows", "a row of a batch gets the mix of the row before")
def mix_of_the_row_before(call: Call) -> Outputs:
    outputs = call.run()
    outputs["mixed"][1:] = outputs["mixed"][:-1].copy()
    return outputs


@plant("gated_write", "rows", "several rows are written without the fused step")
def unfused_batches(call: Call) -> Outputs:
    return call.run() if call.rows == 1 else unfused(call)


@plant("gated_write", "rows", "an odd last row is written twice")
def last_row_twice(call: Call) -> Outputs:
    outputs = call.run()
    if call.rows > 1 and call.rows % 2:
        row = call.streams[-1]
        y = call.case.inputs["y"][row]
        with np.errstate(all="ignore"):
            outputs["written"][-1] += call.case.inputs["injection"][row][:, None] * y
    return outputs


@plant("gated_read", "replaces", "the streams are summed from the last to the first")
def reversed_order(call: Call) -> Outputs:
    return streams_reversed(call)


@plant("gated_read", "replaces", "sums over a stream run from the last element to the first")
def reversed_elements(call: Call) -> Outputs:
    return hidden_reversed(call)


@plant("gated_write", "replaces", "the product is rounded before it is added")
def unfused_write(call: Call) -> Outputs:
    return unfused(call)


@plant("gated_write", "replaces", "the sum is rounded to half on its way")
def written_as_halves(call: Call) -> Outputs:
    outputs = call.run()
    with np.errstate(over="ignore"):
        outputs["added"] = outputs["added"].astype(np.float16).astype(np.float32)
    return outputs


@plant("gated_read", "hygiene", "the last row's injection is not written")
def injection_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    if "injection" in outputs:
        outputs["injection"] = unwritten(outputs["injection"], -1)
    return outputs


@plant("gated_read", "hygiene", "the mix is written with a whole vector at the end")
def mix_overrun(call: Call) -> Outputs:
    outputs = call.run()
    outputs["mixed"] = rebuffered(outputs["mixed"])
    overrun(outputs["mixed"], 32)
    return outputs


@plant("gated_write", "hygiene", "y is multiplied by the injection in place")
def y_scaled_in_place(call: Call) -> Outputs:
    outputs, (injection, y) = run_and_lend(call)
    with np.errstate(all="ignore"):
        y *= injection[:, :1]
    return outputs


@plant("gated_write", "hygiene", "the copy into streams adds to what was there")
def accumulating_copy(call: Call) -> Outputs:
    outputs = call.run()
    buffer = unwritten(outputs["expanded"], ...)
    with np.errstate(all="ignore"):
        buffer += outputs["expanded"]
    return {**outputs, "expanded": buffer}


@plant("gated_write_read", "reference", "the read sees the streams before the write")
def read_before_write(call: Call) -> Outputs:
    return written_before(call, injection=np.zeros_like(call.case.inputs["injection"]))


@plant("gated_write_read", "reference", "the last stream is read but not written")
def last_stream_only_read(call: Call) -> Outputs:
    outputs = call.run()
    outputs["written"][:, -1] = call.case.inputs["before"][call.streams, -1]
    return outputs


@plant("gated_write_read", "rows", "a row of a batch is written with the injection of the row before")
def injection_of_the_row_before(call: Call) -> Outputs:
    if call.rows == 1:
        return call.run()
    return call.replay(injection=np.roll(call.case.inputs["injection"], 1, axis=0))


@plant("gated_write_read", "rows", "more than 8 rows are read as they were before the write")
def many_read_before_write(call: Call) -> Outputs:
    return read_before_write(call) if call.rows > 8 else call.run()


@plant("gated_write_read", "replaces", "the product of the write is rounded before it is added")
def unfused_before_read(call: Call) -> Outputs:
    outputs, inputs, rows = call.run(), call.case.inputs, call.streams
    with np.errstate(all="ignore"):
        product = inputs["injection"][rows][:, :, None] * inputs["y"][rows][:, None, :]
        return {**outputs, "written": inputs["before"][rows] + product}


@plant("gated_write_read", "replaces", "the read sums the streams from the last to the first")
def reversed_read(call: Call) -> Outputs:
    inputs = call.case.inputs
    reversed_streams = {name: np.ascontiguousarray(inputs[name][:, ::-1]) for name in ("before", "injection")}
    outputs = call.replay("streams reversed", **mirrored(call, 0), **reversed_streams)
    return {**outputs, "written": np.ascontiguousarray(outputs["written"][:, ::-1])}


@plant("gated_write_read", "hygiene", "the mix of the last row is not written")
def last_mix_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "mixed": unwritten(outputs["mixed"], -1)}


@plant("gated_write_read", "hygiene", "y is multiplied by the injection in place before the read")
def y_scaled_before_read(call: Call) -> Outputs:
    outputs, (injection, y) = run_and_lend(call)
    with np.errstate(all="ignore"):
        y *= injection[:, :1]
    return outputs
