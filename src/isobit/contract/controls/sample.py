"""Defects of sampling: the order of ties and filters, the key of a draw, the sums of probabilities."""

from dataclasses import replace

import numpy as np

from isobit.contract.controls.planted import Call, as_singles, last_bits_flipped, plant, run_and_lend, unwritten
from isobit.ops.contract import Outputs


def with_draws(call: Call, **changes: float) -> Outputs:
    """What the op gives with some settings changed in every draw."""
    return call.replay(draws=[replace(draw, **changes) for draw in call.case.inputs["draws"]])


def summed_backwards(call: Call, logprobs: str) -> Outputs:
    """Logprobs whose sum runs from the last id to the first."""
    logits = np.ascontiguousarray(call.case.inputs["logits"][:, ::-1])
    return {**call.run(), logprobs: call.replay("backwards", logits=logits)[logprobs]}


def finite_of(call: Call) -> np.ndarray:
    """bool [R], which rows have finite logits only."""
    return np.isfinite(call.case.inputs["logits"][call.streams]).all(axis=1)


@plant("sample", "reference", "greedy ties go to the higher id")
def greedy_takes_the_last(call: Call) -> Outputs:
    outputs = call.run()
    for place, row in enumerate(call.streams):
        logits = call.case.inputs["logits"][row]
        if call.case.inputs["draws"][row].temperature == 0 and np.isfinite(logits).all():
            outputs["token"][place] = np.flatnonzero(logits == logits.max())[-1]
    return outputs


@plant("sample", "reference", "the temperature is not applied")
def no_temperature(call: Call) -> Outputs:
    draws = [replace(draw, temperature=1.0 if draw.temperature else 0.0) for draw in call.case.inputs["draws"]]
    return call.replay(draws=draws)


@plant("sample", "reference", "draws are keyed by the seed alone")
def position_left_out(call: Call) -> Outputs:
    return with_draws(call, position=0)


@plant("top_logprobs", "reference", "ties go to the higher id")
def ties_to_the_higher(call: Call) -> Outputs:
    logits = np.ascontiguousarray(call.case.inputs["logits"][:, ::-1])
    ids = call.replay(logits=logits)["ids"]
    return {**call.run(), "ids": np.where(ids >= 0, logits.shape[1] - 1 - ids, ids)}


@plant("top_logprobs", "reference", "logprobs are relative to the best, not to the sum")
def relative_to_the_best(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "logprobs": outputs["logprobs"] - outputs["logprobs"][:, :1]}


@plant("sample", "rows", "the rows of a batch share the first row's draw")
def shared_draw(call: Call) -> Outputs:
    draws = call.case.inputs["draws"]
    return call.instead(draws=[draws[call.plan[0].stream]] * len(draws))


@plant("sample", "rows", "one row that is not finite ends its whole batch")
def batch_not_finite(call: Call) -> Outputs:
    outputs = call.run()
    if not finite_of(call).all():
        outputs["finite"][:] = False
    return outputs


@plant("top_logprobs", "rows", "batches sum from the last id to the first", of_order=True)
def backwards_in_batches(call: Call) -> Outputs:
    return call.run() if call.rows == 1 else summed_backwards(call, "logprobs")


@plant("top_logprobs", "rows", "all rows of a batch are ordered like its first")
def order_of_the_first_row(call: Call) -> Outputs:
    outputs = call.run()
    outputs["ids"][:] = outputs["ids"][:1]
    return outputs


@plant("sample", "replaces", "the probabilities are summed from the last id to the first", of_order=True)
def summed_from_the_last(call: Call) -> Outputs:
    return summed_backwards(call, "logprob")


@plant("sample", "replaces", "draws are keyed by another bit of the seed")
def neighbouring_key(call: Call) -> Outputs:
    draws = [replace(draw, seed=draw.seed ^ 1) for draw in call.case.inputs["draws"]]
    return call.replay(draws=draws)


@plant("top_logprobs", "replaces", "the probabilities are summed from the last id to the first", of_order=True)
def top_summed_from_the_last(call: Call) -> Outputs:
    return summed_backwards(call, "logprobs")


@plant("sample", "replaces", "logprobs are rounded to float32")
def single_logprob(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "logprob": as_singles(outputs["logprob"])}


@plant("top_logprobs", "rows", "batches of more than 16 rows round logprobs to float32")
def single_in_batches(call: Call) -> Outputs:
    return single_logprobs(call) if call.rows > 16 else call.run()


@plant("top_logprobs", "replaces", "logprobs are rounded to float32")
def single_logprobs(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "logprobs": as_singles(outputs["logprobs"])}


@plant("top_logprobs", "replaces", "differences to the largest logit are taken in float32")
def single_differences(call: Call) -> Outputs:
    """Logits as their differences, which are the same but for a rounding."""
    logits = call.case.inputs["logits"]
    with np.errstate(all="ignore"):
        return call.replay(logits=logits - logits.max(axis=1, keepdims=True))


@plant("sample", "hygiene", "rows that are not finite get no token")
def token_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "token": unwritten(outputs["token"], ~finite_of(call))}


@plant("sample", "hygiene", "the largest logit is subtracted in place")
def subtracted_in_place(call: Call) -> Outputs:
    outputs, (logits,) = run_and_lend(call)
    logits -= np.float32(1)
    return outputs


@plant("top_logprobs", "hygiene", "the last of the best is not written")
def last_unwritten(call: Call) -> Outputs:
    outputs = call.run()
    return {**outputs, "ids": unwritten(outputs["ids"], ..., -1)}


@plant("top_logprobs", "hygiene", "a parallel sum ends in another order from run to run")
def unstable_sum(call: Call) -> Outputs:
    outputs = call.run()
    return outputs if call.number % 2 else {**outputs, "logprobs": last_bits_flipped(outputs["logprobs"])}
