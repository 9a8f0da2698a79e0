"""The Hugging Face config of Qwen3.8 Flash Next, validated into one typed object.

Field names and defaults are those of transformers' `Qwen4ExpTextConfig`; what isobit cannot run is refused by name.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from isobit.errors import CheckpointError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text")
ATTENTION_NAMES = ("full_attention", "indexed_attention", "qwen_sparse_attention")
SHOWN = 80  # characters of a wrong value that a message repeats
INDEX_BLOCKS = (1, 2, 4, 8, 16, 32, 64)  # a page of the key-value pools holds whole blocks
SIZE_LIMIT = 1 << 31  # sizes, counts and ids are 32-bit in the kernels
# Each layer and expert is tensors of its own: a wrong count must be an error, not an endless search for them.
MAX_LAYERS = 4096
MAX_EXPERTS = 65_536
MAX_BUDGET = 1 << 20  # the longest context; rows get buffers for the whole budget

# Keys that would change the arithmetic, with the only values under which isobit's arithmetic is the model's.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "attn_output_gate": (True,),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mamba_ssm_dtype": (None, "float32"),
    "mlp_bias": (None, False),
    "mlp_only_layers": (None, []),
    "mtp_use_dedicated_embeddings": (None, False),
    "n_group": (None, 0, 1),
    "residual_multiplier": (None, 1, 1.0),
    "router_bias": (None, False),
    "routed_scaling_factor": (None, 1, 1.0),
    "scoring_func": (None, "softmax"),
    "sliding_window": (None,),
    "topk_group": (None, 0, 1),
    "use_sliding_window": (None, False),
}
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
# Keys without influence on a text forward.
HARMLESS_KEYS = {
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "full_attention_interval",
    "id2label",
    "image_token_id",
    "initializer_range",
    "intermediate_size",
    "is_encoder_decoder",
    "label2id",
    "language_model_only",
    "model_type",
    "number_of_conv_states",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "quantization_config",
    "return_dict",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "router_aux_loss_coef",
    "text_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
}

Size = Annotated[int, Field(gt=0, lt=SIZE_LIMIT)]
SizeOrZero = Annotated[int, Field(ge=0, lt=SIZE_LIMIT)]


class FlashNextConfig(BaseModel):
    """What a Flash Next model is made of. Sizes in elements, budgets and windows in tokens; layers count from 0.

    `layer_types` holds "linear_attention" (Gated DeltaNet) or "full_attention" (sparse attention with its indexer).
    The `indexer_*` fields are 0 in a model without sparse attention. `ple_layer_ids` counts from 1, as in the config;
    `ple_layers` counts from 0. `quantization` is the config's own
    `quantization_config`, for display only. `unknown_keys` are keys that isobit neither reads nor knows.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size = Field(le=MAX_LAYERS)
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...]
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1)
    max_position_embeddings: Size = Field(default=32768, ge=2)
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    num_attention_heads: Size = 16
    num_key_value_heads: Size = 2
    head_dim: Size = 256
    attention_bias: bool = False
    rope_theta: PositiveFloat
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)

    indexer_n_heads: SizeOrZero = 0
    indexer_kv_heads: SizeOrZero = 0
    indexer_head_dim: SizeOrZero = 0
    indexer_budget: SizeOrZero = Field(default=0, le=MAX_BUDGET)
    indexer_compress_ratio: SizeOrZero = 0

    linear_conv_kernel_dim: Size = Field(default=4, ge=2)
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    output_gate_type: Literal["sigmoid", "silu"] = "silu"

    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    num_experts: Size = Field(default=512, le=MAX_EXPERTS)
    num_experts_per_tok: Size = 10
    norm_topk_prob: bool = True

    hc_count: Size = Field(default=4, ge=2)
    hc_lowrank: Size = 320

    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: Size
    ple_conv_kernel_size: Size = Field(default=4, ge=2)
    ngram_size: Size = Field(default=3, ge=2)
    heads_per_ngram: Size = 8
    ngram_vocab_size_base: PositiveInt = 20_000_000
    make_ngram_vocab_size_divisible_by: PositiveInt = 128
    split_ngram_parts: PositiveInt = 512
    seed: int = 1234

    mtp_num_hidden_layers: Literal[0, 1] = 0
    quantization: dict[str, Any] | None = None
    unknown_keys: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self):
        if len(self.layer_types) != self.num_hidden_layers:
            yield f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is {self.num_hidden_layers}"
        if self.num_attention_heads % self.num_key_value_heads:
            yield (
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            yield (
                f"linear_num_value_heads {self.linear_num_value_heads} is no multiple of linear_num_key_heads "
                f"{self.linear_num_key_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            yield f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}"
        if any(not 0 <= token < SIZE_LIMIT for token in self.eos_token_ids):
            yield f"eos_token_id {list(self.eos_token_ids)} holds an id that is negative or too large"
        if self.has_attention:
            yield from self._indexer_problems()
        if self.ple_layer_ids:
            yield from self._ple_problems()

    def _indexer_problems(self):
        names = [name for name in type(self).model_fields if name.startswith("indexer_")]
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            yield f"{missing[0]} is missing or 0; the sparse attention layers need all of {', '.join(names)}"
        if self.indexer_kv_heads != 1:
            yield f"indexer_kv_heads is {self.indexer_kv_heads}, expected 1"
        if self.indexer_compress_ratio not in INDEX_BLOCKS:
            yield f"indexer_compress_ratio is {self.indexer_compress_ratio}, expected one of {INDEX_BLOCKS}"
        if self.indexer_budget % self.indexer_compress_ratio:
            yield (
                f"indexer_budget {self.indexer_budget} is no multiple of indexer_compress_ratio "
                f"{self.indexer_compress_ratio}"
            )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            yield (
                f"head_dim {self.head_dim} times partial_rotary_factor {self.partial_rotary_factor} gives "
                f"{self.rotary_dim} rotary dimensions, expected an even number of at least 2"
            )
        if self.rotary_dim > self.indexer_head_dim:
            yield f"{self.rotary_dim} rotary dimensions do not fit into indexer_head_dim {self.indexer_head_dim}"

    def _ple_problems(self):
        if self.ple_embed_dim % self.ngram_heads:
            yield f"ple_embed_dim {self.ple_embed_dim} is no multiple of the {self.ngram_heads} n-gram heads"
        for layer in self.ple_layer_ids:
            if not 1 <= layer <= self.num_hidden_layers:
                yield f"ple_layer_ids holds {layer}, expected numbers from 1 to {self.num_hidden_layers}"
            if self.is_attention(layer - 1):
                yield f"ple_layer_ids holds {layer}, a sparse attention layer; expected linear_attention layers only"
        if not self.eos_token_ids:
            yield "eos_token_id is missing; the n-gram embedding needs it"

    def is_attention(self, layer: int) -> bool:
        """Whether `layer` (from 0) is sparse attention; else it is a Gated DeltaNet."""
        return self.layer_types[layer] == "full_attention"

    def has_ple(self, layer: int) -> bool:
        """Whether the n-gram embedding is added to the streams before `layer` (from 0)."""
        return layer + 1 in self.ple_layer_ids

    @property
    def has_attention(self) -> bool:
        """Whether any layer, the MTP head's included, is sparse attention."""
        return "full_attention" in self.layer_types or self.has_mtp

    @property
    def has_mtp(self) -> bool:
        return self.mtp_num_hidden_layers > 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_attention(layer))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if not self.is_attention(layer))

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """The layers (from 0) that an n-gram embedding is added before."""
        return tuple(layer - 1 for layer in self.ple_layer_ids)

    @property
    def ple_end_token(self) -> int:
        """The id at which the n-gram embedding cuts the token history; nothing to do with stop tokens."""
        return self.eos_token_ids[0]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def index_blocks(self) -> int:
        """How many finished blocks a query reads at most."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def key_width(self) -> int:
        """Channels of a DeltaNet layer's queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of a DeltaNet layer's values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def stream_width(self) -> int:
        """Values of a row's residual streams together."""
        return self.hc_count * self.hidden_size

    @property
    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_width(self) -> int:
        """Values of one n-gram row."""
        return self.ple_embed_dim // self.ngram_heads


