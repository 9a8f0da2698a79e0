"""From a Hugging Face folder to an EXL3 folder that the reader loads, through interruptions and bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from isobit.checkpoint import convert as module
from isobit.checkpoint.convert import ConvertOptions, convert
from isobit.checkpoint.names import published_name, required_tensors
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import write_tensors
from isobit.checkpoint.trellis import dequantize, dequantize_ngram_rows
from isobit.checkpoint.weights import Exl3Linear, PlainEmbedding, PlainLinear
from isobit.errors import CheckpointError, IsobitError
from tests.checkpoint import tiny

OPTIONS = ConvertOptions(bits=6, head_bits=7, mtp_bits=3.5, ngram_bits=5)
SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "num_experts": 1,
    "ple_layer_ids": None,
    "mtp_num_hidden_layers": 0,
}
COMMAND = "import typer; from isobit.cli.convert import convert; typer.run(convert)"
TABLE_ROWS = 128


def source_tensors(**changes: Any) -> dict[str, np.ndarray]:
    """What Hugging Face stores: plain weights, fused experts, the n-gram table in shards; bfloat16-exact values."""
    rng = np.random.default_rng(9)
    config = tiny.config(**changes)
    arrays: dict[str, np.ndarray] = {}
    for group in required_tensors(config):
        name = published_name(group.name)
        if group.kind == "vector":
            arrays[name + group.suffix] = tiny.floats(rng, group.shape)
        elif group.kind == "ngram":
            owner = name.rpartition(".")[0]
            arrays[f"{owner}.ngram_heads_offsets"] = np.array([0, 17], np.int64)
            arrays[f"{owner}.ngram_heads_vocab_sizes"] = np.array([17, 19], np.int64)
            arrays[f"{owner}.layer_multipliers"] = np.array([3, 5, 7], np.int64)
            for shard in range(2):
                arrays[f"{name}.shard_{shard}.weight"] = bell(rng, TABLE_ROWS // 2, group.in_features) + np.float32(1)
        else:
            arrays[f"{name}.weight"] = bell(rng, group.out_features, group.in_features)
    return fused(arrays, config.num_experts)


def bell(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Nearly Gaussian float32 that bfloat16 and float16 hold exactly."""
    return (rng.integers(-8, 8, (*shape, 4)).sum(axis=-1) / 128).astype(np.float32)


