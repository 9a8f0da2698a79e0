"""Synthetic checkpoints: the same bytes everywhere, readable, complete, and lively enough to test a model with."""

import hashlib
import json
import math
import os
import stat
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from isobit.checkpoint import ngram_constants, synth_predictable, synth_values
from isobit.checkpoint.config import parse_config
from isobit.checkpoint.inspect import inspect_folder
from isobit.checkpoint.names import published_name, required_tensors
from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import TensorStore
from isobit.checkpoint.synth import synthesize
from isobit.checkpoint.synth_predictable import successor_step
from isobit.checkpoint.synth_presets import PRESETS
from isobit.checkpoint.synth_text import END_OF_TEXT, END_OF_TURN
from isobit.checkpoint.synth_values import Values
from isobit.checkpoint.weights import Exl3Linear, PlainLinear, QuantizedEmbedding
from isobit.errors import IsobitError

VARIANTS = {
    "preset": {},
    "mixed": {"codebook": "mixed", "bits": "mixed", "plain": (), "layers": 5, "seed": 3},
    "3inst": {"codebook": "3inst", "bits": 2, "head_bits": 8, "mtp_bits": 1, "plain": ()},
    "mcg": {"codebook": "mcg", "bits": 6},
    "half widths": {"bits": 2.5, "head_bits": 3.5, "mtp_bits": 1.5, "plain": ("layers.*",)},
    "old signs, biases": {"packed_signs": True, "biases": True, "plain": ()},
    "embedding and table": {"embedding_bits": 5, "ngram_bits": 1, "ngram_shards": 3},
    "plain table": {"ngram_bits": 16, "ngram_shards": 4},
    "no MTP": {"mtp": False, "layers": 1},
    "many files": {"file_bytes": 1 << 20, "seed": 1},
    "odd sizes": {"overrides": {"vocab_size": 300, "hidden_size": 192, "moe_intermediate_size": 72}},
    "two tables": {"layers": 6, "overrides": {"ple_layer_ids": [1, 6], "hc_count": 2}},
    "predictable": {"predictable": True, "seed": 2},
    "tied": {"overrides": {"tie_word_embeddings": True}},
}
# SHA-256 of the files that the preset "test" writes with seed 0.
PINNED = {
    "model.safetensors": "eb2f89c16ab9e392e2cb55b81f8a95cfbc0921197deaf401f934f33ba9b9c9c9",
    "ngram_embedding.safetensors": "70257c32db3b9a02bc6e3f91fb26d5bc3224d825d3628272dc3fff1fa40ddcb2",
}


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def linears(checkpoint: Checkpoint) -> list[Exl3Linear | PlainLinear]:
    return [checkpoint.linear(group.name) for group in checkpoint.groups.values() if group.kind == "linear"]


def quantized(checkpoint: Checkpoint) -> list[Exl3Linear]:
    return [linear for linear in linears(checkpoint) if isinstance(linear, Exl3Linear)]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_is_complete_and_loads(make_checkpoint, options):
    folder = make_checkpoint("test", **options)
    inspection = inspect_folder(folder)
    assert inspection.usable, (inspection.missing, inspection.problems)
    checkpoint = Checkpoint(folder)
    for group in checkpoint.groups.values():
        if group.kind == "linear":
            linear = checkpoint.linear(group.name)
            assert (linear.in_features, linear.out_features) == (group.in_features, group.out_features)
            assert (linear.bias is not None) == group.bias
        elif group.kind == "vector":
            assert np.isfinite(checkpoint.vector(group.tensor)).all()
    assert checkpoint.embedding().hidden == checkpoint.config.hidden_size
    for layer in checkpoint.config.ple_layers:
        table = checkpoint.ngram_table(layer)
        assert sum(len(shard) for shard in table.shards) >= table.offsets[-1] + table.sizes[-1]
    assert checkpoint.config.unknown_keys == ()
    assert checkpoint.has_mtp == options.get("mtp", True)


def test_nothing_is_written_that_the_model_does_not_need(test_checkpoint):
    store = TensorStore(test_checkpoint)
    groups = {published_name(group.name) for group in required_tensors(Checkpoint(test_checkpoint).config)}
    strays = [name for name in store.names if not any(name == g or name.startswith(f"{g}.") for g in groups)]
    assert strays == []


