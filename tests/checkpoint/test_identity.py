"""A checkpoint's identity: the same for a copy, another one for any change that its docstring says it sees."""

import json
import os
import shutil

import numpy as np
import pytest

from isobit.checkpoint import identity as identity_module
from isobit.checkpoint.identity import checkpoint_identity, files_stamp
from isobit.checkpoint.store import TensorStore, write_tensors
from isobit.errors import CheckpointError


def identity(folder) -> str:
    with TensorStore(folder) as store:
        return checkpoint_identity(store)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for shard in "ab":
        arrays = {f"{shard}.weight": rng.random((30, 50), np.float32), f"{shard}.scale": np.ones(4, np.float16)}
        write_tensors(folder / f"model-{shard}.safetensors", arrays)
    (folder / "config.json").write_text('{"a": 1, "b": [2]}')
    return folder


def change(folder, name, place) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_copies_and_other_names_are_the_same_checkpoint(folder, tmp_path):
    copy = tmp_path / "another-name"
    shutil.copytree(folder, copy)
    (copy / "model-a.safetensors").rename(copy / "z.safetensors")
    (copy / "config.json").write_text(json.dumps({"b": [2], "a": 1}, indent=4))
    (copy / "README.md").write_text("not part of it")
    assert identity(copy) == identity(folder)
    assert len(identity(folder)) == 64


@pytest.mark.parametrize("place", [-1, -3000, -6000])
def test_any_byte_of_a_small_file_counts(folder, place):
    before = identity(folder)
    change(folder, "model-b.safetensors", place)
    assert identity(folder) != before


def test_names_shapes_the_config_and_missing_files_count(folder):
    seen = {identity(folder)}
    (folder / "config.json").write_text('{"a": 1, "b": [3]}')
    seen.add(identity(folder))
    (folder / "config.json").unlink()
    seen.add(identity(folder))
    for name, shape in (("one", (6, 2)), ("one", (2, 6)), ("two", (2, 6))):
        write_tensors(folder / "model-a.safetensors", {name: np.zeros(shape, np.float32)})
        seen.add(identity(folder))
    (folder / "model-a.safetensors").unlink()
    seen.add(identity(folder))
    assert len(seen) == 7


def test_of_a_large_file_the_stated_blocks_count(folder, monkeypatch):
    monkeypatch.setattr(identity_module, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity_module, "STRIDE_BYTES", 2000)
    monkeypatch.setattr(identity_module, "BLOCK_BYTES", 100)
    before = identity(folder)
    size = (folder / "model-a.safetensors").stat().st_size
    for place, seen in ((2000, True), (2099, True), (4050, True), (size - 1, True), (2100, False), (3999, False)):
        change(folder, "model-a.safetensors", place)
        assert (identity(folder) != before) is seen
        change(folder, "model-a.safetensors", place)
    assert identity(folder) == before


def test_a_config_that_is_no_json_is_an_error(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        identity(folder)


def test_the_stamp_of_files_changes_with_any_edit_and_with_nothing_else(folder):
    def stamp() -> str:
        with TensorStore(folder) as store:
            return files_stamp(store)

    seen = [stamp(), stamp()]
    assert len(set(seen)) == 1
    for name in ("model-a.safetensors", "model-b.safetensors", "config.json"):
        path = folder / name
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.touch()
        seen.append(stamp())
        os.utime(path, ns=times)
        assert stamp() == seen[0]
    assert len(set(seen)) == 4
    with TensorStore(folder) as store:
        (folder / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read any more"):
            files_stamp(store)


def test_files_that_are_edited_or_replaced_while_they_are_read_are_refused(folder):
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    with TensorStore(folder) as store:
        store.check_unedited()
        store.check_in_place()
        change(folder, "model-b.safetensors", -1)
        with pytest.raises(CheckpointError, match=r"model-b.safetensors was edited since it was opened"):
            store.check_unedited()
        for check in (store.check_in_place, lambda: checkpoint_identity(store)):
            with pytest.raises(
                CheckpointError, match=r"model-b.safetensors was edited or replaced since it was opened"
            ):
                check()


def test_what_was_opened_stays_as_it_was_when_others_take_its_place(folder):
    with TensorStore(folder) as store:
        path = folder / "model-a.safetensors"
        path.rename(folder / "moved")
        with pytest.raises(CheckpointError, match=r"model-a.safetensors: cannot be read any more"):
            store.check_in_place()
        before = files_stamp(store)
        path.write_bytes((folder / "moved").read_bytes())
        os.utime(path, (1e9, 1e9))
        store.check_unedited()
        assert files_stamp(store) == before
        with pytest.raises(CheckpointError, match=r"model-a.safetensors was edited or replaced"):
            checkpoint_identity(store)
