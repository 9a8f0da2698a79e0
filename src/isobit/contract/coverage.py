"""Which op functions the contract calls: seen while an op's first case runs, so that no list can claim too much."""

import sys
from types import CodeType, FrameType
from typing import Any

import numpy as np

from isobit.contract.plans import together
from isobit.ops import load_ops
from isobit.ops.contract import Op


def op_functions(device: str) -> dict[str, CodeType]:
    """The functions that the model can call, by name."""
    functions = vars(load_ops(device)).items()
    return {name: function.__code__ for name, function in functions if callable(function)}


def called_functions(op: Op, functions: dict[str, CodeType]) -> list[str]:
    """The names of the functions that run when the op's first case does, preparing included, in alphabetical order.

    All implementations are run.
    """
    case = next(iter(op.cases(np.random.default_rng(0), full=False)))
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    (plan,) = together(case)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        for implementation in op.implementations:
            op.call(implementation, case, op.begin(case), plan)
    finally:
        sys.setprofile(before)
    return sorted(name for name, code in functions.items() if code in seen)
