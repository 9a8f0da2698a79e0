"""Qwen3.8 Flash Next: one forward for decode, draft verification and prompt segments alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.mapped import MappedFile
from isobit.model.blocks import Handle, Layer, Pass, SparseAttention
from isobit.model.mtp import MTP, MTP_ROWS, MtpHead, completed_rows
from isobit.model.plan import Plan
from isobit.model.state import StatePool, cache_pools
from isobit.model.trace import Trace
from isobit.model.undo import Undo
from isobit.ops import environment
from isobit.ops.batch import Array
from isobit.ops.passes import MOST_REPLAYED_ROWS, PassInputs
from isobit.ops.sample import Draw, Samples, packed_draws

TRUNK = "trunk"  # the batch of a forward's rows
DRAWS = "draws"  # how tokens are drawn from its logits, packed
FIRST_LAYERS = 3  # keep a device busy while the host launches the others
DECODED_PANELS = 1 << 20  # float32 values of decoded weights that the threads hold at a time


@dataclass(frozen=True)
class FlashNext:
    """The whole model on one device. `context`: the most rows a stream may have (rotary tables reach that far).

    files: those of the checkpoint whose bytes are read where they lie while it runs.
    """

    ops: Any
    config: FlashNextConfig
    context: int
    embedding: Handle
    layers: tuple[Layer, ...]
    mixer: Handle
    head: Handle
    mtp: MtpHead | None
    files: tuple[MappedFile, ...] = ()

    def check_files(self) -> None:
        """Raise CheckpointError if one of the files was edited in place."""
        for file in self.files:
            file.check()

    def forward(self, state: StatePool, plan: Plan, trace: Trace | None = None) -> Array:
        """Run the plan's rows through the model and into their streams' state.

        Returns the logits [L, vocabulary] float32 of the rows that the plan asks for, in row order. When it fails, the
        streams are what they were before; where that cannot be had it raises StateLostError.
        """
        (logits,) = self._run(state, plan, {}, trace)
        return logits

    def draw(self, state: StatePool, plan: Plan, draws: Sequence[Draw]) -> tuple[Array, Samples]:
        """`forward`, and a token drawn from each row of its logits, in one pass; one Draw a row.

        The samples are the device's: `ops.samples_to_host` waits for them. Raises ValueError unless the draws are as
        many as the rows.
        """
        if len(draws) != len(plan.logit_rows):
            raise ValueError(f"{len(draws)} draws for {len(plan.logit_rows)} rows of logits")
        logits, *samples = self._run(state, plan, {DRAWS: packed_draws(draws)}, None)
        return logits, Samples(*samples)

    def _run(self, state: StatePool, plan: Plan, arrays: dict[str, Any], trace: Trace | None) -> tuple[Array, ...]:
        """The logits and, with draws among the arrays, the arrays of the samples."""
        undo = Undo(state, [segment.stream for segment in plan.segments])
        with environment.default(), undo.on_failure():
            self.check_files()
            undo.hold(layer.ngram.history for layer in self.layers if layer.ngram is not None)
            inputs = self._inputs(state, plan, arrays)
            key = ("forward", state, state.journals_id if inputs.batches[TRUNK].journal_rows else None)
            with undo.running():
                results = self.ops.passes.run(
                    key, inputs, lambda given: self._results(state, given, trace), trace is None, undo.hold_rest
                )
                # They may have been edited while they were read.
                self.check_files()
        for segment in plan.segments:
            segment.stream.rows += len(segment.tokens)
        return results

    def _inputs(self, state: StatePool, plan: Plan, others: dict[str, Any]) -> PassInputs:
        """What the plan's forward takes from the host; `others` among it."""
        batch, tokens = state.batch(plan), plan.tokens
        batches = {TRUNK: batch}
        arrays: dict[str, Any] = {"tokens": tokens, "logit_rows": plan.logit_rows, **others}
        for layer in self.layers:
            if layer.ngram is not None:
                fetch = partial(layer.ngram.fetch, self.ops, state, batch, tokens)
                # A device computes the layers before this one meanwhile.
                arrays[layer.ngram.input_name] = fetch if batch.rows > MOST_REPLAYED_ROWS else fetch()
        if self.mtp is not None:
            completed, rows = completed_rows(batch)
            if completed is not None:
                batches[MTP] = completed
                if len(rows) < batch.rows:
                    arrays[MTP_ROWS] = rows
        return PassInputs(batches, arrays, plan.recurring)

    def _results(self, state: StatePool, inputs: PassInputs, trace: Trace | None) -> tuple[Array, ...]:
        """The logits of a forward and, if it has draws, the arrays of its samples."""
        logits = self._rows(state, inputs, trace)
        draws = inputs.arrays.get(DRAWS)
        return (logits,) if draws is None else (logits, *self.ops.sample(logits, draws).arrays)

    def _rows(self, state: StatePool, inputs: PassInputs, trace: Trace | None) -> Array:
        """All layers of a forward, and the logits that it asks for."""
        ops, logit_rows = self.ops, inputs.arrays["logit_rows"]
        run = Pass(ops, state, inputs.batches[TRUNK], inputs, trace)
        embedded = ops.embed(inputs.arrays["tokens"], self.embedding)
        streams = ops.expand_streams(embedded, self.config.hc_count)
        for layer in self.layers[:FIRST_LAYERS]:
            if layer.ngram is not None:
                layer.ngram.begin(run)
        unwritten = None
        for number, layer in enumerate(self.layers):
            if number == FIRST_LAYERS:
                ops.passes.cut()
            unwritten = layer(run, streams, unwritten)
        if unwritten is not None:
            ops.gated_write(streams, *unwritten)
        followed = ops.passes.beside(partial(self._follow, run, streams, embedded))
        logits = self._wanted_logits(streams, logit_rows)
        followed()
        return logits

    def _follow(self, run: Pass, streams: Array, embedded: Array) -> None:
        """What the MTP head, if there is one, keeps of a forward's rows: streams [R, S, H], embedded [R, H]."""
        if self.mtp is not None:
            self.mtp.follow(run, streams, embedded)

    def _wanted_logits(self, streams: Array, rows: Array) -> Array:
        """The logits of some rows of streams [R, S, H], ascending: [len(rows), vocabulary]."""
        if not len(rows):
            return self.ops.zeros((0, self.config.vocab_size), "float32")
        return self.logits(streams if len(rows) == len(streams) else self.ops.take_rows(streams, rows), self.mixer)

    def logits(self, streams: Array, mixer: Handle) -> Array:
        """Collapse streams [L, S, H] and apply the head: [L, vocabulary]."""
        collapsed, _ = self.ops.gated_read(streams, mixer)
        return self.ops.linear(collapsed, self.head)

    def new_state(self, slots: int, pages: int) -> StatePool:
        """Pools for `slots` streams and `pages` key-value pages."""
        shapes = self.recurrent_shapes()
        recurrent = {name: self.ops.zeros((slots, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        initial = {name: self.config.ple_end_token for name in shapes if name.endswith(".history")}
        caches = {name: self.ops.attention_cache(handle, pages) for name, handle in self._attention_handles().items()}
        block = self.config.indexer_compress_ratio
        return StatePool(self.ops, recurrent, initial, caches, block, slots, pages)

    def recurrent_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and dtype of each recurrent pool's one slot."""
        config = self.config
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        stream_shape = (config.hc_count, config.hidden_size)
        for layer in self.layers:
            if not isinstance(layer.mixer, SparseAttention):
                heads, key, value = (
                    config.linear_num_value_heads,
                    config.linear_key_head_dim,
                    config.linear_value_head_dim,
                )
                taps = config.linear_conv_kernel_dim
                shapes[f"{layer.name}.conv"] = ((taps - 1, config.conv_channels), "float32")
                shapes[f"{layer.name}.recurrent"] = ((heads, key, value), "float32")
            if layer.ngram is not None:
                rows = (config.ple_conv_kernel_size - 1) * config.ngram_size
                shapes[f"{layer.name}.history"] = ((config.ngram_size - 1,), "int32")
                shapes[f"{layer.name}.ngram_conv"] = ((rows, config.hc_count * config.hidden_size), "float32")
        if self.mtp is not None:
            shapes["mtp.streams"] = (stream_shape, "float32")
        return shapes

    def slot_bytes(self) -> int:
        """Bytes of one stream's recurrent state, and of its copy."""
        return 2 * self.journal_bytes(1)

    def page_bytes(self) -> int:
        """Bytes of one key-value page in all layers."""
        one_page = [self.ops.attention_cache(handle, 1) for handle in self._attention_handles().values()]
        return sum(pool.nbytes for cache in one_page for pool in cache_pools(cache))

    def journal_bytes(self, rows: int) -> int:
        """Bytes of the journals of `rows` journaled rows: verifying d drafts of a stream journals d rows."""
        shapes = self.recurrent_shapes().values()
        return rows * sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)

    def replay_bytes(self) -> int:
        """Bytes of buffers that are kept between forwards, to replay small ones."""
        return getattr(self.ops.passes, "nbytes", 0)

    def workspace_bytes(self, rows: int) -> int:
        """The most bytes of temporary arrays that a forward of `rows` rows needs: an upper estimate from the widths."""
        config = self.config
        streams = config.hc_count * config.hidden_size
        value_width = config.linear_num_value_heads * config.linear_value_head_dim
        attention_width = config.num_attention_heads * config.head_dim
        expert_width = config.moe_intermediate_size + config.shared_expert_intermediate_size
        blocks = config.indexer_budget // config.indexer_compress_ratio
        row = max(
            3 * streams,
            2 * config.conv_channels + 4 * value_width,
            6 * attention_width + blocks,
            (config.num_experts_per_tok + 1) * (2 * config.hidden_size + 4 * expert_width) + 2 * config.num_experts,
        )
        floats = rows * (row + 3 * streams + 4 * config.hidden_size) + config.vocab_size + DECODED_PANELS
        return 4 * floats

    def _attention_handles(self) -> dict[str, Handle]:
        attention = [layer for layer in self.layers if isinstance(layer.mixer, SparseAttention)]
        if self.mtp is not None:
            attention.append(self.mtp.layer)
        return {layer.name: layer.mixer.attention for layer in attention if isinstance(layer.mixer, SparseAttention)}
