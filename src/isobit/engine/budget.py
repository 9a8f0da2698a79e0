"""Memory: how many lanes, key-value pages and buffer bytes fit within the limit."""

from dataclasses import dataclass

from isobit.engine import memory
from isobit.errors import IsobitError, counted
from isobit.model.flash_next import FlashNext
from isobit.model.state import pages_for
from isobit.settings import MOST_LANES

DRAFTED_TOKENS = 12  # of one lane in a round, each with a journaled state
SMALL_SEGMENT = 64  # rows that the buffers should have room for before another lane is worth it


@dataclass(frozen=True)
class Budget:
    """What an engine allots. lanes: state slots; pages: of the pools; drafted_tokens: of one round; others in bytes."""

    lanes: int
    pages: int
    drafted_tokens: int
    buffer_bytes: int
    cache_bytes: int


def allot(
    model: FlashNext, limit: int, loaded: int, lanes: int | None, cache_bytes: int, host_bytes: int = 0
) -> Budget:
    """Divide `limit` bytes, of which the weights take `loaded`; lanes None = as many as fit, up to MOST_LANES.

    cache_bytes: for the prompt cache. host_bytes: for the host tier below it, where it counts against the limit.

    Raises IsobitError with the numbers when one lane with the whole context does not fit.
    """
    page, slot = model.page_bytes(), model.slot_bytes()
    per_lane = slot + pages_for(model.context) * page
    left = limit - loaded - cache_bytes - host_bytes
    one_row = model.workspace_bytes(1)
    if lanes is None:
        affordable = (left - model.workspace_bytes(SMALL_SEGMENT)) // per_lane
        lanes = max(1, min(MOST_LANES, affordable))
    all_pages = lanes * pages_for(model.context)
    pages = quotient(left - lanes * slot - model.workspace_bytes(lanes), page, most=all_pages)
    buffers = left - lanes * slot - pages * page
    if pages < pages_for(model.context) or buffers < one_row:
        host_tier = f"its host tier {memory.gib(host_bytes)}, " if host_bytes else ""
        keys = pages_for(model.context) * page
        raise IsobitError(
            f"the memory limit is {memory.gib(limit)}, but process and weights take {memory.gib(loaded)}, the prompt "
            f"cache {memory.gib(cache_bytes)}, {host_tier}{counted(lanes, 'lane')} {memory.gib(lanes * slot)}, the "
            f"keys and values of {model.context} tokens {memory.gib(keys)} and one row's buffers "
            f"{memory.gib(one_row)}: raise --memory-gib, free memory, or lower --context, --parallel"
            f"{', --prompt-cache-gib or --host-cache-gib' if host_bytes else ' or --prompt-cache-gib'}"
        )
    drafted = quotient(buffers // 4, model.journal_bytes(1), most=lanes * DRAFTED_TOKENS)
    kept_pages = quotient(cache_bytes, page, most=0 if page == 0 else cache_bytes)
    return Budget(lanes, pages + kept_pages, drafted, buffers - model.journal_bytes(drafted), cache_bytes)


def quotient(total: int, size: int, most: int) -> int:
    """How many things of `size` bytes fit in `total`, at most `most`; all of them when they take nothing."""
    return most if size == 0 else min(most, total // size)
