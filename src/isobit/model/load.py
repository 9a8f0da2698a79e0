"""From a checkpoint to a model on a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.reader import Checkpoint
from isobit.model.blocks import Experts, GatedDeltaNet, Handle, Layer, NgramInjection, SparseAttention
from isobit.model.flash_next import FlashNext
from isobit.model.mtp import MtpHead
from isobit.model.read_ahead import LAST, ReadAhead, stored_bytes
from isobit.ops import environment
from isobit.ops.batch import Array

Progress = Callable[[int, int], None]  # bytes loaded, bytes in all

MTP_LAYER = "mtp.layers.0"


def load_model(checkpoint: Checkpoint, ops: Any, context: int, progress: Progress | None = None) -> FlashNext:
    """Prepare every weight for the device of `ops`. context: the most rows a stream may have.

    Raises CheckpointError, naming the tensor, for anything missing or malformed, and for files that are edited
    meanwhile.
    """
    config = checkpoint.config
    prefixes = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    layers = [*prefixes, *([MTP_LAYER] if config.has_mtp else [])]
    with environment.default(), ReadAhead(checkpoint, layers, copies=ops.family != "cpu") as ahead:
        model = _load(Loader(checkpoint, ops, context, ahead), Steps(checkpoint, progress))
    checkpoint.store.check_unedited()
    return model


def _load(loader: "Loader", steps: "Steps") -> FlashNext:
    checkpoint, ops, config = loader.checkpoint, loader.ops, loader.config
    layers = []
    for index in range(config.num_hidden_layers):
        layers.append(loader.layer(f"layers.{index}", f"layers.{index}", config.is_attention(index)))
        steps.done(f"layers.{index}")
    mtp = None
    if config.has_mtp:
        mtp = loader.mtp()
        steps.done("mtp")
    embedding = ops.prepare_embedding(loader.ahead.embedding())
    steps.done("embed_tokens")
    head = ops.prepare_linear(checkpoint.head())
    steps.done("lm_head")
    return FlashNext(
        ops=ops,
        config=config,
        context=loader.context,
        embedding=embedding,
        layers=tuple(layers),
        mixer=loader.gated_residual("hyper_connection_mixer"),
        head=head,
        mtp=mtp,
        files=checkpoint.store.mapped_files,
    )


def parts_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The prefixes of the tensors that are loaded, in the order that they are."""
    layers = (f"layers.{index}" for index in range(checkpoint.config.num_hidden_layers))
    return (*layers, *(["mtp"] if checkpoint.has_mtp else []), *LAST)