def test_same_seed_same_bytes(tmp_path, test_checkpoint):
    again = synthesize(tmp_path / "again", "test")
    assert digests(again) == digests(test_checkpoint)


def test_the_bytes_are_those_of_every_other_machine(test_checkpoint):
    written = digests(test_checkpoint)
    assert {name: written[name] for name in PINNED} == PINNED


def test_another_seed_changes_every_random_tensor(make_checkpoint, test_checkpoint):
    one, other = TensorStore(test_checkpoint), TensorStore(make_checkpoint("test", seed=1))
    same = [name for name in one.names if np.array_equal(one.map(name), other.map(name))]
    constants = ("mul1", "head_offsets", "head_vocab_sizes", "layer_multipliers")
    assert {name.rpartition(".")[2] for name in same} == set(constants)


def test_a_tensor_keeps_its_bytes_whatever_is_written_around_it(make_checkpoint, test_checkpoint):
    store = TensorStore(test_checkpoint)
    other = TensorStore(make_checkpoint("test", mtp=False, file_bytes=1 << 20, ngram_bits=16))
    common = [name for name in other.names if name in store and "ple_embedding" not in name]
    assert len(common) > 200
    assert all(np.array_equal(store.map(name), other.map(name)) for name in common)


def test_values_do_not_depend_on_the_piece_size(tmp_path, make_checkpoint, monkeypatch):
    options = {"layers": 1, "embedding_bits": 3, "ngram_bits": 5}
    in_one_piece = digests(make_checkpoint("test", **options))
    monkeypatch.setattr(synth_values, "PIECE_VALUES", 300)
    assert digests(synthesize(tmp_path / "pieces", "test", **options)) == in_one_piece


def test_values_are_raw_pcg64():
    digest = hashlib.sha256(b"7/some.tensor").digest()
    state, increment = int.from_bytes(digest[:16], "little"), int.from_bytes(digest[16:], "little") | 1
    expected = []
    for _ in range(50):
        state = (state * 0x2360ED051FC65DA44385DF649FCCF645 + increment) % (1 << 128)
        mixed, turn = (state >> 64) ^ (state & ((1 << 64) - 1)), state >> 122
        expected.append(((mixed >> turn) | (mixed << (64 - turn))) % (1 << 64))
    assert Values(7, "some.tensor").words(50, np.uint64).tolist() == expected


def test_distributions():
    values = Values(0, "any")
    bell = values.bell(200_000, 0.5)
    assert bell.dtype == np.float32
    assert abs(bell.mean()) < 0.01
    assert bell.std() == pytest.approx(0.5, rel=0.02)
    uniform = values.between(200_000, -4.0, 1.5)
    assert -4.0 <= uniform.min() < -3.99
    assert 1.49 < uniform.max() <= 1.5
    signed = values.signed_between(200_000, 0.75, 1.25)
    assert np.abs(signed).min() >= 0.75
    assert abs(np.sign(signed).mean()) < 0.01


@pytest.mark.parametrize(("bits", "codebook"), [(1, "mcg"), (8, "3inst"), (1.5, "mul1"), (3.5, "mul1")])
def test_bits_and_codebook_hold_for_every_linear(make_checkpoint, bits, codebook):
    checkpoint = Checkpoint(make_checkpoint("test", bits=bits, codebook=codebook, layers=1, plain=()))
    assert {(linear.bits, linear.codebook) for linear in quantized(checkpoint)} == {(bits, codebook)}


def test_mixed_mixes(make_checkpoint):
    found = quantized(Checkpoint(make_checkpoint("test", **VARIANTS["mixed"])))
    assert {linear.codebook for linear in found} == {"3inst", "mcg", "mul1"}
    assert {linear.bits for linear in found} == {1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8}


def test_packed_signs_pack_one_side_of_each_linear(make_checkpoint):
    folder = make_checkpoint("test", **VARIANTS["old signs, biases"])
    parts = {name.rpartition(".")[2] for name in TensorStore(folder).names}
    assert {"su", "sv", "suh", "svh", "bias"} <= parts
    for linear in quantized(Checkpoint(folder)):
        assert 0 < (linear.suh < 0).mean() < 1
        assert 0 < (linear.svh < 0).mean() < 1


