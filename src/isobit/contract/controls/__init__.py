"""Defects planted to see the gates turn red. Nothing outside the contract imports this package."""

import importlib

import numpy as np

from isobit.contract.controls.generic import generic_plantings
from isobit.contract.controls.planted import plantings_of
from isobit.contract.gates import final_state, on_threads
from isobit.ops import threads
from isobit.ops.contract import Control, Op

FAMILIES = (
    "linear",
    "embedding",
    "norm",
    "gated_residual",
    "delta_rule",
    "sparse_attention",
    "experts",
    "ngram_embedding",
    "sample",
    "rows",
)


def controls_of(op: Op) -> list[Control]:
    """Every defect that can be planted into the op: those that any op can have, then those made for this one."""
    for family in FAMILIES:
        importlib.import_module(f"isobit.contract.controls.{family}")
    plantings = generic_plantings(op, has_state(op), two_threads()) + plantings_of(op)
    return [planting.control(op) for planting in plantings]


def has_state(op: Op) -> bool:
    """Whether the op's calls leave anything behind."""
    case = next(iter(op.cases(np.random.default_rng(0), full=False)))
    return bool(final_state(op, case, op.begin(case)))


def two_threads() -> bool:
    """Whether kernels can run on two threads here."""
    with on_threads(2):
        return threads() == 2
