"""A model and its state within a device's memory; where they do not fit, the numbers and what to set, in one line."""

import logging
from collections.abc import Callable
from typing import TypeVar

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import TensorInfo
from isobit.engine import memory
from isobit.engine.budget import Budget
from isobit.engine.placement import Placement
from isobit.errors import IsobitError, counted, ran_out
from isobit.model.flash_next import FlashNext
from isobit.model.load import Progress, load_model
from isobit.model.read_ahead import MAPPED
from isobit.model.state import StatePool
from isobit.ops import load_ops

HALF_BYTES = 2
WIDE = {"F32": 4, "F64": 8}  # bytes of floats that a device may hold as halves

Made = TypeVar("Made")
log = logging.getLogger(__name__)


def load_within(
    checkpoint: Checkpoint, placement: Placement, context: int, memory_gib: float | None, progress: Progress | None
) -> FlashNext:
    """The checkpoint's model on the device. Raises IsobitError where its weights do not fit, soon if that is sure."""
    warning = placement.beyond_reach(memory_gib)
    if warning is not None:
        log.warning("%s", warning)
    needed, taken, limit = least_bytes(checkpoint), placement.loaded(), placement.limit(memory_gib)
    if taken + needed > limit:
        raise IsobitError(
            f"the memory limit is {memory.gib(limit)}, but {memory.gib(taken)} are taken before the weights of "
            f"{checkpoint.folder} take at least {memory.gib(needed)} ({placement.free_text()}): raise --memory-gib, "
            f"free memory, {advice(placement)}"
        )
    ops = load_ops(placement.device)
    return _within(
        placement,
        lambda: load_model(checkpoint, ops, context, progress),
        f"the weights of {checkpoint.folder} take {memory.gib(needed)} or more: free memory, {advice(placement)}",
    )


def new_state_within(model: FlashNext, budget: Budget, placement: Placement) -> StatePool:
    """The state that the budget allots. Raises IsobitError where it cannot be had."""
    wanted = budget.lanes * model.slot_bytes() + budget.pages * model.page_bytes()
    return _within(
        placement,
        lambda: model.new_state(budget.lanes, budget.pages),
        f"{counted(budget.lanes, 'lane')} of {counted(model.context, 'token')} and the prompt cache take "
        f"{memory.gib(wanted)}: lower --memory-gib, --context, --parallel or --prompt-cache-gib",
    )


def least_bytes(checkpoint: Checkpoint) -> int:
    """The least bytes that a device holds of a checkpoint's weights, from the headers."""
    store, inside = checkpoint.store, (f"{checkpoint.prefix}layers.", "lm_head.", *(("mtp.",) * checkpoint.has_mtp))
    return sum(_least_bytes(store.info(name)) for name in store.names if name.startswith(inside) and MAPPED not in name)


def advice(placement: Placement) -> str:
    """What else helps against weights that are too large."""
    if placement.device == "cpu":
        return "or take a checkpoint of fewer bits"
    return "take a checkpoint of fewer bits, a larger GPU or --device cpu"


def _least_bytes(info: TensorInfo) -> int:
    return info.nbytes * HALF_BYTES // WIDE.get(info.dtype, HALF_BYTES)


def _within(placement: Placement, make: Callable[[], Made], explained: str) -> Made:
    try:
        return make()
    except Exception as error:
        if not ran_out(error):
            raise
        free = placement.free_text()
    raise IsobitError(f"memory ran out: {free}, but {explained}")