class Steps:
    """Tells how many bytes of a checkpoint are loaded."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None):
        self._progress = progress
        self._bytes = {part: stored_bytes(checkpoint, part) for part in parts_of(checkpoint)}
        self._loaded = 0

    def done(self, part: str) -> None:
        """A part of the checkpoint is loaded, given by the prefix of its tensors."""
        self._loaded += self._bytes[part]
        if self._progress is not None:
            self._progress(self._loaded, sum(self._bytes.values()))


@dataclass(frozen=True)
class Loader:
    """Builds the blocks of one checkpoint for one device."""

    checkpoint: Checkpoint
    ops: Any
    context: int
    ahead: ReadAhead

    @property
    def config(self) -> FlashNextConfig:
        return self.checkpoint.config

    def linear(self, name: str) -> Handle:
        return self.ops.prepare_linear(self.checkpoint.linear(name))

    def layer(self, name: str, prefix: str, attention: bool) -> Layer:
        """A decoder layer; `name` keys its state, `prefix` its tensors."""
        self.ahead.wait(prefix)
        has_ngram = self.checkpoint.has_ngram(prefix)
        return Layer(
            name=name,
            ngram=self.ngram(name, f"{prefix}.ple") if has_ngram else None,
            mixer_site=self.gated_residual(f"{prefix}.attn_hyper_connection"),
            mixer=self.attention(name, prefix) if attention else self.delta(name, prefix),
            experts_site=self.gated_residual(f"{prefix}.mlp_hyper_connection"),
            experts=self.experts(name, prefix),
        )

    def mtp(self) -> MtpHead:
        return MtpHead(
            norm_embedding=self.placed_vector("mtp.pre_fc_norm_embedding.weight"),
            norm_hidden=self.placed_vector("mtp.pre_fc_norm_hidden.weight"),
            fc_embedding=self.linear("mtp.fc_embedding"),
            fc_hidden=self.linear("mtp.fc_hidden"),
            eps=self.config.rms_norm_eps,
            layer=self.layer("mtp", MTP_LAYER, attention=True),
            mixer=self.gated_residual("mtp.hyper_connection_mixer"),
        )

    def vector(self, name: str) -> Any:
        return self.checkpoint.vector(name)

    def placed_vector(self, name: str) -> Array:
        """The vector as an array of the device, for ops that take it as it is."""
        vector = self.vector(name)
        rows = self.ops.zeros((1, *vector.shape), "float32")
        self.ops.put_rows(rows, [0], vector[None])
        return rows[0]

    def gated_residual(self, prefix: str) -> Handle:
        inject = f"{prefix}.block_inject_weight"
        return self.ops.prepare_gated_residual(
            self.vector(f"{prefix}.hc_norm.weight"),
            self.linear(f"{prefix}.input_mix_weight_down"),
            self.linear(f"{prefix}.input_mix_weight_up"),
            None if prefix.endswith("hyper_connection_mixer") else self.linear(inject),
            self.config.hc_count,
            self.config.rms_norm_eps,
        )

    def delta(self, name: str, layer: str) -> GatedDeltaNet:
        config, prefix = self.config, f"{layer}.linear_attn"
        delta = self.ops.prepare_delta(
            self.vector(f"{prefix}.conv1d.weight").reshape(config.conv_channels, config.linear_conv_kernel_dim),
            self.vector(f"{prefix}.A_log"),
            self.vector(f"{prefix}.dt_bias"),
            self.vector(f"{prefix}.norm.weight"),
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.rms_norm_eps,
            config.output_gate_type,
        )
        return GatedDeltaNet(
            name=name,
            in_qkv=self.linear(f"{prefix}.in_proj_qkv"),
            in_z=self.linear(f"{prefix}.in_proj_z"),
            in_a=self.linear(f"{prefix}.in_proj_a"),
            in_b=self.linear(f"{prefix}.in_proj_b"),
            delta=delta,
            out=self.linear(f"{prefix}.out_proj"),
        )

    def attention(self, name: str, layer: str) -> SparseAttention:
        config, prefix = self.config, f"{layer}.self_attn"
        attention = self.ops.prepare_attention(
            self.vector(f"{prefix}.q_norm.weight"),
            self.vector(f"{prefix}.k_norm.weight"),
            self.vector(f"{prefix}.indexer.q_layernorm.weight"),
            self.vector(f"{prefix}.indexer.k_layernorm.weight"),
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.indexer_n_heads,
            config.indexer_head_dim,
            config.indexer_budget,
            config.indexer_compress_ratio,
            config.rotary_dim,
            config.rope_theta,
            self.context,
            config.rms_norm_eps,
        )
        return SparseAttention(
            name=name,
            q=self.linear(f"{prefix}.q_proj"),
            k=self.linear(f"{prefix}.k_proj"),
            v=self.linear(f"{prefix}.v_proj"),
            index_qk=self.linear(f"{prefix}.indexer.index_qk_proj"),
            index_split=config.indexer_n_heads * config.indexer_head_dim,
            attention=attention,
            out=self.linear(f"{prefix}.o_proj"),
        )

    def experts(self, name: str, layer: str) -> Experts:
        config, checkpoint, prefix = self.config, self.checkpoint, f"{layer}.mlp"
        routed = self.ahead.experts(layer)
        experts = self.ops.prepare_experts(
            routed.gate,
            routed.up,
            routed.down,
            checkpoint.linear(f"{prefix}.shared_expert.gate_proj"),
            checkpoint.linear(f"{prefix}.shared_expert.up_proj"),
            checkpoint.linear(f"{prefix}.shared_expert.down_proj"),
            checkpoint.linear(f"{prefix}.shared_expert_gate"),
        )
        router = self.linear(f"{prefix}.gate")
        return Experts(name, router, experts, config.num_experts_per_tok, config.norm_topk_prob)

    def ngram(self, name: str, prefix: str) -> NgramInjection:
        config = self.config
        ple = self.ops.prepare_ple(
            self.vector(f"{prefix}.norm_key.weight"),
            self.vector(f"{prefix}.norm_query.weight"),
            self.vector(f"{prefix}.norm_conv.weight"),
            self.vector(f"{prefix}.conv1d.weight").reshape(config.stream_width, config.ple_conv_kernel_size),
            config.hc_count,
            config.ngram_size,
            config.rms_norm_eps,
        )
        return NgramInjection(
            name=name,
            table=self.checkpoint.ngram_table(f"{prefix}.ple_embedding.ngram_embedding"),
            end_token=config.ple_end_token,
            key=self.linear(f"{prefix}.key_proj"),
            value=self.linear(f"{prefix}.value_proj"),
            ple=ple,
        )