def load_config(folder: str | Path) -> FlashNextConfig:
    """Read and check `config.json` of a checkpoint folder; CheckpointError names the file and the field."""
    path = Path(folder) / "config.json"
    outer = _read_json(path)
    model_type = outer.get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{path}: model_type is {model_type!r}, expected one of {', '.join(MODEL_TYPES)}; "
            "isobit serves Qwen3.8 Flash Next checkpoints only"
        )
    return parse_config(outer, path)


def parse_config(outer: dict[str, Any], path: str | Path = "config.json") -> FlashNextConfig:
    """Check a config given as a dict, nested (`text_config`) or flat; errors name `path`."""
    text = outer.get("text_config", outer)
    if not isinstance(text, dict):
        _refuse(path, "text_config", text, "an object")
    text_type = text.get("model_type", MODEL_TYPES[0])
    if text_type not in MODEL_TYPES:
        _refuse(path, "text_config.model_type", text_type, f"one of {', '.join(MODEL_TYPES)}")
    _refuse_changed_arithmetic(text, path)
    own = FlashNextConfig.model_fields.keys() - {"eos_token_ids", "unknown_keys", "quantization", "rope_theta"}
    values = {name: text[name] for name in own if text.get(name) is not None}
    values["mtp_num_hidden_layers"] = _first_given(
        0, text.get("mtp_num_hidden_layers"), outer.get("mtp_num_hidden_layers")
    )
    values["tie_word_embeddings"] = _first_given(
        False, outer.get("tie_word_embeddings"), text.get("tie_word_embeddings")
    )
    values["output_gate_type"] = _first_given("silu", text.get("output_gate_type"), text.get("hidden_act"))
    values["layer_types"] = _layer_types(text, path)
    values["ple_layer_ids"] = tuple(sorted(set(_integers(text, "ple_layer_ids", path))))
    values["eos_token_ids"] = _integers(text, "eos_token_id", path)
    values.update(_rope(text, path))
    values["quantization"] = _quantization(outer, text, path)
    known = FlashNextConfig.model_fields.keys() | NEUTRAL_VALUES.keys() | HARMLESS_KEYS | {"eos_token_id"}
    values["unknown_keys"] = tuple(sorted((text.keys() | outer.keys()) - known))
    values.setdefault("ple_embed_dim", values.get("hidden_size"))
    try:
        return FlashNextConfig(**values)
    except ValidationError as error:
        raise CheckpointError(_one_line(error, path)) from None


