"""Random but valid EXL3 checkpoints: same seed, same bytes, on any machine.

Quantized linears get random trellis bits (every bit pattern is a valid tile), so nothing is searched. All numbers come
from the raw integers of PCG64, one generator a tensor, through integer and single IEEE operations. Scales are chosen so
that activations stay near 1 through any number of layers and logits have a standard deviation around 2.
"""

import hashlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from isobit.checkpoint.store import NUMPY_TYPES, TensorWriter
from isobit.checkpoint.synth_presets import ALWAYS_PLAIN, PRESETS, Preset
from isobit.checkpoint.synth_text import END_OF_TEXT, text_files
from isobit.checkpoint.trellis import BLOCK, GROUP, MULTIPLIERS, TILE, check_width
from isobit.checkpoint.weights import CODEBOOKS, WIDTHS
from isobit.errors import IsobitError

PREFIX = "model.language_model."
ARCHITECTURE = "Qwen4ExpForConditionalGeneration"
FORMAT_VERSION = "1.6.5"  # the exllamav3 release whose format this is
FILE_BYTES = 8 << 30
PIECE_VALUES = 1 << 22
# Standard deviation of a codebook's values over all states, so that every codebook gives outputs of one size.
CODEBOOK_SPREAD = {"3inst": 1.2437, "mcg": 1.2441, "mul1": 1.0003}
BELL_SPREAD = 147.8  # standard deviation of the sum of four random bytes

Progress = Callable[[int, int], None]


