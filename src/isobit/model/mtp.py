"""The MTP head: one more sparse attention layer that reads the trunk's streams and proposes the token after the next.

Row i pairs the trunk's streams of row i with token i+1, at position i. Its keys and values are a function of accepted
tokens and trunk streams alone: every forward writes them anew from the trunk, over whatever a draft left there.
"""

from dataclasses import dataclass, replace

import numpy as np

from isobit.model.blocks import Handle, Layer, Pass, SparseAttention
from isobit.model.state import Stream, page_table
from isobit.ops.batch import Array, Batch

MTP = "mtp"  # the batch of the head's rows that a forward's tokens complete, where there are any
MTP_ROWS = "mtp_rows"  # which of the forward's rows they come from, unless from all


@dataclass(frozen=True)
class MtpHead:
    """State: the cache `mtp`, and `mtp.streams`, the trunk's streams of each stream's last row."""

    norm_embedding: Array
    norm_hidden: Array
    fc_embedding: Handle
    fc_hidden: Handle
    eps: float
    layer: Layer
    mixer: Handle

    def follow(self, run: Pass, streams: Array, embedded: Array) -> None:
        """Write the keys and values of the rows that this forward's tokens complete.

        streams: [R, S, H], the trunk's after its last layer; embedded: [R, H], the tokens' embeddings.
        """
        last = run.state.recurrent["mtp.streams"]
        previous = run.ops.shift_rows(streams, last, run.batch, run.journal("mtp.streams"))
        batch, rows = run.inputs.batches.get(MTP), run.inputs.arrays.get(MTP_ROWS)
        if batch is None:
            return
        if rows is not None:
            previous, embedded = run.ops.take_rows(previous, rows), run.ops.take_rows(embedded, rows)
        combined = self.combine(run, previous, embedded)
        x, _ = run.ops.gated_read(combined, self.layer.mixer_site)
        assert isinstance(self.layer.mixer, SparseAttention)
        self.layer.mixer.write(replace(run, batch=batch, trace=None), x)

    def combine(self, run: Pass, streams: Array, embedded: Array) -> Array:
        """The head's input streams: fc_hidden of each normed stream, plus fc_embedding of the normed token. [R, S, H].

        One RMS covers all streams of a row.
        """
        ops = run.ops
        rows, count, hidden = streams.shape
        normed = ops.norm(streams.reshape(rows, count * hidden), self.norm_hidden, self.eps)
        combined = ops.linear(normed.reshape(rows * count, hidden), self.fc_hidden).reshape(rows, count, hidden)
        ops.add_streams(combined, ops.linear(ops.norm(embedded, self.norm_embedding, self.eps), self.fc_embedding))
        return combined

    def propose(self, run: Pass, streams: Array, embedded: Array) -> Array:
        """One draft row a stream: the head's output streams [R, S, H]; collapse them with `mixer` for logits.

        streams: the trunk's last row, or this function's last result; embedded: the token that follows it. Writes the
        draft's keys and values at the batch's positions, which the next forward writes over.
        """
        combined = self.combine(run, streams, embedded)
        run.ops.gated_write(combined, *self.layer(run, combined, None))
        return combined


def completed_rows(batch: Batch) -> tuple[Batch | None, np.ndarray]:
    """The head's rows that a forward's tokens complete, and which of the forward's rows they come from.

    A segment at positions p.. completes the head's rows p-1..; position 0 completes none.
    """
    if all(batch.first.tolist()):
        return Batch(batch.slots, batch.starts, batch.first - 1, batch.pages), np.arange(batch.rows)
    keep = np.flatnonzero(batch.positions > 0)
    if not len(keep):
        return None, keep
    counts = np.bincount(batch.segment_of_row[keep], minlength=batch.segments)
    segments = np.flatnonzero(counts)
    starts = np.concatenate([[0], np.cumsum(counts[segments])]).astype(np.int32)
    first = np.maximum(batch.first[segments] - 1, 0).astype(np.int32)
    return Batch(batch.slots[segments], starts, first, np.ascontiguousarray(batch.pages[segments])), keep


def draft_batch(streams: list[Stream], depth: int) -> Batch:
    """The batch of one draft row a stream; depth 0 pairs the trunk's last row with the token just drawn."""
    return Batch(
        slots=np.array([stream.slot for stream in streams], dtype=np.int32),
        starts=np.arange(len(streams) + 1, dtype=np.int32),
        first=np.array([stream.rows - 1 + depth for stream in streams], dtype=np.int32),
        pages=page_table(streams),
    )
