"""Every tensor group that a Flash Next model is made of, with its expected sizes.

Names here are *canonical*: without the prefix of the folder's text model ("layers.0.mlp.gate", not
"model.language_model.layers.0.mlp.gate"); `lm_head` and `mtp.*` stand outside that prefix. `published_name` adds the
prefix of published checkpoints, which is what isobit writes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from isobit.checkpoint.config import FlashNextConfig

PREFIXES = ("model.language_model.", "model.", "")  # of the text model, as found in folders
PUBLISHED_PREFIX = PREFIXES[0]

Kind = Literal["embedding", "linear", "vector", "ngram"]
TensorClass = Literal[
    "embedding", "delta", "attention", "mixers", "router", "experts", "shared expert", "ple", "ngram", "head", "mtp"
]
CLASSES: tuple[TensorClass, ...] = (
    "embedding",
    "delta",
    "attention",
    "mixers",
    "router",
    "experts",
    "shared expert",
    "ple",
    "ngram",
    "head",
    "mtp",
)


@dataclass(frozen=True)
class TensorGroup:
    """One thing the model needs, stored as one tensor or several under one name.

    name: canonical. kind "linear": in_features, out_features, `bias` when the config demands one; `quantizable` says
    whether EXL3 folders may hold it as a trellis (all others are always plain). kind "vector": one tensor
    name + suffix of `shape` as Hugging Face stores it. kind "embedding": [out_features, in_features] = [vocabulary,
    hidden]. kind "ngram": heads of `in_features` values, as many rows as the checkpoint's own sizes say.
    """

    name: str
    kind: Kind
    tensor_class: TensorClass
    in_features: int = 0
    out_features: int = 0
    quantizable: bool = False
    bias: bool = False
    shape: tuple[int, ...] = ()
    suffix: str = ".weight"

    @property
    def tensor(self) -> str:
        """The canonical name of the plain tensor: of a vector, or of an unquantized weight."""
        return self.name + self.suffix


def required_tensors(config: FlashNextConfig, mtp: bool = True) -> Iterator[TensorGroup]:
    """All groups in the order of the forward pass; the MTP head's when the config has one and `mtp` is true.

    A tied head (`tie_word_embeddings`) is left out.
    """
    hidden = config.hidden_size
    yield TensorGroup("embed_tokens", "embedding", "embedding", hidden, config.vocab_size, quantizable=True)
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}"
        if config.has_ple(layer):
            yield from _ple(config, f"{prefix}.ple")
        yield from _layer(config, prefix, config.is_attention(layer))
    yield from _gated_residual(config, "hyper_connection_mixer", inject=False)
    if not config.tie_word_embeddings:
        yield TensorGroup("lm_head", "linear", "head", hidden, config.vocab_size, quantizable=True)
    if mtp and config.has_mtp:
        yield from mtp_tensors(config)


def mtp_tensors(config: FlashNextConfig) -> Iterator[TensorGroup]:
    """The MTP head's groups, all of class "mtp"."""
    hidden = config.hidden_size
    groups = [
        _vector("mtp.pre_fc_norm_embedding", "mtp", hidden),
        _vector("mtp.pre_fc_norm_hidden", "mtp", config.stream_width),
        TensorGroup("mtp.fc_embedding", "linear", "mtp", hidden, hidden, quantizable=True),
        TensorGroup("mtp.fc_hidden", "linear", "mtp", hidden, hidden, quantizable=True),
        *_layer(config, "mtp.layers.0", attention=True),
        *_gated_residual(config, "mtp.hyper_connection_mixer", inject=False),
    ]
    for group in groups:
        yield TensorGroup(**{**vars(group), "tensor_class": "mtp"})


def published_name(name: str) -> str:
    """The name of a canonical tensor or group in published checkpoints."""
    return name if is_outside(name) else PUBLISHED_PREFIX + name


def is_outside(name: str) -> bool:
    """Whether a canonical name stands outside the text model's prefix."""
    return name.startswith(("mtp.", "lm_head.")) or name == "lm_head"


def canonical_name(name: str) -> str:
    """A tensor's or group's canonical name, whichever prefix it carries."""
    for prefix in PREFIXES:
        if prefix and name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _layer(config: FlashNextConfig, prefix: str, attention: bool) -> Iterator[TensorGroup]:
    yield from _gated_residual(config, f"{prefix}.attn_hyper_connection", inject=True)
    if attention:
        yield from _attention(config, f"{prefix}.self_attn")
    else:
        yield from _delta(config, f"{prefix}.linear_attn")
    yield from _gated_residual(config, f"{prefix}.mlp_hyper_connection", inject=True)
    yield from _experts(config, f"{prefix}.mlp")