def test_plain_patterns_choose_what_stays_plain(make_checkpoint):
    checkpoint = Checkpoint(make_checkpoint("test", plain=("layers.1.mlp.experts.[02].*", "lm_head")))
    kinds = {linear.name: isinstance(linear, PlainLinear) for linear in linears(checkpoint)}
    plain = {name for name, is_plain in kinds.items() if is_plain}
    quantizable = {group.name for group in checkpoint.groups.values() if group.quantizable}
    assert {name for name in map(_canonical, plain) if name in quantizable} == {
        "lm_head",
        *(f"layers.1.mlp.experts.{e}.{p}_proj" for e in (0, 2) for p in ("gate", "up", "down")),
    }


def _canonical(name: str) -> str:
    return name.removeprefix("model.language_model.")


def test_embedding_and_table_options(make_checkpoint):
    checkpoint = Checkpoint(make_checkpoint("test", **VARIANTS["embedding and table"]))
    embedding = checkpoint.embedding()
    assert isinstance(embedding, QuantizedEmbedding)
    assert embedding.bits == 5
    table = checkpoint.ngram_table(1)
    rows = [len(shard) for shard in table.shards]
    assert table.bits == 1
    assert len(rows) == 3
    assert rows[0] == rows[1] >= rows[2]
    assert Checkpoint(make_checkpoint("test", **VARIANTS["plain table"])).ngram_table(1).bits is None


@pytest.mark.parametrize("rows", [600, 5000])
def test_ngram_rows_set_the_size_of_the_table(make_checkpoint, rows):
    table = Checkpoint(make_checkpoint("test", ngram_rows=rows)).ngram_table(1)
    assert sum(table.sizes) == pytest.approx(rows, rel=0.2)
    assert len(set(table.sizes.tolist())) == 4


def test_large_checkpoints_are_split_and_indexed(make_checkpoint):
    folder = make_checkpoint("test", **VARIANTS["many files"])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    store = TensorStore(folder)
    assert {name: store.info(name).file.name for name in store.names} == index
    assert len(store.files) > 3


def test_quantization_config_lists_what_is_stored(test_checkpoint):
    listed = json.loads((test_checkpoint / "quantization_config.json").read_text())["tensor_storage"]
    store = TensorStore(test_checkpoint)
    stored = {
        name: tuple(entry["shape"]) for group in listed.values() for name, entry in group["stored_tensors"].items()
    }
    assert stored == {name: store.info(name).shape for name in store.names if "ngram_embedding" not in name}
    assert listed["lm_head"]["bits_per_weight"] == 5


def test_the_written_config_is_the_one_exllamav3_and_transformers_expect(test_checkpoint):
    outer = json.loads((test_checkpoint / "config.json").read_text())
    text = outer["text_config"]
    assert outer["architectures"] == ["Qwen4ExpForConditionalGeneration"]
    assert set(text["layer_types"]) == {"linear_attention", "full_attention"}
    assert isinstance(text["eos_token_id"], int)
    assert not (test_checkpoint / "preprocessor_config.json").exists()
    transformers = pytest.importorskip("transformers", reason="the fidelity extra is not installed")
    config = transformers.AutoConfig.from_pretrained(test_checkpoint).text_config
    assert config.num_hidden_layers == 4
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    config.validate_architecture()


@pytest.mark.parametrize(("base", "heads", "ordinal"), [(2, 5, 0), (1000, 4, 1), (20_000_000, 2, 1), (97, 3, 0)])
def test_head_sizes_are_those_of_transformers(base, heads, ordinal):
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="transformers is missing")
    expected = [modeling._find_nth_prime_after(base - 1, ordinal * heads + head + 1) for head in range(heads)]
    assert ngram_constants.head_sizes(base, heads, ordinal) == expected


@pytest.mark.parametrize(("vocab", "order", "seed", "ordinal"), [(248320, 3, 1234, 0), (384, 4, 0, 2), (7, 2, -5, 1)])
def test_multipliers_are_those_of_transformers(vocab, order, seed, ordinal):
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp", reason="transformers is missing")
    expected = modeling._build_layer_multipliers(vocab, order, ordinal, seed).tolist()
    assert ngram_constants.multipliers(vocab, order, seed, ordinal) == expected


