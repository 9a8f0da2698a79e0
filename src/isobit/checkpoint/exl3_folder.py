"""The texts around the tensors of an EXL3 folder: config.json, quantization_config.json, the index, tokenizer files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit.checkpoint.config import FlashNextConfig
from isobit.checkpoint.trellis import MULTIPLIERS, TILE

ARCHITECTURE = "Qwen4ExpForConditionalGeneration"
FORMAT_VERSION = "1.6.5"  # the exllamav3 release whose format this is
FILE_BYTES = 8 << 30
TABLE_FILE = "ngram_embedding.safetensors"
TORCH_TYPES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)
OUTER_KEYS = {"architectures", "auto_map", "quantization_config", "text_config", "vision_config", "model_type"}

Declared = Mapping[str, tuple[str, Sequence[int], int]]  # name -> dtype, shape, bytes


def exl3_config(source: Mapping[str, Any], config: FlashNextConfig, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a text-only EXL3 folder, from the source's: nested, in the names that exllamav3 reads."""
    text = {key: value for key, value in source.get("text_config", source).items() if key not in OUTER_KEYS}
    text["model_type"] = "qwen4_exp_text"
    text["layer_types"] = list(config.layer_types)
    text["mtp_num_hidden_layers"] = config.mtp_num_hidden_layers
    text["tie_word_embeddings"] = False
    if config.eos_token_ids:
        text["eos_token_id"] = config.eos_token_ids[0]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen4_exp",
        "text_config": text,
        "tie_word_embeddings": False,
        "quantization_config": dict(quantization),
    }


def tensor_storage(tensors: Declared) -> dict[str, Any]:
    """What each tensor group stores, as exllamav3 lists it in quantization_config.json."""
    groups: dict[str, dict[str, Any]] = {}
    for name, (dtype, shape, nbytes) in tensors.items():
        group, _, part = name.rpartition(".")
        entry = groups.setdefault(group, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(shape),
            "n_bytes": nbytes,
            "dtype": f"torch.{TORCH_TYPES[dtype]}",
        }
        if part == "trellis" and len(shape) == 3:
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = _whole(shape[-1] / TILE)
        elif part in MULTIPLIERS:
            entry[f"{part}_multiplier"] = MULTIPLIERS[part]
    return groups


def split_files(tensors: Declared, file_bytes: int = FILE_BYTES) -> dict[str, list[str]]:
    """File name -> tensor names, in order; no tensor is split."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, (_, _, nbytes) in tensors.items():
        if parts[-1] and size + nbytes > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{part + 1:05}-of-{len(parts):05}.safetensors": names for part, names in enumerate(parts)}


def write_index(folder: Path, files: Mapping[str, Sequence[str]], tensors: Declared) -> None:
    """model.safetensors.index.json, for readers that go by it."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(nbytes for _, _, nbytes in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_texts(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation config and licence, as far as the source has them."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Indented JSON with a final newline, the same bytes everywhere."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


def _whole(bits: float) -> float | int:
    return int(bits) if bits == int(bits) else bits