def _gated_residual(config: FlashNextConfig, prefix: str, inject: bool) -> Iterator[TensorGroup]:
    width, rank = config.stream_width, config.hc_lowrank
    yield _vector(f"{prefix}.hc_norm", "mixers", width)
    yield TensorGroup(f"{prefix}.input_mix_weight_down", "linear", "mixers", width, rank)
    yield TensorGroup(f"{prefix}.input_mix_weight_up", "linear", "mixers", rank, width)
    if inject:
        yield TensorGroup(f"{prefix}.block_inject_weight", "linear", "mixers", width, config.hc_count)


def _delta(config: FlashNextConfig, prefix: str) -> Iterator[TensorGroup]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    yield TensorGroup(f"{prefix}.in_proj_qkv", "linear", "delta", hidden, config.conv_channels, quantizable=True)
    yield TensorGroup(f"{prefix}.in_proj_z", "linear", "delta", hidden, config.value_width, quantizable=True)
    yield TensorGroup(f"{prefix}.in_proj_a", "linear", "delta", hidden, heads)
    yield TensorGroup(f"{prefix}.in_proj_b", "linear", "delta", hidden, heads)
    yield _vector(f"{prefix}.conv1d", "delta", config.conv_channels, 1, config.linear_conv_kernel_dim)
    yield TensorGroup(f"{prefix}.A_log", "vector", "delta", shape=(heads,), suffix="")
    yield TensorGroup(f"{prefix}.dt_bias", "vector", "delta", shape=(heads,), suffix="")
    yield _vector(f"{prefix}.norm", "delta", config.linear_value_head_dim)
    yield TensorGroup(f"{prefix}.out_proj", "linear", "delta", config.value_width, hidden, quantizable=True)


def _attention(config: FlashNextConfig, prefix: str) -> Iterator[TensorGroup]:
    hidden, bias = config.hidden_size, config.attention_bias
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    index = (config.indexer_n_heads + 1) * config.indexer_head_dim
    yield TensorGroup(f"{prefix}.q_proj", "linear", "attention", hidden, 2 * q, quantizable=True, bias=bias)
    yield TensorGroup(f"{prefix}.k_proj", "linear", "attention", hidden, kv, quantizable=True, bias=bias)
    yield TensorGroup(f"{prefix}.v_proj", "linear", "attention", hidden, kv, quantizable=True, bias=bias)
    yield TensorGroup(f"{prefix}.o_proj", "linear", "attention", q, hidden, quantizable=True, bias=bias)
    yield _vector(f"{prefix}.q_norm", "attention", config.head_dim)
    yield _vector(f"{prefix}.k_norm", "attention", config.head_dim)
    yield TensorGroup(f"{prefix}.indexer.index_qk_proj", "linear", "attention", hidden, index, quantizable=True)
    yield _vector(f"{prefix}.indexer.q_layernorm", "attention", config.indexer_head_dim)
    yield _vector(f"{prefix}.indexer.k_layernorm", "attention", config.indexer_head_dim)


def _experts(config: FlashNextConfig, prefix: str) -> Iterator[TensorGroup]:
    hidden = config.hidden_size
    yield TensorGroup(f"{prefix}.gate", "linear", "router", hidden, config.num_experts)
    for expert in range(config.num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", "experts", hidden, config.moe_intermediate_size)
    yield from _mlp(f"{prefix}.shared_expert", "shared expert", hidden, config.shared_expert_intermediate_size)
    yield TensorGroup(f"{prefix}.shared_expert_gate", "linear", "router", hidden, 1)


def _mlp(prefix: str, tensor_class: TensorClass, hidden: int, inner: int) -> Iterator[TensorGroup]:
    yield TensorGroup(f"{prefix}.gate_proj", "linear", tensor_class, hidden, inner, quantizable=True)
    yield TensorGroup(f"{prefix}.up_proj", "linear", tensor_class, hidden, inner, quantizable=True)
    yield TensorGroup(f"{prefix}.down_proj", "linear", tensor_class, inner, hidden, quantizable=True)


def _ple(config: FlashNextConfig, prefix: str) -> Iterator[TensorGroup]:
    width = config.stream_width
    yield TensorGroup(f"{prefix}.ple_embedding.ngram_embedding", "ngram", "ngram", config.ngram_width, quantizable=True)
    yield TensorGroup(f"{prefix}.key_proj", "linear", "ple", config.ple_embed_dim, width)
    yield TensorGroup(f"{prefix}.value_proj", "linear", "ple", config.ple_embed_dim, config.hidden_size)
    yield _vector(f"{prefix}.norm_key", "ple", width)
    yield _vector(f"{prefix}.norm_query", "ple", width)
    yield _vector(f"{prefix}.norm_conv", "ple", width)
    yield _vector(f"{prefix}.conv1d", "ple", width, 1, config.ple_conv_kernel_size)


def _vector(name: str, tensor_class: TensorClass, *shape: int) -> TensorGroup:
    return TensorGroup(name, "vector", tensor_class, shape=shape)