def test_demo_computes_about_8_million_values_a_token():
    preset = PRESETS["demo"]
    types = ["linear_attention"] * 3 + ["full_attention"]
    config = parse_config({**preset.config, "num_hidden_layers": 4, "layer_types": types, "eos_token_id": 256})
    active = 0.0
    for group in required_tensors(config, mtp=False):
        share = config.num_experts_per_tok / config.num_experts if ".experts." in group.name else 1
        active += share * group.in_features * group.out_features if group.kind == "linear" else 0
    assert 6e6 < active < 9e6
    assert config.indexer_budget < 3000 < config.max_position_embeddings


def test_full_has_the_real_widths():
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    config = parse_config(
        {**PRESETS["full"].config, "num_hidden_layers": 48, "layer_types": types, "eos_token_id": 256}
    )
    sizes: dict[str, int] = {}
    for group in required_tensors(config, mtp=False):
        if group.kind == "linear" and group.name.startswith(("layers.2.", "layers.3.", "lm_head")):
            share = 1 if ".experts." not in group.name or int(group.name.split(".")[4]) < 10 else 0
            key = ".".join(group.name.split(".")[:3])
            sizes[key] = sizes.get(key, 0) + share * group.in_features * group.out_features
    # Multiply-adds a token and layer, as the model's description counts them.
    assert sizes["layers.2.linear_attn"] == pytest.approx(58e6, rel=0.02)
    assert sizes["layers.3.self_attn"] == pytest.approx(52e6, rel=0.02)
    assert sizes["layers.2.mlp"] == pytest.approx(55e6, rel=0.02)
    assert 2 * sizes["layers.2.mlp_hyper_connection"] == pytest.approx(13e6, rel=0.04)
    assert sizes["lm_head"] == 248320 * 2560


def test_weights_keep_activations_in_range(test_checkpoint):
    """Each projection of a unit input has about its gain as deviation, whatever its codebook and width."""
    from isobit.checkpoint.trellis import dequantize

    checkpoint = Checkpoint(test_checkpoint)
    for linear in quantized(checkpoint):
        if linear.name.endswith(("q_proj", "gate_proj", "in_proj_qkv")):
            spread = dequantize(linear).std() * math.sqrt(linear.in_features)
            assert spread == pytest.approx(2.0, rel=0.1), linear.name