def fused(arrays: dict[str, np.ndarray], experts: int) -> dict[str, np.ndarray]:
    """The layers' experts as two tensors, gate before up; the MTP head's stay one by one."""
    for first in [name for name in arrays if name.endswith(".mlp.experts.0.gate_proj.weight")]:
        block = first.removesuffix(".0.gate_proj.weight")
        if block.startswith("mtp."):
            continue
        gate, up, down = (
            np.stack([arrays.pop(f"{block}.{e}.{part}_proj.weight") for e in range(experts)])
            for part in ("gate", "up", "down")
        )
        arrays[f"{block}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        arrays[f"{block}.down_proj"] = down
    return arrays


def write_source(folder: Path, arrays: dict[str, np.ndarray], bf16: bool = True, **changes: Any) -> Path:
    """Two files and a stale index, with a vision tower, tokenizer files and several end tokens."""
    folder.mkdir()
    outer = tiny.config_json(eos_token_id=[5, 9], **changes)
    outer |= {"architectures": ["Qwen4ExpForConditionalGeneration"], "vision_config": {"depth": 1}, "image_token_id": 3}
    (folder / "config.json").write_text(json.dumps(outer))
    (folder / "preprocessor_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f"content of {name}")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"gone": "gone.safetensors"}}')
    arrays = {**arrays, "model.visual.blocks.0.weight": np.ones((4, 4), np.float32)}
    names = sorted(arrays)
    for part, chosen in enumerate((names[::2], names[1::2])):
        floats = tuple(name for name in chosen if bf16 and arrays[name].dtype == np.float32)
        stored = {name: tiny.bfloat16(arrays[name]) if name in floats else arrays[name] for name in chosen}
        write_tensors(folder / f"model-{part + 1:05}-of-00002.safetensors", stored, floats)
    return folder


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return source_tensors()


@pytest.fixture(scope="module")
def source(arrays, tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("hf") / "model", arrays)


@pytest.fixture(scope="module")
def converted(source) -> Path:
    return convert(source, source.parent / "exl3", OPTIONS)


@pytest.fixture(scope="module")
def small_source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("small") / "model", source_tensors(**SMALL), **SMALL)


@pytest.fixture(scope="module")
def small_converted(small_source) -> Path:
    return convert(small_source, small_source.parent / "whole", ConvertOptions(8))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_linear_is_close_to_the_source_at_its_width(source, converted):
    limits = {6: 0.0005, 7: 0.00012, 3.5: 0.011}
    with Checkpoint(source) as before, Checkpoint(converted) as after:
        for group in after.groups.values():
            if group.kind != "linear":
                continue
            plain, linear = before.source(group.name), after.linear(group.name)
            if not group.quantizable:
                assert isinstance(linear, PlainLinear)
                assert np.array_equal(linear.weight, plain.weight)
                continue
            assert isinstance(linear, Exl3Linear)
            assert linear.bits == OPTIONS.width(group)
            assert linear.codebook == "mul1"
            error = np.square(dequantize(linear) - plain.weight.T).sum() / np.square(plain.weight).sum()
            assert error < limits[linear.bits], group.name
        assert {group.tensor_class for group in after.groups.values()} >= {"head", "mtp", "experts", "attention"}


def test_plain_tensors_are_copied_bit_by_bit(source, converted):
    with Checkpoint(source) as before, Checkpoint(converted) as after:
        for group in after.groups.values():
            if group.kind == "vector":
                assert np.array_equal(before.vector(group.name), after.vector(group.name))
        embedding = after.embedding()
        assert isinstance(embedding, PlainEmbedding)
        assert embedding.bfloat16
        assert np.array_equal(embedding.rows, before.embedding().rows)


def test_ngram_rows_are_close_to_the_source(arrays, converted):
    with Checkpoint(converted) as after:
        table = after.ngram_table(0)
    assert (table.bits, table.shard_rows, len(table.shards)) == (5, TABLE_ROWS // 2, 2)
    assert (table.offsets.tolist(), table.sizes.tolist()) == ([0, 17], [17, 19])
    assert table.multipliers.tolist() == [3, 5, 7]
    plain = arrays[table.name + ".shard_0.weight"][:36].astype(np.float64)
    bias = np.repeat(table.head_bias, [17, 19], axis=0)
    centred = plain - bias
    np.testing.assert_allclose(table.head_bias[1], plain[17:36].mean(axis=0), atol=0.001)
    rows = dequantize_ngram_rows(np.array(table.shards[0][:36]), 5, bias)
    assert np.square(rows - plain).sum() < 0.003 * np.square(centred).sum()


def test_the_folder_is_text_only_and_complete(source, converted):
    names = {path.name for path in converted.iterdir()}
    assert names == {
        "config.json",
        "quantization_config.json",
        "generation_config.json",
        "model.safetensors",
        "ngram_embedding.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["Qwen4ExpForConditionalGeneration"]
    assert config["text_config"]["eos_token_id"] == 5
    assert "vision_config" not in config
    assert config["quantization_config"] == {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": 6,
        "head_bits": 7,
        "codebook": "mul1",
        "mtp_bits": 3.5,
    }
    storage = json.loads((converted / "quantization_config.json").read_text())["tensor_storage"]
    assert storage["lm_head"]["bits_per_weight"] == 7
    assert storage["lm_head"]["mul1_multiplier"] == 0x83DCD12D
    assert storage["lm_head"]["stored_tensors"]["lm_head.trellis"]["shape"] == [8, 8, 112]
    with Checkpoint(converted) as checkpoint:
        assert checkpoint.stop_tokens == {5, 9}
        assert not [name for name in checkpoint.store.names if "visual" in name]
    assert not (converted.parent / "exl3.converting").exists()
    assert (converted / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_a_killed_conversion_goes_on_where_it_was(small_source, small_converted, monkeypatch):
    target = small_source.parent / "killed"
    command = [sys.executable, "-c", COMMAND, str(small_source), str(target), "--bits", "8", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        pieces = target.with_name("killed.converting") / "pieces"
        wait_until(lambda: pieces.is_dir() and len(list(pieces.glob("*.npz"))) >= 2, process)
        process.send_signal(signal.SIGKILL)
    finished = len(list(pieces.glob("*.npz")))
    assert not target.exists()
    (pieces / ".lm_head.partial").write_bytes(b"half of it")
    made: list[str] = []
    real = module.quantize_linear

    def counted(*args: Any, name: str, **kwargs: Any) -> Exl3Linear:
        made.append(name)
        return real(*args, name=name, **kwargs)

    monkeypatch.setattr(module, "quantize_linear", counted)
    seen: list[tuple[int, int]] = []
    convert(small_source, target, ConvertOptions(8), progress=lambda done, total: seen.append((done, total)))
    with Checkpoint(target) as checkpoint:
        linears = [group for group in checkpoint.groups.values() if group.quantizable and group.kind == "linear"]
    assert len(made) == len(linears) - finished
    assert seen == sorted(seen)
    assert seen[-1] == (seen[-1][1], seen[-1][1])
    assert contents(target) == contents(small_converted)
    assert not pieces.exists()


def wait_until(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the conversion ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_other_options_or_another_source_do_not_go_on(small_source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "quantize_linear", interrupt)
    target = tmp_path / "exl3"
    with pytest.raises(KeyboardInterrupt):
        convert(small_source, target, ConvertOptions(8))
    with pytest.raises(IsobitError, match=r"exl3\.converting.*another bits \(8 there, 7 now\)"):
        convert(small_source, target, ConvertOptions(7))
    os.utime(small_source / "model-00001-of-00002.safetensors")
    with pytest.raises(IsobitError, match="another source"):
        convert(small_source, target, ConvertOptions(8))
    assert not target.exists()


@pytest.mark.parametrize("moment", ["a piece", "the output"])
def test_a_source_that_is_edited_meanwhile_is_named_and_nothing_made_of_it_is_kept(
    small_source, tmp_path, monkeypatch, moment
):
    source, target = Path(shutil.copytree(small_source, tmp_path / "source")), tmp_path / "exl3"
    file = source / "model-00001-of-00002.safetensors"
    real = module._write_output

    def edit(*arguments: Any) -> None:
        file.write_bytes(file.read_bytes())

    def write_and_edit(*arguments: Any) -> None:
        real(*arguments)
        edit()

    if moment == "the output":
        monkeypatch.setattr(module, "_write_output", write_and_edit)
    with pytest.raises(CheckpointError, match=rf"{file.name} was edited since it was opened"):
        convert(source, target, ConvertOptions(8), progress=edit if moment == "a piece" else None)
    assert not target.exists()
    assert bool(list(target.with_name("exl3.converting").glob("pieces/*"))) == (moment == "the output")
    with pytest.raises(IsobitError, match="another source"):
        convert(source, target, ConvertOptions(8))


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_two_conversions_cannot_share_a_work_folder(small_source, tmp_path, monkeypatch):
    target = tmp_path / "exl3"

    def start_another(*args: Any, **kwargs: Any) -> None:
        convert(small_source, target, ConvertOptions(8))

    monkeypatch.setattr(module, "quantize_linear", start_another)
    with pytest.raises(IsobitError, match="in use by another conversion"):
        convert(small_source, target, ConvertOptions(8))


def test_a_damaged_piece_is_named(small_source, tmp_path, monkeypatch):
    target = tmp_path / "exl3"
    pieces = tmp_path / "exl3.converting" / "pieces"
    monkeypatch.setattr(module, "quantize_linear", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "stored_tensors", lambda linear: {"trellis": np.zeros(1)})
    with pytest.raises(IsobitError):
        convert(small_source, target, ConvertOptions(8))
    for piece in pieces.glob("*.npz"):
        piece.write_bytes(b"not a zip file")
    with pytest.raises(IsobitError, match=r"is damaged; remove this file"):
        convert(small_source, target, ConvertOptions(8))
    assert not target.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ConvertOptions(9), "--bits: width 9 is unknown"),
        (ConvertOptions(float("nan")), "--bits: width nan is unknown"),
        (ConvertOptions(2.5, codebook="mcg"), "--bits: width 2.5 exists with codebook mul1 only"),
        (ConvertOptions(4, head_bits=0), "--head-bits: width 0 is unknown"),
        (ConvertOptions(4, mtp_bits=3.5, codebook="3inst"), "--mtp-bits: width 3.5 exists with codebook mul1 only"),
        (ConvertOptions(4, ngram_bits=9), "--ngram-bits is 9"),
        (ConvertOptions(4, codebook="mul2"), "--codebook is mul2"),
        (ConvertOptions(4, mtp_bits=4), "no MTP head"),
        (ConvertOptions(4, ngram_bits=4), "no n-gram table"),
    ],
)
def test_options_that_make_no_checkpoint(small_source, tmp_path, options, message):
    with pytest.raises(IsobitError, match=message):
        convert(small_source, tmp_path / "exl3", options)
    assert not list(tmp_path.iterdir())


def test_a_target_that_exists_is_refused(small_source, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file", small_source):
        with pytest.raises(IsobitError, match="exists already"):
            convert(small_source, target, ConvertOptions(8))


def test_a_quantized_source_is_refused(small_converted, tmp_path):
    with pytest.raises(IsobitError, match="quantized already"):
        convert(small_converted, tmp_path / "again", ConvertOptions(8))


def test_a_source_that_lacks_a_tensor_is_refused_before_any_work(tmp_path):
    arrays = source_tensors(**SMALL)
    del arrays["lm_head.weight"]
    source = write_source(tmp_path / "model", arrays, **SMALL)
    with pytest.raises(IsobitError, match="lm_head"):
        convert(source, tmp_path / "exl3", ConvertOptions(8))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.0.linear_attn.in_proj_qkv", "model.language_model.embed_tokens"]
)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, name):
    arrays = source_tensors(**SMALL)
    arrays[f"{name}.weight"][3, 5] = np.nan
    source = write_source(tmp_path / "model", arrays, bf16=False, **SMALL)
    with pytest.raises(IsobitError, match=name):
        convert(source, tmp_path / "exl3", ConvertOptions(8))
    assert not (tmp_path / "exl3").exists()


def test_a_small_disk_is_refused_before_any_work(small_source, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(IsobitError, match=r"MB of disk, 0\.0 MB are free"):
        convert(small_source, tmp_path / "exl3", ConvertOptions(8))


def test_what_the_result_will_lack_is_noted(tmp_path):
    arrays = {name: array for name, array in source_tensors().items() if not name.startswith("mtp.")}
    source = write_source(tmp_path / "model", arrays)
    (source / "tokenizer.json").unlink()
    with Checkpoint(source) as checkpoint:
        notes = module.make_plan(checkpoint, ConvertOptions(4)).notes
    assert len(notes) == 2
    assert "no tokenizer.json" in notes[0]
    assert "MTP head" in notes[1]


def test_a_tied_head_is_stored_by_itself(tmp_path):
    tied = {**SMALL, "tie_word_embeddings": True}
    arrays = source_tensors(**SMALL)
    del arrays["lm_head.weight"]
    source = write_source(tmp_path / "model", arrays, **tied)
    plan = module.make_plan(Checkpoint(source), ConvertOptions(4, head_bits=6, codebook="3inst"))
    assert plan.outputs["lm_head.trellis"].shape == (8, 8, 96)
    assert not [name for name in plan.outputs if name.endswith((".mul1", ".mcg"))]
    job = next(job for job in plan.jobs if job.key == "lm_head")
    assert job.run(lambda weights: None)["trellis"].shape == (8, 8, 96)


def test_the_command_says_what_it_costs(small_source, tmp_path):
    import typer

    from isobit.cli.convert import convert as command

    app = typer.Typer()
    app.command()(command)
    target = tmp_path / "exl3"
    arguments = [str(small_source), str(target), "--bits", "8", "--codebook", "mcg", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Quantizing 0.16 M weights on the CPU: about" in result.output
    assert "small models" in result.output
    assert "note:" not in result.output
    with Checkpoint(target) as checkpoint:
        assert checkpoint.head().codebook == "mcg"
    wrong = CliRunner().invoke(app, [str(small_source), str(target), "--bits", "four"])
    assert isinstance(wrong.exception, IsobitError)
    assert "--bits is four" in str(wrong.exception)
