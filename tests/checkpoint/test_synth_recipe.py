"""Folders with a recipe: opened as any checkpoint, the same on every machine, refused where they cannot be followed."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from isobit.checkpoint import synth_memory
from isobit.checkpoint.identity import checkpoint_identity, files_stamp
from isobit.checkpoint.inspect import inspect_folder
from isobit.checkpoint.opening import open_checkpoint, open_store
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import TensorStore, write_tensors
from isobit.checkpoint.synth import plan_layout
from isobit.checkpoint.synth_memory import MemoryStore, SyntheticCheckpoint
from isobit.checkpoint.synth_options import SynthOptions
from isobit.checkpoint.synth_recipe import RECIPE_FILE, read_recipe, recipe_digest, write_recipe
from isobit.errors import CheckpointError, IsobitError

# Of the preset "test" with seed 0: the identity of its recipe, and SHA-256 over all its tensors by name.
PINNED_IDENTITY = "7544634979559293c81aeea866db3c70796facf24f9a5b30187decf9bc52ccd8"
PINNED_VALUES = "9a13263f9f6ac3fb6484876cc3b4f32789cc7040f44eb08fa397351957dc32ce"
# SHA-256 over names, dtypes and shapes of the preset "full" with two experts.
PINNED_FULL = "93b517f811fa401515b43bb1b6082d3999f428d21dbbfe758429f63e0aa48389"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "test"
    write_recipe(folder, "test")
    return folder


@pytest.fixture
def copy(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def change(folder: Path, file: str, **fields) -> None:
    content = json.loads((folder / file).read_text())
    for name, value in fields.items():
        (content["options"] if file == RECIPE_FILE and name != "version" else content)[name] = value
    (folder / file).write_text(json.dumps(content))


def values_digest(store: TensorStore, names) -> str:
    digests = {name: hashlib.sha256(np.ascontiguousarray(store.read(name)).tobytes()).hexdigest() for name in names}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def test_the_folder_holds_no_weights_and_opens_as_a_checkpoint(folder, test_checkpoint):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 50_000
    written, made = Checkpoint(test_checkpoint), open_checkpoint(folder)
    assert isinstance(made, SyntheticCheckpoint)
    assert made.config == written.config
    assert made.stop_tokens == written.stop_tokens
    assert made.store.names == written.store.names
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (test_checkpoint / name).read_bytes()
    assert read_recipe(folder) == SynthOptions("test")


def test_a_folder_with_weights_opens_as_before(test_checkpoint):
    checkpoint = open_checkpoint(test_checkpoint)
    assert type(checkpoint) is Checkpoint
    with open_store(test_checkpoint) as store:
        assert type(store) is TensorStore


def test_identity_and_values_are_those_of_every_other_machine(folder):
    store = open_store(folder)
    assert isinstance(store, MemoryStore)
    assert checkpoint_identity(store) == PINNED_IDENTITY == recipe_digest(SynthOptions("test"))
    assert values_digest(store, store.names) == PINNED_VALUES, "give the recipe another version"


def test_the_full_preset_is_that_of_this_version():
    layout, _ = plan_layout(SynthOptions("full", layers=48, overrides={"num_experts": 16}))
    tensors = sorted((layout.tensors() | layout.table()).items())
    described = json.dumps([[name, tensor.dtype, tensor.shape] for name, tensor in tensors])
    assert hashlib.sha256(described.encode()).hexdigest() == PINNED_FULL, "give the recipe another version"


@pytest.mark.parametrize("options", [{}, {"codebook": "mixed", "bits": "mixed", "plain": ()}, {"predictable": True}])
def test_a_tensor_has_its_values_in_any_order_and_again(options, monkeypatch):
    monkeypatch.setattr(synth_memory, "POOL_VALUES", 65_537)
    one, other = (SyntheticCheckpoint("test", layers=2, **options).store for _ in range(2))
    names = one.names
    forwards = {name: one.read(name).tobytes() for name in names}
    backwards = {name: other.read(name).tobytes() for name in reversed(names)}
    assert backwards == forwards
    assert all(one.read(name).tobytes() == forwards[name] for name in names[::7])


def test_threads_read_the_same_values_and_make_each_pool_once(monkeypatch):
    monkeypatch.setattr(synth_memory, "POOL_VALUES", 65_537)
    drawn = []
    draw = synth_memory._drawn
    monkeypatch.setattr(synth_memory, "_drawn", lambda tensor, *key: drawn.append(tensor.count) or draw(tensor, *key))
    store, alone = (SyntheticCheckpoint("demo", layers=1).store for _ in range(2))
    names = [name for name in store.names if ".experts." in name and not name.endswith(".mul1")]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(store.read, names))
    made = len(drawn)
    assert all(np.array_equal(one, alone.read(name)) for one, name in zip(together, names, strict=True))
    assert len(drawn) == 2 * made == 2 * 2 * 9


def test_tensors_are_aligned_as_those_read_from_files_are(monkeypatch):
    monkeypatch.setattr(synth_memory, "POOL_VALUES", 65_537)
    store = SyntheticCheckpoint("test", layers=2, codebook="mixed", plain=(), embedding_bits=5).store
    assert {store.read(name).ctypes.data % 16 for name in store.names} == {0}


def test_scales_fit_the_codebook_that_each_layer_has():
    made = SyntheticCheckpoint("test", layers=2, codebook="mixed", plain=())
    sizes: dict[str, list[float]] = {}
    for expert in range(8):
        linear = made.linear(f"layers.0.mlp.experts.{expert}.gate_proj")
        sizes.setdefault(linear.codebook, []).append(float(np.abs(linear.svh.astype(np.float32)).max()))
    assert {"mul1"} < sizes.keys()
    ratio = max(sizes["mul1"]) / max(max(found) for codebook, found in sizes.items() if codebook != "mul1")
    assert 1.15 < ratio < 1.35


def test_a_predictable_head_follows_the_embeddings_also_where_they_are_large():
    overrides = {"vocab_size": 1024, "hidden_size": 128}
    made = SyntheticCheckpoint("test", layers=1, predictable=True, overrides=overrides)
    rows = made.store.read("model.language_model.embed_tokens.weight").astype(np.float32)
    head = made.head().weight
    assert rows.size > 1 << 16
    likeness = (rows / np.linalg.norm(rows, axis=1, keepdims=True)) @ (head / np.linalg.norm(head)).T
    following = likeness.argmax(axis=1)
    steps, counts = np.unique((following - np.arange(1024)) % 1024, return_counts=True)
    assert counts.max() > 1000
    assert steps[counts.argmax()] == 391


def test_a_copy_has_the_same_identity_and_any_option_another(folder, copy):
    (copy / "config.json").touch()
    first, second = (open_store(path) for path in (folder, copy))
    assert checkpoint_identity(first) == checkpoint_identity(second)
    assert files_stamp(first) == files_stamp(second)
    chosen = [SynthOptions("test"), SynthOptions("test", seed=1), SynthOptions("test", bits=3), SynthOptions("demo")]
    assert len({recipe_digest(options) for options in chosen}) == len(chosen)
    assert recipe_digest(SynthOptions("test", bits=3.0)) == recipe_digest(SynthOptions("test", bits=3))
    assert recipe_digest(SynthOptions("test", overrides={})) == recipe_digest(SynthOptions("test"))


def test_options_are_kept_in_the_recipe(tmp_path):
    options = {"layers": 3, "bits": 2.5, "plain": ("layers.0.*",), "overrides": {"num_experts": 4}, "predictable": True}
    write_recipe(tmp_path / "made", "test", **options)
    assert read_recipe(tmp_path / "made") == SynthOptions("test", **options)
    checkpoint = open_checkpoint(tmp_path / "made")
    assert (checkpoint.config.num_hidden_layers, checkpoint.config.num_experts) == (3, 4)


def test_inspect_tells_that_the_weights_are_made(folder, test_checkpoint):
    made, written = inspect_folder(folder), inspect_folder(test_checkpoint)
    assert made.usable
    assert (made.synthetic, written.synthetic) == (True, False)
    assert made.stored_bytes == written.stored_bytes
    assert made.mapped_bytes == 0
    assert made.resident_bytes == written.resident_bytes + written.mapped_bytes
    assert "preset test, seed 0" in made.notes[0]
    assert json.loads(json.dumps(made.as_dict()))["synthetic"] is True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 2}, "has version 2, expected 1"),
        ({"version": "1"}, 'has version "1", expected 1'),
        ({"colour": "red"}, "the option colour is unknown"),
        ({"layers": "four"}, 'layers is "four": input should be a valid integer'),
        ({"layers": 0}, "0 layers, expected 1 to 512"),
        ({"bits": 9}, "width 9.0 is unknown"),
        ({"preset": "huge"}, "preset 'huge' is unknown"),
        ({"overrides": {"hidden_act": "gelu"}}, "hidden_act"),
    ],
    ids=str,
)
def test_a_recipe_that_cannot_be_followed_is_one_line(copy, fields, said):
    change(copy, RECIPE_FILE, **fields)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(copy)
    assert said in str(caught.value)
    assert str(copy / RECIPE_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 1, "options": []}'])
def test_a_recipe_that_is_none_is_one_line(copy, text):
    (copy / RECIPE_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=RECIPE_FILE) as caught:
        open_checkpoint(copy)
    assert "\n" not in str(caught.value)


def test_another_config_than_the_recipes_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["num_experts"] = 4
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: num_experts is 4, expected 8"):
        open_checkpoint(copy)


def test_a_recipe_beside_weights_is_refused(copy):
    write_tensors(copy / "model.safetensors", {"a": np.zeros(3, np.float32)})
    for opened in (open_checkpoint, open_store, inspect_folder):
        with pytest.raises(CheckpointError, match=r"holds both isobit-synthetic\.json and model\.safetensors"):
            opened(copy)


def test_a_folder_in_use_and_bad_options_leave_nothing(tmp_path, folder):
    with pytest.raises(IsobitError, match="is not an empty folder"):
        write_recipe(folder, "test")
    with pytest.raises(IsobitError, match="width 9"):
        write_recipe(tmp_path / "bad", "test", bits=9)
    with pytest.raises(TypeError, match="colour"):
        write_recipe(tmp_path / "bad", "test", colour="red")
    assert list(tmp_path.iterdir()) == []
