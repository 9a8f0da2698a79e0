"""`isobit inspect`: what it counts, what it names, and its exit codes."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from isobit.checkpoint import inspect as inspect_module
from isobit.checkpoint.inspect import inspect_folder
from isobit.checkpoint.store import TensorStore
from isobit.checkpoint.synth_recipe import write_recipe
from isobit.checkpoint.synth_text import text_files
from isobit.cli.inspect import inspect, size
from isobit.errors import CheckpointError
from tests.checkpoint import tiny

QKV = "model.language_model.layers.0.linear_attn.in_proj_qkv"
TABLE = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding"


def run(*arguments):
    app = typer.Typer()
    app.command()(inspect)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(folder, *arguments):
    """A checkpoint with its tokenizer."""
    folder.mkdir(exist_ok=True)
    for name, content in text_files().items():
        folder.joinpath(name).write_text(content, encoding="utf-8")
    (folder / "generation_config.json").unlink()
    return tiny.write(folder, *arguments)


def report_of(folder, name):
    return next(report for report in inspect_folder(folder).classes if report.name == name)


def test_every_stored_byte_is_counted_once(tmp_path):
    inspection = inspect_folder(write(tmp_path))
    with TensorStore(tmp_path) as store:
        sizes = {name: store.info(name).nbytes for name in store.names}
    assert inspection.usable
    assert inspection.stored_bytes == sum(n for name, n in sizes.items() if not name.endswith(".mul1"))
    assert inspection.mapped_bytes == sum(n for name, n in sizes.items() if name.startswith(TABLE))
    assert inspection.layers == {"delta": 1, "attention": 1, "ngram": 1, "mtp": 1}
    assert inspection.notes == []


def test_widths_and_codebooks_are_counted_by_class(tmp_path):
    arrays = tiny.tensors()
    rng = np.random.default_rng(0)
    for part in ("suh", "svh", "mul1"):
        del arrays[f"{QKV}.{part}"]
    arrays |= tiny.quantized(QKV, 128, 128, 3.5, rng)
    z = QKV.replace("in_proj_qkv", "in_proj_z")
    arrays |= {name.replace("mul1", "mcg"): array for name, array in tiny.quantized(z, 128, 128, 6, rng).items()}
    del arrays[f"{z}.mul1"]
    arrays[f"{z}.mcg"] = tiny.marker(tiny.MCG)
    report = report_of(tiny.write(tmp_path, arrays), "delta")
    assert report.widths["3.5"] == 128 * 128
    assert report.widths["6"] == 128 * 64
    assert report.widths["2"] == 64 * 128
    assert report.widths["F16"] == 2 * 4 * 128
    assert report.codebooks == {"mul1": 2, "mcg": 1}
    experts = report_of(tmp_path, "experts")
    assert experts.groups == 2 * 2 * 3
    assert experts.weights == 12 * 64 * 128
    assert report_of(tmp_path, "ngram").widths == {"2": 40 * 160}


def test_plain_layers_take_four_bytes_a_weight_in_memory(tmp_path):
    report = report_of(tiny.write(tmp_path), "mixers")
    assert report.stored_bytes < report.resident_bytes == 4 * report.weights


def test_each_group_that_cannot_be_used_is_named_with_its_reason(tmp_path):
    arrays = tiny.tensors()
    arrays[f"{QKV}.mul1"] = tiny.marker(1)
    del arrays["lm_head.trellis"]
    del arrays[f"{TABLE}.trellis"]
    inspection = inspect_folder(write(tmp_path, arrays))
    assert not inspection.usable
    assert inspection.problems.keys() == {"layers.0.linear_attn.in_proj_qkv"}
    assert "expected 0x83dcd12d" in inspection.problems["layers.0.linear_attn.in_proj_qkv"]
    assert inspection.missing.keys() == {"lm_head", "layers.0.ple.ple_embedding.ngram_embedding"}


def test_what_is_not_used_is_noted(tmp_path):
    arrays = {name: array for name, array in tiny.tensors().items() if not name.startswith("mtp.")}
    arrays["model.visual.patch.weight"] = np.zeros((2, 3), np.float32)
    config = tiny.config_json(sparkle=True)
    notes = inspect_folder(write(tmp_path, arrays, config)).notes
    assert len(notes) == 3
    assert "without drafts" in notes[0]
    assert "sparkle" in notes[1]
    assert "1 tensor is not part of the text model (24 bytes)" in notes[2]
    assert "model.visual.patch.weight" in notes[2]


def test_tensors_of_a_group_that_does_not_parse_are_not_foreign(tmp_path):
    arrays = tiny.tensors()
    arrays["lm_head.trellis"] = arrays["lm_head.trellis"].astype(np.float16)
    norm = next(name for name in arrays if name.endswith("norm.weight"))
    arrays[norm] = arrays[norm].astype(np.int16)
    inspection = inspect_folder(write(tmp_path, arrays))
    assert len(inspection.problems) == 2
    assert inspection.notes == []


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", "{}"), ("chat_template.jinja", "{% if %}")])
def test_a_tokenizer_that_cannot_be_used_is_a_problem(tmp_path, name, content):
    write(tmp_path)
    tmp_path.joinpath(name).write_text(content, encoding="utf-8")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert f"tokenizer or chat template does not parse: {tmp_path / name}" in result.stdout
    assert "parses." not in result.stdout


def test_what_a_folder_does_without_is_noted(tmp_path):
    write(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 128, -1]}', encoding="utf-8")
    inspection = inspect_folder(tmp_path)
    assert inspection.usable
    assert len(inspection.notes) == 2
    assert inspection.notes[0].startswith("there is no chat template")
    assert inspection.notes[1].endswith("the vocabulary has none of them: [-1, 128]")


def test_it_reads_headers_alone(tmp_path, monkeypatch):
    write(tmp_path)
    read = TensorStore.read

    def read_marker(store, name):
        assert name.endswith(".mul1"), name
        return read(store, name)

    monkeypatch.setattr(TensorStore, "read", read_marker)
    monkeypatch.delattr(TensorStore, "map")
    assert inspect_folder(tmp_path).usable


def test_of_a_recipe_no_random_value_is_drawn(tmp_path, monkeypatch):
    write_recipe(tmp_path / "recipe", "test")
    monkeypatch.setattr(np.random, "PCG64", lambda seed: pytest.fail("a generator was made"))
    assert inspect_folder(tmp_path / "recipe").usable


def test_progress_is_told_up_to_the_last_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_module, "GROUPS_A_STEP", 10)
    told = []
    inspect_folder(tiny.write(tmp_path), lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(0, told[0][1], 10))
    assert len({total for _, total in told}) == 1


def test_the_command_shows_how_far_it_is_on_a_terminal_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for terminal, shown in ((True, True), (False, False)):
        stream = io.StringIO()
        stream.isatty = lambda terminal=terminal: terminal
        with redirect_stderr(stream), redirect_stdout(io.StringIO()):
            inspect(write(tmp_path / str(terminal)))
        assert ("reading headers" in stream.getvalue()) == shown


def test_the_command_shows_a_table_and_says_that_all_is_well(tmp_path):
    result = run(write(tmp_path))
    assert result.exit_code == 0
    assert "1 DeltaNet and 1 sparse attention layers" in result.stdout
    for word in ("shared expert", "mul1", "ngram", "Every tensor group parses."):
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_command_prints_one_json_object(tmp_path):
    result = run(write(tmp_path), "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == 0
    assert value["usable"]
    assert value["stored_bytes"] == sum(report["stored_bytes"] for report in value["classes"])
    assert value["missing"] == value["problems"] == {}


def test_the_command_fails_when_a_group_does_not_parse(tmp_path):
    arrays = tiny.tensors()
    arrays[f"{QKV}.suh"] = np.ones(7, np.float16)
    result = run(write(tmp_path, arrays))
    assert result.exit_code == 1
    assert "layers.0.linear_attn.in_proj_qkv does not parse" in result.stdout
    assert "Every tensor group parses." not in result.stdout
    assert run(tmp_path, "--json").exit_code == 1


def test_many_problems_are_cut_short(tmp_path):
    arrays = {name: array for name, array in tiny.tensors().items() if not name.endswith(".suh")}
    result = run(write(tmp_path, arrays))
    assert result.exit_code == 1
    assert "--json lists all" in result.stdout


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path):
    assert isinstance(run(tmp_path).exception, CheckpointError)


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(0, "-"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 << 29, "2.50 GiB")]
)
def test_sizes_read_well(nbytes, shown):
    assert size(nbytes) == shown
