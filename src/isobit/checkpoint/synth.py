"""Random but valid EXL3 checkpoints: same options, same bytes, on any machine.

Quantized linears get random trellis bits (every bit pattern is a valid tile), so nothing is searched and a checkpoint
is written at the speed of the disk, in bounded memory.
"""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobit.checkpoint.config import parse_config
from isobit.checkpoint.store import TensorWriter
from isobit.checkpoint.synth_layout import MIXED, PLAIN_TABLE, Layout, Widths
from isobit.checkpoint.synth_options import SynthOptions
from isobit.checkpoint.synth_presets import PRESETS, Preset
from isobit.checkpoint.synth_text import END_OF_TEXT, text_files
from isobit.checkpoint.synth_values import Tensor
from isobit.checkpoint.trellis import MULTIPLIERS, TILE, check_width
from isobit.checkpoint.unfinished import unfinished_folder
from isobit.checkpoint.weights import CODEBOOKS
from isobit.errors import CheckpointError, IsobitError

ARCHITECTURE = "Qwen4ExpForConditionalGeneration"
FORMAT_VERSION = "1.6.5"  # the exllamav3 release whose format this is
FILE_BYTES = 8 << 30
MAX_LAYERS = 512
TABLE_FILE = "ngram_embedding.safetensors"
TORCH_TYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "I16": "int16", "I32": "int32"}

Progress = Callable[[int, int], None]