def load_stop_tokens(folder: str | Path, config: FlashNextConfig) -> frozenset[int]:
    """The ids that end a reply: `eos_token_id` of generation_config.json, else of config.json."""
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return frozenset(config.eos_token_ids)
    generation = _read_json(path)
    if generation.get("eos_token_id") is None:
        return frozenset(config.eos_token_ids)
    return frozenset(_integers(generation, "eos_token_id", path))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        problem = "is not a folder" if path.parent.exists() else "does not exist"
        raise CheckpointError(f"{path.parent} {problem}; expected a checkpoint folder")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is no regular file; download or convert the checkpoint again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}; expected a checkpoint folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); download or convert it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, expected a JSON object")
    return value


def _first_given(default: Any, *values: Any) -> Any:
    """The first value that is not null."""
    return next((value for value in values if value is not None), default)


def _refuse(path: str | Path, field: str, value: Any, expected: str) -> NoReturn:
    raise CheckpointError(f"{path}: {field} is {_shown(value)}, expected {expected}; isobit cannot run this model")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _refuse_changed_arithmetic(text: dict[str, Any], path: str | Path) -> None:
    for key, allowed in NEUTRAL_VALUES.items():
        if key in text and text[key] not in allowed:
            _refuse(path, key, text[key], " or ".join(json.dumps(value) for value in allowed))


def _layer_types(text: dict[str, Any], path: str | Path) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        count, interval = text.get("num_hidden_layers"), text.get("full_attention_interval", 4)
        if type(interval) is not int or interval < 1:
            _refuse(path, "full_attention_interval", interval, "a positive integer")
        if count is None:
            return ()
        if type(count) is not int or not 0 < count <= MAX_LAYERS:
            _refuse(path, "num_hidden_layers", count, f"an integer from 1 to {MAX_LAYERS}")
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    if not isinstance(types, list):
        _refuse(path, "layer_types", types, "a list of names")
    for i, name in enumerate(types):
        if name != "linear_attention" and name not in ATTENTION_NAMES:
            _refuse(path, f"layer_types[{i}]", name, f"linear_attention or {', '.join(ATTENTION_NAMES)}")
    return tuple("full_attention" if name in ATTENTION_NAMES else name for name in types)


def _integers(values: dict[str, Any], key: str, path: str | Path) -> tuple[int, ...]:
    value = values.get(key)
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        _refuse(path, key, value, "an integer or a list of integers")
    return tuple(found)


def _rope(text: dict[str, Any], path: str | Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = text.get(name)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            _refuse(path, name, parameters, "an object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "mrope"):
            _refuse(path, f"{name}.rope_type", kind, '"default"')
        for key in sorted(parameters.keys() - ROPE_KEYS):
            if parameters[key] is not None:
                _refuse(path, f"{name}.{key}", parameters[key], "no such key")
        _merge_rope(found, parameters, path)
    _merge_rope(found, text, path)
    if "rope_theta" not in found:
        raise CheckpointError(f"{path}: rope_parameters.rope_theta is missing, expected a positive number")
    return found


def _merge_rope(found: dict[str, float], values: dict[str, Any], path: str | Path) -> None:
    for key in ("rope_theta", "partial_rotary_factor"):
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _refuse(path, key, value, "a positive number")
        if found.setdefault(key, float(value)) != value:
            _refuse(path, key, value, f"{found[key]} as in the rope parameters")


def _quantization(outer: dict[str, Any], text: dict[str, Any], path: str | Path) -> dict[str, Any] | None:
    quantization = outer.get("quantization_config") or text.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        _refuse(path, "quantization_config", quantization, "an object")
    if quantization.get("quant_method") != "exl3":
        _refuse(path, "quantization_config.quant_method", quantization.get("quant_method"), '"exl3"')
    return quantization


def _one_line(error: ValidationError, path: str | Path) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{path}: {field} is missing; expected it in the model's config"
    if not field:
        return f"{path}: {message}"
    expected = message[0].lower() + message[1:]
    return f"{path}: {field} is {_shown(first['input'])}; {expected}; isobit cannot run this model"
