"""The blocks of Flash Next as compositions of ops. No block does arithmetic: it passes opaque arrays on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isobit.model.state import StatePool
from isobit.model.trace import Trace
from isobit.ops.batch import Array, Batch, Selection
from isobit.ops.passes import PassInputs

Handle = Any  # what an op's prepare function returned
Unwritten = tuple[Array, Array]  # the injection [R, S] and output [R, H] of a block, not yet written to the streams


@dataclass(frozen=True)
class Pass:
    """What all blocks of one forward share."""

    ops: Any
    state: StatePool
    batch: Batch
    inputs: PassInputs
    trace: Trace | None = None
    begun: dict[str, Callable[[], Any]] = field(default_factory=dict)  # what runs ahead of its block, by its name

    def journal(self, name: str) -> Array | None:
        """The journal of the recurrent pool `name`, None when this forward journals nothing."""
        return self.state.journals[name] if self.batch.journal_rows else None


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule. State: `<name>.conv` and `<name>.recurrent`."""

    name: str
    in_qkv: Handle
    in_z: Handle
    in_a: Handle
    in_b: Handle
    delta: Handle
    out: Handle

    def __call__(self, run: Pass, x: Array) -> Array:
        """[R, H] -> [R, H]."""
        ops, pools = run.ops, run.state.recurrent
        conv, recurrent = f"{self.name}.conv", f"{self.name}.recurrent"
        qkv, z, a, b = ops.linears(x, (self.in_qkv, self.in_z, self.in_a, self.in_b))
        qkv = ops.causal_conv(qkv, self.delta, pools[conv], run.batch, run.journal(conv))
        mixed = ops.delta_rule(qkv, a, b, self.delta, pools[recurrent], run.batch, run.journal(recurrent))
        return ops.linear(ops.gated_norm(mixed, z, self.delta), self.out)


@dataclass(frozen=True)
class SparseAttention:
    """Attention over the indexer's best blocks. State: the cache `<name>`."""

    name: str
    q: Handle
    k: Handle
    v: Handle
    index_qk: Handle
    index_split: int
    attention: Handle
    out: Handle

    def __call__(self, run: Pass, x: Array) -> Array:
        """[R, H] -> [R, H]."""
        ops, cache = run.ops, run.state.caches[self.name]
        selection = ops.passes.beside(partial(self._select, run, x))
        q = ops.linear(x, self.q)
        return ops.linear(ops.attention_read(q, selection(), self.attention, cache, run.batch), self.out)

    def _select(self, run: Pass, x: Array) -> Selection:
        """Write the rows of x [R, H] to the cache; returns what each of them reads."""
        cache, index_q = run.state.caches[self.name], self.write(run, x)
        keep_scores = run.trace is not None
        selection = run.ops.attention_select(index_q, self.attention, cache, run.batch, keep_scores=keep_scores)
        if run.trace is not None:
            record = run.trace.layer(self.name)
            record.blocks, record.block_counts = selection.blocks, selection.counts
            record.block_scores = selection.scores
        return selection

    def write(self, run: Pass, x: Array) -> Array:
        """Write the keys and values of x [R, H] to the cache; returns the indexer's queries."""
        index_qk, k, v = run.ops.linears(x, (self.index_qk, self.k, self.v))
        index_q, index_k = run.ops.split_columns(index_qk, self.index_split)
        run.ops.attention_write(k, v, index_k, self.attention, run.state.caches[self.name], run.batch)
        return index_q


@dataclass(frozen=True)
class Experts:
    """The routed experts and the shared one."""

    name: str
    router: Handle
    experts: Handle
    chosen: int
    renormalise: bool

    def __call__(self, run: Pass, x: Array) -> Array:
        """[R, H] -> [R, H]."""
        ops = run.ops
        logits = ops.linear(x, self.router)
        ids, weights = ops.route(logits, self.chosen, self.renormalise)
        if run.trace is not None:
            record = run.trace.layer(self.name)
            record.router_logits, record.router_ids = logits, ids
        return ops.experts(x, ids, weights, self.experts)


@dataclass(frozen=True)
class NgramInjection:
    """The n-gram embedding (PLE), added to the streams. State: `<name>.history` and `<name>.ngram_conv`."""

    name: str
    table: Any
    end_token: int
    key: Handle
    value: Handle
    ple: Handle

    @property
    def input_name(self) -> str:
        """The name of what `fetch` gives among a forward's inputs."""
        return f"{self.name}.ngram"

    @property
    def history(self) -> str:
        """The name of the recurrent pool that `fetch` moves on."""
        return f"{self.name}.history"

    def fetch(self, ops: Any, state: StatePool, batch: Batch, tokens: Array) -> Array:
        """The table's rows for the tokens, as stored; the history moves on."""
        journal = state.journals[self.history] if batch.journal_rows else None
        ids = ops.ngram_ids(tokens, state.recurrent[self.history], self.table, self.end_token, batch, journal)
        return ops.ngram_fetch(ids, self.table)

    def begin(self, run: Pass) -> None:
        """Compute ahead what no stream goes into, unless the rows are only fetched when they are needed."""
        if not callable(run.inputs.arrays[self.input_name]):
            run.begun[self.input_name] = run.ops.passes.beside(partial(self._key_and_value, run))

    def _key_and_value(self, run: Pass) -> tuple[Array, Array]:
        """[R, S*H] and [R, H]."""
        rows = run.ops.ngram_decode(run.inputs.array(self.input_name), self.table)
        return run.ops.linear(rows, self.key), run.ops.linear(rows, self.value)

    def __call__(self, run: Pass, streams: Array) -> None:
        """Adds to streams [R, S, H] in place."""
        ops, pools = run.ops, run.state.recurrent
        conv = f"{self.name}.ngram_conv"
        begun = run.begun.get(self.input_name)
        key, value = self._key_and_value(run) if begun is None else begun()
        ops.ple_inject(streams, key, value, self.ple, pools[conv], run.batch, run.journal(conv))


@dataclass(frozen=True)
class Layer:
    """A decoder layer: [n-gram injection], DeltaNet or attention, and experts, both between a gated read and write."""

    name: str
    ngram: NgramInjection | None
    mixer_site: Handle
    mixer: GatedDeltaNet | SparseAttention
    experts_site: Handle
    experts: Experts

    def __call__(self, run: Pass, streams: Array, unwritten: Unwritten | None) -> Unwritten:
        """Updates streams [R, S, H] in place, after what is yet to be written to them; returns what then is."""
        ops = run.ops
        if self.ngram is not None:
            if unwritten is not None:
                ops.gated_write(streams, *unwritten)
                unwritten = None
            self.ngram(run, streams)
        for site, block in ((self.mixer_site, self.mixer), (self.experts_site, self.experts)):
            if unwritten is None:
                x, injection = ops.gated_read(streams, site)
            else:
                x, injection = ops.gated_write_read(streams, *unwritten, site)
            unwritten = injection, block(run, x)
        assert unwritten is not None
        return unwritten