BAD_OPTIONS = {
    "preset": ({"preset": "huge"}, "'huge' is unknown, expected one of demo, test, full"),
    "codebook": ({"codebook": "mul2"}, "expected one of 3inst, mcg, mul1, mixed"),
    "bits": ({"bits": 9}, "width 9 is unknown"),
    "half width": ({"bits": 2.5, "codebook": "mcg"}, "with codebook mul1 only"),
    "head bits": ({"head_bits": 0}, "width 0 is unknown"),
    "ngram bits": ({"ngram_bits": 9}, "n-gram width 9"),
    "ngram rows": ({"ngram_rows": 3}, "expected at least 8"),
    "ngram shards": ({"ngram_shards": 0}, "expected at least 1"),
    "embedding bits": ({"embedding_bits": 12}, "embedding width 12"),
    "layers": ({"layers": 0}, "expected 1 to 512"),
    "endless layers": ({"layers": 10**9}, "expected 1 to 512"),
    "overrides": ({"overrides": {"indexer_budget": 33}}, "indexer_budget 33 is no multiple"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_named_and_leave_nothing(tmp_path, options, message):
    with pytest.raises(IsobitError, match=message) as caught:
        synthesize(tmp_path / "bad", **({"preset": "test"} | options))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(IsobitError, match="not an empty folder"):
        synthesize(tmp_path, "test")
    with pytest.raises(IsobitError, match="not an empty folder"):
        synthesize(tmp_path / "notes.txt", "test")
    with pytest.raises(IsobitError, match="cannot be made"):
        synthesize(tmp_path / "notes.txt" / "deeper", "test")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_folder_keeps_its_mode_and_is_found_by_a_link(tmp_path):
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    synthesize(tmp_path / "link", "test", layers=1)
    assert (tmp_path / "private" / "config.json").exists()
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    assert (tmp_path / "link").is_symlink()


def test_a_link_to_itself_is_an_error_of_one_line(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(IsobitError, match="cannot be written") as caught:
        synthesize(tmp_path / "loop", "test", layers=1)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize(
    ("asked", "answer", "message"), [("ismount", True, "mounted"), ("access", False, "may not write")]
)
def test_a_folder_that_cannot_be_replaced_is_refused_before_it_is_written(
    tmp_path, monkeypatch, asked, answer, message
):
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(os.path if asked == "ismount" else os, asked, lambda *_: answer)
    with pytest.raises(IsobitError, match=message):
        synthesize(tmp_path / "here", "test", layers=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("name", [".", "new", "new/deeper"])
def test_a_relative_empty_or_nested_folder_is_filled(tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    synthesize(name, "test", layers=1)
    assert (tmp_path / "here" / name / "config.json").exists()


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(IsobitError, match="free; take fewer layers"):
        synthesize(tmp_path / "deep" / "huge", "test", ngram_rows=20_000_000_000)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "half", "test", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tmp_path):
    calls: list[tuple[int, int]] = []
    synthesize(tmp_path / "seen", "test", layers=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(synth_values, "PIECE_VALUES", 1 << 16)
    tracemalloc.start()
    try:
        folder = synthesize(tmp_path / "table", "test", layers=1, mtp=False, ngram_rows=400_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (folder / "ngram_embedding.safetensors").stat().st_size > 30e6
    assert peak < 8e6


def test_the_predictable_head_reads_what_the_trunk_reads(make_checkpoint):
    checkpoint = Checkpoint(make_checkpoint("test", predictable=True))
    identity = checkpoint.linear("mtp.fc_embedding")
    assert np.array_equal(identity.weight, np.eye(checkpoint.config.hidden_size))
    assert not checkpoint.vector("mtp.pre_fc_norm_embedding.weight").any()
    mixer = [name for name in checkpoint.groups if name.startswith("hyper_connection_mixer")]
    assert len(mixer) == 3
    for name in mixer:
        if checkpoint.groups[name].kind == "linear":
            ours, trunks = (checkpoint.linear(n).weight for n in (f"mtp.{name}", name))
        else:
            ours, trunks = (checkpoint.vector(f"{n}.weight") for n in (f"mtp.{name}", name))
        assert np.array_equal(ours, trunks)


def test_each_token_of_a_predictable_checkpoint_has_a_successor(make_checkpoint, monkeypatch):
    folder = make_checkpoint("test", predictable=True)
    checkpoint = Checkpoint(folder)
    rows, head = (checkpoint.embedding().rows.astype(np.float32), checkpoint.head().weight.astype(np.float32))
    following = (head @ rows.T).argmax(axis=0)
    vocabulary = len(rows)
    expected = (np.arange(vocabulary) + successor_step(vocabulary)) % vocabulary
    likely = ~np.isin(expected, (END_OF_TEXT, END_OF_TURN))
    assert np.array_equal(following[likely], expected[likely])
    assert not head[[END_OF_TEXT, END_OF_TURN]].any()
    monkeypatch.setattr(synth_predictable, "PIECE_VALUES", 1 << 12)
    pieces = synthesize(folder.with_name("in pieces"), "test", predictable=True)
    assert digests(pieces) == digests(folder)


@pytest.mark.parametrize("vocabulary", [2, 300, 384, 248320])
def test_successors_lead_through_the_whole_vocabulary(vocabulary):
    step = successor_step(vocabulary)
    assert 0 < step < vocabulary
    assert math.gcd(step, vocabulary) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mtp": False}, "needs the MTP head"),
        ({"embedding_bits": 4}, "needs plain embeddings"),
        ({"overrides": {"tie_word_embeddings": True}}, "needs plain embeddings"),
    ],
)
def test_a_checkpoint_that_cannot_be_predictable_is_refused(tmp_path, options, message):
    with pytest.raises(IsobitError, match=message):
        synthesize(tmp_path / "none", "test", predictable=True, **options)
    assert list(tmp_path.iterdir()) == []