def synthesize(
    folder: str | Path,
    preset: str = "demo",
    *,
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Write a random checkpoint as `folder`, which must not exist or be empty; it appears whole or not at all.

    preset, options: fields of SynthOptions. file_bytes: the size at which the next file is begun. progress: called with
    (bytes written, bytes in all).
    Raises IsobitError for options that make no checkpoint, a folder that is in use, or too small a disk.
    """
    layout, text_config = plan_layout(SynthOptions(preset, **options))
    files = _files(layout, file_bytes)
    size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    target = Path(folder).absolute()
    with whole_folder(target, size) as unfinished:
        write_texts(unfinished, layout, text_config)
        _write_listings(unfinished, layout, files)
        _write_tensors(unfinished, files, layout.seed, progress or (lambda done, total: None))
    return target


@contextmanager
def whole_folder(target: Path, nbytes: int) -> Iterator[Path]:
    """An empty folder to fill with about `nbytes`, which then becomes `target`; nothing is left behind on an error.

    Where `target` is a link it becomes what that points to.

    Raises IsobitError for a folder that is in use, or too small a disk.
    """
    target = Path(os.path.realpath(target))
    _check_target(target, nbytes)
    try:
        with unfinished_folder(target) as partial, _named_as(partial, target):
            yield partial
            if target.exists():
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
                target.rmdir()
            partial.rename(target)
    except OSError as error:
        raise IsobitError(
            f"{target}: cannot be written ({error.strerror}); make room for it, or name another"
        ) from None


def plan_layout(options: SynthOptions) -> tuple[Layout, dict[str, Any]]:
    """The tensors and the text config of a checkpoint; IsobitError for options that make none."""
    chosen = _preset(options.preset)
    text_config = _text_config(chosen, options)
    default = (lambda width: width) if options.bits is None else (lambda width: options.bits)
    widths = Widths(
        experts=default(chosen.expert_bits),
        head=default(chosen.head_bits) if options.head_bits is None else options.head_bits,
        mtp=default(chosen.mtp_bits) if options.mtp_bits is None else options.mtp_bits,
        others=default(chosen.bits),
        ngram=chosen.ngram_bits if options.ngram_bits is None else options.ngram_bits,
        embedding=options.embedding_bits,
    )
    _check_widths(widths, options.codebook)
    if options.predictable:
        _check_predictable(text_config, options.embedding_bits)
    layout = Layout(
        config=parse_config(text_config, "the preset with these options"),
        seed=options.seed,
        codebook=options.codebook,
        widths=widths,
        ngram_shards=options.ngram_shards,
        packed_signs=options.packed_signs,
        plain=tuple(chosen.plain if options.plain is None else options.plain),
        predictable=options.predictable,
    )
    return layout, text_config


@contextmanager
def _named_as(partial: Path, target: Path) -> Iterator[None]:
    """Let errors name the folder that was asked for, not the hidden one."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(partial), str(target))) from None


def _preset(name: str) -> Preset:
    if name not in PRESETS:
        raise IsobitError(f"preset {name!r} is unknown, expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _text_config(preset: Preset, options: SynthOptions) -> dict[str, Any]:
    layers = preset.layers if options.layers is None else options.layers
    if not 1 <= layers <= MAX_LAYERS:
        raise IsobitError(f"{layers} layers, expected 1 to {MAX_LAYERS}")
    if options.ngram_shards < 1:
        raise IsobitError(f"{options.ngram_shards} n-gram shards, expected at least 1")
    config = dict(preset.config)
    config["num_hidden_layers"] = layers
    config["layer_types"] = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    config["ple_layer_ids"] = [layer for layer in config["ple_layer_ids"] if layer <= layers] or [1]
    config["eos_token_id"] = END_OF_TEXT
    config["attention_bias"] = options.biases
    config["split_ngram_parts"] = options.ngram_shards
    if not options.mtp:
        config["mtp_num_hidden_layers"] = 0
    config |= options.overrides or {}
    if options.ngram_rows is not None:
        heads, rows = (config["ngram_size"] - 1) * config["heads_per_ngram"], options.ngram_rows
        if rows < 2 * heads:
            raise IsobitError(f"{rows} n-gram rows, expected at least {2 * heads}: 2 for each of {heads} heads")
        config["ngram_vocab_size_base"] = rows // heads
    return config


def _check_widths(widths: Widths, codebook: str) -> None:
    if codebook not in (*CODEBOOKS, MIXED):
        raise IsobitError(f"codebook {codebook!r} is unknown, expected one of {', '.join((*CODEBOOKS, MIXED))}")
    for width in (widths.experts, widths.head, widths.mtp, widths.others):
        if width == MIXED:
            continue
        try:
            check_width(width, "mul1" if codebook == MIXED else codebook)  # type: ignore[arg-type]
        except ValueError as error:
            raise IsobitError(str(error)) from None
    if widths.ngram not in (*range(1, 9), PLAIN_TABLE):
        raise IsobitError(f"n-gram width {widths.ngram} is unknown, expected 1 to 8, or 16 for a plain table")
    if widths.embedding is not None and widths.embedding not in range(1, 9):
        raise IsobitError(f"embedding width {widths.embedding} is unknown: expected 1 to 8, or nothing for plain rows")


def _check_predictable(text_config: Mapping[str, Any], embedding_bits: int | None) -> None:
    if not text_config["mtp_num_hidden_layers"]:
        raise IsobitError("a predictable checkpoint needs the MTP head that predicts; leave the head in")
    if embedding_bits is not None or text_config["tie_word_embeddings"]:
        raise IsobitError("a predictable checkpoint needs plain embeddings and a head of its own; quantize neither")


def _check_target(target: Path, nbytes: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise IsobitError(f"{target} exists and is not an empty folder; name another one, or remove it first")
    if os.path.ismount(target):
        raise IsobitError(f"{target} is where a file system is mounted; name a new folder in it")
    if target.exists() and not os.access(target, os.W_OK | os.X_OK):
        raise IsobitError(f"{target} is a folder that you may not write to; name another one")
    free = shutil.disk_usage(next(parent for parent in target.parents if parent.exists())).free
    if free < nbytes:
        raise IsobitError(
            f"{target}: the checkpoint takes {nbytes / 1e6:,.1f} MB, its disk has {free / 1e6:,.1f} MB free; "
            "take fewer layers or n-gram rows, or make room"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsobitError(f"{target}: its parent folder cannot be made ({error.strerror}); name another") from None


def _files(layout: Layout, file_bytes: int) -> dict[str, dict[str, Tensor]]:
    """The tensors by file name, in order; the n-gram tables have a file of their own, and no tensor is split."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in layout.tensors().items():
        if parts[-1] and size + tensor.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{part + 1:05}-of-{len(parts):05}.safetensors" for part in range(len(parts))]
    files = dict(zip(names if len(parts) > 1 else ["model.safetensors"], parts, strict=True))
    table = layout.table()
    return files | {TABLE_FILE: table} if table else files


def _write_tensors(folder: Path, files: Mapping[str, Mapping[str, Tensor]], seed: int, progress: Progress) -> None:
    done, total = 0, sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    for file, tensors in files.items():
        declared = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        with TensorWriter(folder / file, declared) as writer:
            for name, tensor in tensors.items():
                for piece in tensor.pieces(seed, name):
                    writer.append(name, piece)
                    done += piece.nbytes
                    progress(done, total)


def write_texts(folder: Path, layout: Layout, text_config: Mapping[str, Any]) -> None:
    """Write what surrounds the tensors: config.json, the tokenizer and the chat template."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen4_exp",
        "text_config": text_config,
        "tie_word_embeddings": text_config["tie_word_embeddings"],
        "quantization_config": _quantization(layout),
    }
    write_json(folder / "config.json", config)
    for name, text in text_files().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def _write_listings(folder: Path, layout: Layout, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write which tensors there are, and in which files."""
    storage = {**_quantization(layout), "tensor_storage": _storage(files)}
    write_json(folder / "quantization_config.json", storage)
    if "model.safetensors" not in files:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


def _quantization(layout: Layout) -> dict[str, Any]:
    def nominal(width: float | str) -> float:
        return 4.0 if width == MIXED else float(width)

    quantization: dict[str, Any] = {
        "quant_method": "exl3",
        "version": FORMAT_VERSION,
        "bits": nominal(layout.widths.experts),
        "head_bits": nominal(layout.widths.head),
        "codebook": "mul1" if layout.codebook == MIXED else layout.codebook,
    }
    return quantization | ({"mtp_bits": nominal(layout.widths.mtp)} if layout.config.has_mtp else {})


def _storage(files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """What each tensor group stores, as exllamav3 lists it in quantization_config.json."""
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in (
        (name, tensor) for file in files if file != TABLE_FILE for name, tensor in files[file].items()
    ):
        group, _, part = name.rpartition(".")
        entry = groups.setdefault(group, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": f"torch.{TORCH_TYPES[tensor.dtype]}",
        }
        if part == "trellis" and len(tensor.shape) == 3:
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = tensor.shape[-1] / TILE
        elif part in MULTIPLIERS:
            entry[f"{part}_multiplier"] = MULTIPLIERS[part]
    return groups


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, indented; the same bytes for the same content."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")