def synthesize(
    folder: str | Path,
    preset: str = "demo",
    *,
    layers: int | None = None,
    seed: int = 0,
    codebook: str = "mul1",
    bits: float | str | None = None,
    head_bits: float | None = None,
    mtp_bits: float | None = None,
    ngram_bits: int | None = None,
    ngram_rows: int | None = None,
    ngram_shards: int = 1,
    embedding_bits: int | None = None,
    biases: bool = False,
    packed_signs: bool = False,
    plain: tuple[str, ...] | None = None,
    mtp: bool = True,
    overrides: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write a random checkpoint as `folder`, which must not exist or be empty; it appears whole or not at all.

    preset: a key of PRESETS. layers: decoder layers (default: the preset's). seed: any int, keys every value.
    codebook: one of CODEBOOKS, or "mixed" (by tensor). bits: width of every quantized linear, or "mixed"; None keeps
    the preset's widths, which head_bits and mtp_bits override too. ngram_bits: 1 to 8, or 16 for a plain fp16 table.
    ngram_rows: about how many rows the n-gram table has. ngram_shards: tensors that it is split into.
    embedding_bits: 1 to 8 quantizes the token embeddings, None leaves them fp16. biases: attention projections get a
    bias. packed_signs: each linear stores one of its two scales as packed signs (`su` or `sv`). plain: name patterns
    (`layers.0.mlp.*`) of linears that stay plain; None: the preset's. mtp: whether there is an MTP head.
    overrides: fields of the text config. file_bytes: the size at which another file is begun.
    progress: called with (bytes written, bytes in all). Raises IsobitError for options that make no checkpoint.
    """
    recipe = _Recipe.of(
        preset,
        layers=layers,
        seed=seed,
        codebook=codebook,
        bits=bits,
        head_bits=head_bits,
        mtp_bits=mtp_bits,
        ngram_bits=ngram_bits,
        ngram_rows=ngram_rows,
        ngram_shards=ngram_shards,
        embedding_bits=embedding_bits,
        biases=biases,
        packed_signs=packed_signs,
        plain=plain,
        mtp=mtp,
        overrides=overrides or {},
    )
    target = Path(folder)
    _check_target(target)
    layout = _Layout(recipe)
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(target, layout)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        _write_texts(partial, recipe, layout)
        _write_tensors(partial, layout, seed, file_bytes, progress or (lambda done, total: None))
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def ngram_primes(base: int, count: int, skip: int = 0) -> list[int]:
    """`count` primes from `base` on, after leaving out the first `skip`: the head sizes of an n-gram table."""
    primes: list[int] = []
    candidate = base
    while len(primes) < skip + count:
        if _is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    return primes[skip:]


def ngram_multipliers(vocab_size: int, order: int, ordinal: int, seed: int) -> list[int]:
    """The odd hash multipliers of the `ordinal`-th n-gram layer: splitmix64 of the config's seed."""
    half_bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    base = seed + 10007 * ordinal
    gamma = 0x9E3779B97F4A7C15
    return [2 * (_splitmix64(base + (position + 1) * gamma) % half_bound) + 1 for position in range(order)]


def _is_prime(value: int) -> bool:
    if value < 4 or value % 2 == 0:
        return value in (2, 3)
    return all(value % divisor for divisor in range(3, math.isqrt(value) + 1, 2))


def _splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    mixed = (state + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True)
class _Recipe:
    """The options of `synthesize`, checked, with the preset's defaults filled in."""

    config: dict[str, Any]
    seed: int
    codebook: str
    bits: float | str
    expert_bits: float | str
    head_bits: float | str
    mtp_bits: float | str
    ngram_bits: int
    ngram_shards: int
    embedding_bits: int | None
    biases: bool
    packed_signs: bool
    plain: tuple[str, ...]

    @classmethod
    def of(cls, preset_name: str, *, bits: float | str | None, **options: Any) -> "_Recipe":
        if preset_name not in PRESETS:
            raise IsobitError(f"preset {preset_name!r} is unknown, expected one of {', '.join(PRESETS)}")
        preset = PRESETS[preset_name]
        codebook = options["codebook"]
        if codebook not in (*CODEBOOKS, "mixed"):
            raise IsobitError(f"codebook {codebook!r} is unknown, expected one of {', '.join(CODEBOOKS)} or mixed")

        def width(given: float | None, default: float) -> float | str:
            chosen = given if given is not None else bits if bits is not None else default
            if chosen != "mixed":
                try:
                    check_width(chosen, codebook if codebook != "mixed" else "mul1")  # type: ignore[arg-type]
                except ValueError as error:
                    raise IsobitError(str(error)) from None
            return chosen

        ngram_bits = preset.ngram_bits if options["ngram_bits"] is None else options["ngram_bits"]
        if ngram_bits not in (*range(1, 9), 16):
            raise IsobitError(f"n-gram width {ngram_bits} is unknown, expected 1 to 8, or 16 for a plain table")
        if options["embedding_bits"] not in (None, *range(1, 9)):
            raise IsobitError(f"embedding width {options['embedding_bits']} is unknown, expected 1 to 8, or none")
        if options["ngram_shards"] < 1:
            raise IsobitError(f"{options['ngram_shards']} n-gram shards: expected at least 1")
        return cls(
            config=_text_config(preset, options),
            seed=options["seed"],
            codebook=codebook,
            bits=width(None, preset.bits),
            expert_bits=width(None, preset.expert_bits),
            head_bits=width(options["head_bits"], preset.head_bits),
            mtp_bits=width(options["mtp_bits"], preset.mtp_bits),
            ngram_bits=ngram_bits,
            ngram_shards=options["ngram_shards"],
            embedding_bits=options["embedding_bits"],
            biases=options["biases"],
            packed_signs=options["packed_signs"],
            plain=preset.plain if options["plain"] is None else tuple(options["plain"]),
        )


def _text_config(preset: Preset, options: Mapping[str, Any]) -> dict[str, Any]:
    layers = preset.layers if options["layers"] is None else options["layers"]
    if layers < 1:
        raise IsobitError(f"{layers} layers: expected at least 1")
    config = dict(preset.config)
    config["num_hidden_layers"] = layers
    config["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    config["ple_layer_ids"] = [layer for layer in config["ple_layer_ids"] if layer <= layers] or [1]
    config["eos_token_id"] = END_OF_TEXT
    config["attention_bias"] = options["biases"]
    if not options["mtp"]:
        config["mtp_num_hidden_layers"] = 0
    config |= options["overrides"]
    if options["ngram_rows"] is not None:
        heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
        if options["ngram_rows"] < 2 * heads:
            raise IsobitError(f"{options['ngram_rows']} n-gram rows: expected at least {2 * heads}, 2 for each head")
        config["ngram_vocab_size_base"] = options["ngram_rows"] // heads
    config["split_ngram_parts"] = options["ngram_shards"]
    return config


class _Values:
    """A tensor's random values, in order; a long tensor is taken piece by piece with the same result."""

    def __init__(self, seed: int, name: str):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        state, increment = (int.from_bytes(half, "little") for half in (digest[:16], digest[16:]))
        self._generator = np.random.PCG64(0)
        self._generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": state, "inc": increment | 1},
            "has_uint32": 0,
            "uinteger": 0,
        }

    def words(self, count: int, dtype: Any) -> np.ndarray:
        """`count` random integers that fill the little-endian integer type."""
        kind = np.dtype(dtype).newbyteorder("<")
        raw = self._generator.random_raw(-(-count * kind.itemsize // 8)).astype("<u8", copy=False)
        return raw.view(kind)[:count]

    def bell(self, count: int, spread: float) -> np.ndarray:
        """float32, nearly normal with mean 0 and standard deviation `spread`: a sum of four bytes, scaled."""
        words = self.words(count, np.uint32)
        pairs = (words & np.uint32(0x00FF00FF)) + ((words >> np.uint32(8)) & np.uint32(0x00FF00FF))
        sums = (pairs & np.uint32(0xFFFF)) + (pairs >> np.uint32(16))
        return (sums.astype(np.float32) - np.float32(510)) * np.float32(spread / BELL_SPREAD)

    def between(self, count: int, low: float, high: float) -> np.ndarray:
        """float32, uniform in [low, high]."""
        steps = (self.words(count, np.uint32) >> np.uint32(8)).astype(np.float32)
        return steps * np.float32((high - low) / (1 << 24)) + np.float32(low)

    def signed_between(self, count: int, low: float, high: float) -> np.ndarray:
        """float32, uniform in [low, high] with random signs."""
        signs = (self.words(count, np.uint8) & 1).astype(np.float32) * np.float32(2) - np.float32(1)
        return self.between(count, low, high) * signs


Fill = Callable[[_Values, int], np.ndarray]


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write. fill(values, count): its next `count` values; `unit`: a piece is a multiple of it."""

    dtype: str
    shape: tuple[int, ...]
    fill: Fill
    unit: int = 1

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * NUMPY_TYPES[self.dtype].itemsize

    def pieces(self, values: _Values) -> Iterator[np.ndarray]:
        step = max(self.unit, PIECE_VALUES // self.unit * self.unit)
        for start in range(0, self.count, step):
            yield _stored(self.fill(values, min(step, self.count - start)), self.dtype)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)  # cut, so that no rounding mode matters
    return values.astype(NUMPY_TYPES[dtype], copy=False)


def _bell(spread: float) -> Fill:
    return lambda values, count: values.bell(count, spread)


def _between(low: float, high: float) -> Fill:
    return lambda values, count: values.between(count, low, high)


def _signed(low: float, high: float) -> Fill:
    return lambda values, count: values.signed_between(count, low, high)


def _given(numbers: list[int], dtype: Any) -> Fill:
    return lambda values, count: np.array(numbers, dtype)


def _bits(values: _Values, count: int) -> np.ndarray:
    return values.words(count, np.int16)


def _rings(words: int) -> Fill:
    """Rings of `words` words: the scale, a half in [0.5, 1), then random bits."""

    def fill(values: _Values, count: int) -> np.ndarray:
        rows = values.words(count, np.uint16).reshape(-1, words)
        rows[:, 0] = (rows[:, 0] & np.uint16(0x03FF)) | np.uint16(0x3800)
        return rows.view(np.int16).reshape(-1)

    return fill


class _Layout:
    """Every tensor of the checkpoint, by name, in the order of the network. `table`: the n-gram file's tensors."""

    def __init__(self, recipe: _Recipe):
        self.recipe = recipe
        self.config = recipe.config
        self.hidden: int = self.config["hidden_size"]
        self.streams: int = self.config["hc_count"]
        self.tensors: dict[str, _Tensor] = {}
        self.table: dict[str, _Tensor] = {}
        self._trunk()
        if self.config["mtp_num_hidden_layers"]:
            self._mtp_head()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for group in (self.tensors, self.table) for tensor in group.values())

    def _trunk(self) -> None:
        self._embedding(f"{PREFIX}embed_tokens")
        for index, kind in enumerate(self.config["layer_types"]):
            name = f"{PREFIX}layers.{index}"
            if index + 1 in self.config["ple_layer_ids"]:
                self._ple(f"{name}.ple", self.config["ple_layer_ids"].index(index + 1))
            self._layer(name, kind == "linear_attention", self.recipe.bits, self.recipe.expert_bits)
        self._mixer(f"{PREFIX}hyper_connection_mixer", injects=False)
        if not self.config["tie_word_embeddings"]:
            self._linear("lm_head", self.hidden, self.config["vocab_size"], 4.0, self.recipe.head_bits)

    def _mtp_head(self) -> None:
        bits = self.recipe.mtp_bits
        self._norm("mtp.pre_fc_norm_embedding", self.hidden)
        self._norm("mtp.pre_fc_norm_hidden", self.streams * self.hidden)
        self._linear("mtp.fc_embedding", self.hidden, self.hidden, 1.0, bits)
        self._linear("mtp.fc_hidden", self.hidden, self.hidden, 1.0, bits)
        for index in range(self.config["mtp_num_hidden_layers"]):
            self._layer(f"mtp.layers.{index}", False, bits, bits)
        self._mixer("mtp.hyper_connection_mixer", injects=False)

    def _layer(self, name: str, recurrent: bool, bits: float | str, expert_bits: float | str) -> None:
        self._mixer(f"{name}.attn_hyper_connection", injects=True)
        if recurrent:
            self._delta(f"{name}.linear_attn", bits)
        else:
            self._attention(f"{name}.self_attn", bits)
        self._mixer(f"{name}.mlp_hyper_connection", injects=True)
        self._moe(f"{name}.mlp", bits, expert_bits)

    def _mixer(self, name: str, injects: bool) -> None:
        wide, rank = self.streams * self.hidden, self.config["hc_lowrank"]
        self._norm(f"{name}.hc_norm", wide)
        self._linear(f"{name}.input_mix_weight_down", wide, rank, 4.0)
        self._linear(f"{name}.input_mix_weight_up", rank, wide, 2.0)
        if injects:
            self._linear(f"{name}.block_inject_weight", wide, self.streams, 4.0)

    def _delta(self, name: str, bits: float | str) -> None:
        config = self.config
        value_heads = config["linear_num_value_heads"]
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = value_heads * config["linear_value_head_dim"]
        channels = 2 * keys + values
        self._linear(f"{name}.in_proj_qkv", self.hidden, channels, 2.0, bits)
        self._linear(f"{name}.in_proj_z", self.hidden, values, 2.0, bits)
        self._linear(f"{name}.in_proj_a", self.hidden, value_heads, 1.0)
        self._linear(f"{name}.in_proj_b", self.hidden, value_heads, 2.0)
        taps = config["linear_conv_kernel_dim"]
        self.tensors[f"{name}.conv1d.weight"] = _Tensor("BF16", (channels, 1, taps), _bell(0.6))
        self.tensors[f"{name}.A_log"] = _Tensor("F32", (value_heads,), _between(-4.0, 1.5))
        self.tensors[f"{name}.dt_bias"] = _Tensor("BF16", (value_heads,), _between(-3.0, 1.0))
        self.tensors[f"{name}.norm.weight"] = _Tensor(
            "BF16", (config["linear_value_head_dim"],), _between(0.6, 1.4)
        )
        self._linear(f"{name}.out_proj", values, self.hidden, 1.0, bits)

    def _attention(self, name: str, bits: float | str) -> None:
        config = self.config
        head = config["head_dim"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        bias = self.recipe.biases
        self._linear(f"{name}.q_proj", self.hidden, 2 * queries, 2.0, bits, bias)
        self._linear(f"{name}.k_proj", self.hidden, keys, 2.0, bits, bias)
        self._linear(f"{name}.v_proj", self.hidden, keys, 2.0, bits, bias)
        self._linear(f"{name}.o_proj", queries, self.hidden, 1.5, bits, bias)
        # Larger than 1 + w = 1, so that attention picks among its keys instead of averaging them.
        self._norm(f"{name}.q_norm", head, 0.5)
        self._norm(f"{name}.k_norm", head, 0.5)
        index_heads, index_dim = config["indexer_n_heads"], config["indexer_head_dim"]
        outputs = (index_heads + config["indexer_kv_heads"]) * index_dim
        self._linear(f"{name}.indexer.index_qk_proj", self.hidden, outputs, 2.0, bits)
        self._norm(f"{name}.indexer.q_layernorm", index_dim)
        self._norm(f"{name}.indexer.k_layernorm", index_dim)

    def _moe(self, name: str, bits: float | str, expert_bits: float | str) -> None:
        config = self.config
        self._linear(f"{name}.gate", self.hidden, config["num_experts"], 4.0)
        for expert in range(config["num_experts"]):
            self._mlp(f"{name}.experts.{expert}", config["moe_intermediate_size"], expert_bits)
        self._mlp(f"{name}.shared_expert", config["shared_expert_intermediate_size"], bits)
        self._linear(f"{name}.shared_expert_gate", self.hidden, 1, 4.0)

    def _mlp(self, name: str, width: int, bits: float | str) -> None:
        self._linear(f"{name}.gate_proj", self.hidden, width, 2.0, bits)
        self._linear(f"{name}.up_proj", self.hidden, width, 2.0, bits)
        self._linear(f"{name}.down_proj", width, self.hidden, 1.5, bits)

    def _ple(self, name: str, ordinal: int) -> None:
        wide, width = self.streams * self.hidden, self.config["ple_embed_dim"]
        self._linear(f"{name}.key_proj", width, wide, 1.0)
        self._linear(f"{name}.value_proj", width, self.hidden, 1.0)
        for norm in ("norm_key", "norm_query", "norm_conv"):
            self._norm(f"{name}.{norm}", wide)
        taps = self.config["ple_conv_kernel_size"]
        self.tensors[f"{name}.conv1d.weight"] = _Tensor("F16", (wide, 1, taps), _bell(0.4))
        self._ngram_table(f"{name}.ple_embedding", ordinal)

    def _ngram_table(self, name: str, ordinal: int) -> None:
        config, bits = self.config, self.recipe.ngram_bits
        heads = (config["ngram_size"] - 1) * config["heads_per_ngram"]
        width = config["ple_embed_dim"] // heads
        sizes = ngram_primes(config["ngram_vocab_size_base"], heads, skip=ordinal * heads)
        offsets = [sum(sizes[:head]) for head in range(heads)]
        multipliers = ngram_multipliers(config["vocab_size"], config["ngram_size"], ordinal, config["seed"])
        quantized = bits != 16
        owner, prefix = (f"{name}.ngram_embedding", "head") if quantized else (name, "ngram_heads")
        for suffix, numbers in ((f"{prefix}_offsets", offsets), (f"{prefix}_vocab_sizes", sizes),
                                ("layer_multipliers", multipliers)):  # fmt: skip
            self.table[f"{owner}.{suffix}"] = _Tensor("I64", (len(numbers),), _given(numbers, np.int64))
        divisor = config["make_ngram_vocab_size_divisible_by"]
        rows = -(-sum(sizes) // divisor) * divisor
        for suffix, count in self._shards(rows):
            if quantized:
                words = 1 + width * bits // 16
                table = _Tensor("I16", (count, words), _rings(words), words)
                self.table[f"{name}.ngram_embedding.{suffix}trellis"] = table
            else:
                self.table[f"{name}.ngram_embedding.{suffix}weight"] = _Tensor("F16", (count, width), _bell(0.7))
        if quantized:
            self.table[f"{name}.ngram_embedding.head_bias"] = _Tensor("F16", (heads, width), _bell(0.1))

    def _shards(self, rows: int) -> Iterator[tuple[str, int]]:
        shards = self.recipe.ngram_shards
        each = -(-rows // shards)
        for shard in range(-(-rows // each)):
            yield f"shard_{shard}." if shards > 1 else "", min(each, rows - shard * each)

    def _embedding(self, name: str) -> None:
        rows, bits = self.config["vocab_size"], self.recipe.embedding_bits
        if bits is None:
            self.tensors[f"{name}.weight"] = _Tensor("F16", (rows, self.hidden), _bell(0.8))
            return
        groups, words = -(-self.hidden // GROUP), 1 + GROUP // 16 * bits
        self.tensors[f"{name}.trellis"] = _Tensor("I16", (rows, groups * words), _rings(words), words)
        self.tensors[f"{name}.signs"] = _Tensor("F16", (groups, GROUP), _signed(1.0, 1.0))

    def _norm(self, name: str, width: int, around: float = 0.0) -> None:
        self.tensors[f"{name}.weight"] = _Tensor("F16", (width,), _between(around - 0.3, around + 0.3))

    def _linear(
        self, name: str, inputs: int, outputs: int, gain: float, bits: float | str | None = None, bias: bool = False
    ) -> None:
        """A linear that turns inputs of variance 1 into outputs of standard deviation `gain`."""
        short = name.removeprefix(PREFIX)
        if bits is None or any(fnmatchcase(short, pattern) for pattern in (*ALWAYS_PLAIN, *self.recipe.plain)):
            self.tensors[f"{name}.weight"] = _Tensor("F16", (outputs, inputs), _bell(gain / math.sqrt(inputs)))
            padded = outputs
        else:
            padded = _padded(outputs)
            self._trellis(name, _padded(inputs), padded, gain / math.sqrt(inputs), bits)
        if bias:
            self.tensors[f"{name}.bias"] = _Tensor("F16", (padded,), _bell(0.2))

    def _trellis(self, name: str, k: int, n: int, spread: float, bits: float | str) -> None:
        codebook, width = self._variant(name, bits)
        scale = spread / CODEBOOK_SPREAD[codebook]
        words = int(TILE * width)
        self.tensors[f"{name}.trellis"] = _Tensor("I16", (k // TILE, n // TILE, words), _bits)
        packed = self._pick(name, "packed", 2) if self.recipe.packed_signs else None
        if packed == 0:
            self.tensors[f"{name}.su"] = _Tensor("I16", (k // TILE,), _bits)
        else:
            self.tensors[f"{name}.suh"] = _Tensor(
                "F16", (k,), _signed(0.75, 1.25) if packed is None else _signed(0.75 * scale, 1.25 * scale)
            )
        if packed == 1:
            self.tensors[f"{name}.sv"] = _Tensor("I16", (n // TILE,), _bits)
        else:
            self.tensors[f"{name}.svh"] = _Tensor("F16", (n,), _signed(0.75 * scale, 1.25 * scale))
        if codebook != "3inst":
            marker = np.array([MULTIPLIERS[codebook]], np.uint32).view(np.int32).tolist()
            self.tensors[f"{name}.{codebook}"] = _Tensor("I32", (), _given(marker, np.int32))

    def _variant(self, name: str, bits: float | str) -> tuple[str, float]:
        """The codebook and width of a linear; what is mixed is chosen by the name."""
        codebook = self.recipe.codebook
        if codebook == "mixed":
            whole = bits == "mixed" or float(bits) == int(float(bits))
            codebook = CODEBOOKS[self._pick(name, "codebook", 3)] if whole else "mul1"
        if bits != "mixed":
            return codebook, float(bits)
        widths = [width for width in WIDTHS if codebook == "mul1" or width == int(width)]
        return codebook, widths[self._pick(name, "bits", len(widths))]

    def _pick(self, name: str, what: str, count: int) -> int:
        digest = hashlib.sha256(f"{self.recipe.seed}/{name}/{what}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % count


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise IsobitError(f"{target} exists already and is not an empty folder; name another or remove it")


def _check_room(target: Path, layout: _Layout) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < layout.nbytes:
        raise IsobitError(
            f"{target}: the checkpoint takes {layout.nbytes / 1e9:.1f} GB, its disk has {free / 1e9:.1f} GB free; "
            "take fewer layers or n-gram rows, or make room"
        )


def _write_tensors(folder: Path, layout: _Layout, seed: int, file_bytes: int, progress: Progress) -> None:
    files = _files(layout.tensors, file_bytes)
    done, total = 0, layout.nbytes
    for file, tensors in [*files.items(), ("ngram_embedding.safetensors", layout.table)]:
        declared = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        with TensorWriter(folder / file, declared) as writer:
            for name, tensor in tensors.items():
                values = _Values(seed, name)
                for piece in tensor.pieces(values):
                    writer.append(name, piece)
                    done += piece.nbytes
                    progress(done, total)
    if len(files) > 1:
        names = {name: file for file, tensors in files.items() for name in tensors}
        names |= dict.fromkeys(layout.table, "ngram_embedding.safetensors")
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": names})


def _files(tensors: Mapping[str, _Tensor], file_bytes: int) -> dict[str, dict[str, _Tensor]]:
    """The tensors by file: full files in order, tensors never split."""
    parts: list[dict[str, _Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{part + 1:05}-of-{len(parts):05}.safetensors": tensors for part, tensors in enumerate(parts)}


def _write_texts(folder: Path, recipe: _Recipe, layout: _Layout) -> None:
    quantization = _quantization(recipe)
    _write_json(
        folder / "config.json",
        {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen4_exp",
            "text_config": recipe.config,
            "tie_word_embeddings": recipe.config["tie_word_embeddings"],
            "quantization_config": quantization,
        },
    )
    storage = {"tensor_storage": _storage(layout)}
    _write_json(folder / "quantization_config.json", quantization | storage)
    for name, text in text_files().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _quantization(recipe: _Recipe) -> dict[str, Any]:
    def nominal(bits: float | str) -> float:
        return 4.0 if bits == "mixed" else float(bits)

    summary: dict[str, Any] = {
        "quant_method": "exl3",
        "version": FORMAT_VERSION,
        "bits": nominal(recipe.expert_bits),
        "head_bits": nominal(recipe.head_bits),
        "codebook": recipe.codebook if recipe.codebook != "mixed" else "mul1",
    }
    if recipe.config["mtp_num_hidden_layers"]:
        summary["mtp_bits"] = nominal(recipe.mtp_bits)
    return summary


def _storage(layout: _Layout) -> dict[str, Any]:
    """What each tensor group stores, as exllamav3 lists it beside the config."""
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in layout.tensors.items():
        group, _, field = name.rpartition(".")
        entry = groups.setdefault(group, {"stored_tensors": {}})
        torch_type = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I16": "int16", "I32": "int32"}
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": f"torch.{torch_type[tensor.dtype]}",
        }
        if field == "trellis" and len(tensor.shape) == 3:
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = tensor.shape[-1] / TILE
        elif field in ("mcg", "mul1"):
            entry[f"{field}_multiplier"] = MULTIPLIERS[field]
    return groups


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
