"""Recipes: folders that say how their synthetic weights are made in memory, instead of holding them."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from isobit.checkpoint.synth import plan_layout, whole_folder, write_json, write_texts
from isobit.checkpoint.synth_options import SynthOptions
from isobit.errors import CheckpointError

RECIPE_FILE = "isobit-synthetic.json"
RECIPE_VERSION = 1  # of the file and of the values: another one where the same options give other tensors
FOLDER_BYTES = 1 << 20  # more than a recipe's folder takes

MAKE_AGAIN = "make the folder again: isobit synth DIR --in-memory"


def write_recipe(folder: str | Path, preset: str = "demo", **options: Any) -> int:
    """Write a folder without weights, to be opened as `SyntheticCheckpoint`; returns how many bytes they will have.

    preset, options: fields of SynthOptions. Raises IsobitError as `synthesize` does.
    """
    chosen = SynthOptions(preset, **options)
    layout, text_config = plan_layout(chosen)
    with whole_folder(Path(folder).absolute(), FOLDER_BYTES) as unfinished:
        write_texts(unfinished, layout, text_config)
        write_json(unfinished / RECIPE_FILE, _content(chosen))
    tensors = layout.tensors() | layout.table()
    return sum(tensor.nbytes for tensor in tensors.values())


def has_recipe(folder: str | Path) -> bool:
    """Whether a folder's weights are made from a recipe; CheckpointError if it holds weights as well."""
    path = Path(folder) / RECIPE_FILE
    if not path.is_file():
        return False
    weights = next((file for file in path.parent.glob("*.safetensors") if not file.name.startswith(".")), None)
    if weights is not None:
        raise CheckpointError(
            f"{path.parent}: holds both {RECIPE_FILE} and {weights.name}, expected a recipe or weights; remove what "
            "does not belong to this checkpoint"
        )
    return True


def read_recipe(folder: str | Path) -> SynthOptions:
    """The options in a folder's recipe; CheckpointError for a version, an option or a value that isobit does not know.

    Options that the file leaves out have their defaults.
    """
    path = Path(folder) / RECIPE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); {MAKE_AGAIN}") from None
    if not isinstance(content, dict) or content.keys() != {"version", "options"}:
        raise CheckpointError(f"{path}: expected an object of version and options; {MAKE_AGAIN}")
    version = content["version"]
    if type(version) is not int or version != RECIPE_VERSION:
        raise CheckpointError(
            f"{path}: has version {json.dumps(version)}, expected {RECIPE_VERSION}, whose values this isobit makes; "
            f"take the isobit that wrote it, or {MAKE_AGAIN}"
        )
    try:
        return TypeAdapter(SynthOptions).validate_json(json.dumps(content["options"]))
    except ValidationError as error:
        raise CheckpointError(f"{path}: {_problem(error)}; {MAKE_AGAIN}") from None


def recipe_digest(options: SynthOptions) -> str:
    """SHA-256, hexadecimal, over a recipe's version and options: it stands for all tensors made from them."""
    return hashlib.sha256(json.dumps(_content(options), sort_keys=True).encode()).hexdigest()


def _content(options: SynthOptions) -> dict[str, Any]:
    """The recipe as JSON: every option, what says the same written in the same way."""
    values = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in asdict(options).items()
    }
    return {"version": RECIPE_VERSION, "options": values | {"overrides": options.overrides or None}}


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    option = ".".join(str(part) for part in first["loc"][:1]) or "options"
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"the option {option} is unknown"
    return f"{option} is {json.dumps(first['input'], default=str)[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}"
