"""A batch's arrays on the device."""

from dataclasses import dataclass

import numpy as np
import torch

from isobit.cuda import memory
from isobit.ops.batch import Batch


@dataclass(frozen=True)
class PlacedBatch:
    """The arrays of a Batch as int32 tensors, all parts of `packed`, and its sizes on the host."""

    rows: int
    segments: int
    journal_rows: int
    slots: torch.Tensor
    starts: torch.Tensor
    first: torch.Tensor
    pages: torch.Tensor
    positions: torch.Tensor
    segment_of_row: torch.Tensor
    journal: torch.Tensor | None
    packed: torch.Tensor


def placed(batch: Batch) -> PlacedBatch:
    """The batch on the device; uploaded once, kept with the batch."""
    found: PlacedBatch | None = batch.__dict__.get("_placed")
    if found is None:
        found = place_at(batch, memory.to_device(packed_arrays(batch)))
    return found


def packed_arrays(batch: Batch) -> np.ndarray:
    """int32 [n]: slots, starts, first, pages, positions, segment_of_row and, if there is one, journal, end to end."""
    parts = [batch.slots, batch.starts, batch.first, batch.pages, batch.positions, batch.segment_of_row]
    if batch.journal is not None:
        parts.append(batch.journal)
    return np.concatenate([np.asarray(part, np.int32).reshape(-1) for part in parts])


def place_at(batch: Batch, packed: torch.Tensor) -> PlacedBatch:
    """Let the ops find the batch's arrays in `packed`, which holds or will hold `packed_arrays(batch)`."""
    segments, rows, width = batch.segments, batch.rows, batch.pages.shape[1]
    sizes = [segments, segments + 1, segments, segments * width, rows, rows]
    if batch.journal is not None:
        sizes.append(rows)
    slots, starts, first, pages, positions, segment_of_row, *journal = torch.split(packed, sizes)
    found = PlacedBatch(
        rows,
        segments,
        batch.journal_rows,
        slots,
        starts,
        first,
        pages.view(segments, width),
        positions,
        segment_of_row,
        journal[0] if journal else None,
        packed,
    )
    object.__setattr__(batch, "_placed", found)
    return found
