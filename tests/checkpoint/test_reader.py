"""Every stored variant of every tensor group, and one clear error for each group that cannot be used."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isobit.checkpoint.reader import Checkpoint
from isobit.checkpoint.store import write_tensors
from isobit.checkpoint.trellis import dequantize_embedding
from isobit.checkpoint.weights import WIDTHS, Exl3Linear, PlainEmbedding, PlainLinear, QuantizedEmbedding
from isobit.errors import CheckpointError
from isobit.model.load import load_model
from isobit.ops import load_ops
from tests.checkpoint import tiny

TEXT_PREFIX = "model.language_model."
QKV = f"{TEXT_PREFIX}layers.0.linear_attn.in_proj_qkv"
Q = f"{TEXT_PREFIX}layers.1.self_attn.q_proj"
K = f"{TEXT_PREFIX}layers.1.self_attn.k_proj"
GATE = f"{TEXT_PREFIX}layers.0.mlp.gate"
NORM = f"{TEXT_PREFIX}layers.0.linear_attn.norm.weight"
PLE = f"{TEXT_PREFIX}layers.0.ple.ple_embedding"
TABLE = f"{PLE}.ngram_embedding"
EMBED = f"{TEXT_PREFIX}embed_tokens"


def without(arrays, *names):
    return {name: array for name, array in arrays.items() if name not in names}


def read_all(checkpoint):
    for group in checkpoint.groups.values():
        if group.kind == "linear":
            checkpoint.linear(group.name)
        elif group.kind == "vector":
            checkpoint.vector(group.name)
        elif group.kind == "embedding":
            checkpoint.embedding()
        else:
            checkpoint.ngram_table(int(group.name.split(".")[1]))
    return len(checkpoint.groups)


def test_a_whole_folder_reads(tmp_path):
    arrays = tiny.tensors()
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        assert read_all(checkpoint) == len(checkpoint.groups) > 80
        assert checkpoint.prefix == TEXT_PREFIX
        assert checkpoint.has_mtp
        assert not checkpoint.lacks_mtp
        assert checkpoint.stop_tokens == {5}


def test_a_quantized_linear_is_what_the_file_holds(tmp_path):
    arrays = tiny.tensors()
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        layer = checkpoint.linear("layers.0.linear_attn.in_proj_qkv")
        assert checkpoint.linear(QKV).name == layer.name == QKV
    assert isinstance(layer, Exl3Linear)
    assert (layer.bits, layer.codebook, layer.k, layer.n) == (2, "mul1", 128, 128)
    assert (layer.in_features, layer.out_features, layer.bias) == (128, 128, None)
    for part in ("trellis", "suh", "svh"):
        array = getattr(layer, part)
        np.testing.assert_array_equal(array, arrays[f"{QKV}.{part}"])
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_sizes_that_are_no_multiple_of_128_are_unpadded(tmp_path):
    with Checkpoint(tiny.write(tmp_path)) as checkpoint:
        layer = checkpoint.linear("layers.1.self_attn.k_proj")
        assert (layer.n, layer.out_features) == (128, 32)
        down = checkpoint.linear("layers.0.mlp.experts.1.down_proj")
        assert (down.k, down.in_features) == (128, 64)
        given_sizes = checkpoint.linear("layers.1.self_attn.k_proj", in_features=100, out_features=30)
        assert (given_sizes.in_features, given_sizes.out_features) == (100, 30)


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_width_comes_from_the_trellis_and_the_codebook_from_the_marker(tmp_path, codebook, bits):
    arrays = without(tiny.tensors(), f"{QKV}.mul1")
    arrays |= without(tiny.quantized(QKV, 128, 128, bits, np.random.default_rng(0)), f"{QKV}.mul1")
    if codebook != "3inst":
        arrays[f"{QKV}.{codebook}"] = tiny.marker({"mcg": tiny.MCG, "mul1": tiny.MUL1}[codebook])
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        if bits % 1 and codebook != "mul1":
            with pytest.raises(CheckpointError, match="expected mul1 for half widths"):
                checkpoint.linear(QKV)
            return
        layer = checkpoint.linear(QKV)
        assert (layer.bits, layer.codebook) == (bits, codebook)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 16), su=st.booleans(), sv=st.booleans())
def test_scales_and_packed_signs_are_chosen_independently(tmp_path, seed, su, sv):
    rng = np.random.default_rng(seed)
    arrays, expected = tiny.tensors(), {}
    for part, packed, chosen in (("suh", "su", su), ("svh", "sv", sv)):
        expected[part] = arrays[f"{QKV}.{part}"]
        if chosen:
            del arrays[f"{QKV}.{part}"]
            words = arrays[f"{QKV}.{packed}"] = tiny.words(rng, (8,))
            bit = [(int(words[i // 16]) >> (i % 16)) & 1 for i in range(128)]
            expected[part] = np.array([-1 if b else 1 for b in bit], np.float16)
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        layer = checkpoint.linear(QKV)
    for part, values in expected.items():
        assert getattr(layer, part).dtype == np.float16
        np.testing.assert_array_equal(getattr(layer, part), values)


@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
def test_a_bias_is_read_in_any_float_type_and_padded(tmp_path, kind):
    arrays, values = tiny.tensors(), tiny.floats(np.random.default_rng(1), (32,))
    stored = {"F16": values.astype(np.float16), "F32": values, "BF16": tiny.bfloat16(values)}[kind]
    arrays[f"{K}.bias"] = stored
    bf16 = (f"{K}.bias",) if kind == "BF16" else ()
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint:
        bias = checkpoint.linear(K).bias
    assert bias.dtype == np.float16
    np.testing.assert_array_equal(bias, np.concatenate([values, np.zeros(96)]))


def test_attention_bias_demands_one(tmp_path):
    changed = tiny.config_json(attention_bias=True)
    with Checkpoint(tiny.write(tmp_path, config=changed)) as checkpoint, pytest.raises(CheckpointError, match="bias"):
        checkpoint.linear(Q)


@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
@pytest.mark.parametrize("padded", [False, True])
def test_any_linear_may_be_plain(tmp_path, kind, padded):
    arrays = without(tiny.tensors(), *(f"{K}.{part}" for part in ("trellis", "suh", "svh", "mul1")))
    values, bias = tiny.floats(np.random.default_rng(2), (32, 128)), np.ones(32, np.float32)
    stored = np.concatenate([values, np.zeros((96, 128), np.float32)]) if padded else values
    arrays[f"{K}.weight"] = {"F16": stored.astype(np.float16), "F32": stored, "BF16": tiny.bfloat16(stored)}[kind]
    arrays[f"{K}.bias"] = bias
    bf16 = (f"{K}.weight",) if kind == "BF16" else ()
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint:
        layer = checkpoint.linear(K)
    assert isinstance(layer, PlainLinear)
    assert layer.weight.dtype == (np.float16 if kind == "F16" else np.float32)
    assert layer.bias.dtype == np.float32
    assert layer.weight.flags.c_contiguous
    np.testing.assert_array_equal(layer.weight, values)
    np.testing.assert_array_equal(layer.bias, bias)


def test_bfloat16_widens_exactly_over_its_whole_range(tmp_path):
    arrays = tiny.tensors()
    bits = np.arange(256, dtype=np.uint16).reshape(2, 128) * 127
    arrays[f"{GATE}.weight"] = bits
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=(f"{GATE}.weight",))) as checkpoint:
        weight = checkpoint.linear(GATE).weight
    np.testing.assert_array_equal(weight.view(np.uint32), bits.astype(np.uint32) << 16)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", ""])
def test_every_prefix_of_the_text_model_is_found(tmp_path, prefix):
    arrays = {
        prefix + name.removeprefix(TEXT_PREFIX) if name.startswith(TEXT_PREFIX) else name: array
        for name, array in tiny.tensors().items()
    }
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        assert checkpoint.prefix == prefix
        assert read_all(checkpoint)
        assert checkpoint.has("layers.0.linear_attn.A_log")
        assert checkpoint.has("layers.0.linear_attn")
        assert not checkpoint.has("layers.7")


def test_two_text_models_in_one_folder_are_refused(tmp_path):
    arrays = tiny.tensors()
    arrays["model.embed_tokens.weight"] = arrays[f"{EMBED}.weight"]
    with pytest.raises(CheckpointError, match="holds both"):
        Checkpoint(tiny.write(tmp_path, arrays))


def test_a_folder_without_embeddings_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no token embeddings"):
        Checkpoint(tiny.write(tmp_path, without(tiny.tensors(), f"{EMBED}.weight")))


def test_an_mtp_head_that_is_named_but_absent_is_left_out(tmp_path):
    arrays = {name: array for name, array in tiny.tensors().items() if not name.startswith("mtp.")}
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        assert checkpoint.lacks_mtp
        assert not checkpoint.has_mtp
        assert not checkpoint.config.has_mtp
        assert read_all(checkpoint)


def test_vectors_are_float32_in_any_float_type(tmp_path):
    arrays = tiny.tensors()
    values = arrays[NORM]
    conv = f"{TEXT_PREFIX}layers.0.linear_attn.conv1d.weight"
    arrays[NORM] = tiny.bfloat16(values)
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=(NORM,))) as checkpoint:
        for name in ("layers.0.linear_attn.norm", "layers.0.linear_attn.norm.weight", NORM):
            vector = checkpoint.vector(name)
            assert vector.dtype == np.float32
            np.testing.assert_array_equal(vector, values)
        np.testing.assert_array_equal(checkpoint.vector("layers.0.linear_attn.conv1d"), arrays[conv][:, 0])
        assert checkpoint.vector("layers.0.linear_attn.A_log").shape == (4,)


def test_a_convolution_may_be_stored_without_its_middle_axis(tmp_path):
    arrays = tiny.tensors()
    conv = f"{TEXT_PREFIX}layers.0.linear_attn.conv1d.weight"
    arrays[conv] = arrays[conv][:, 0]
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.vector("layers.0.linear_attn.conv1d"), arrays[conv])


@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
def test_plain_embeddings_are_mapped_as_stored(tmp_path, kind):
    arrays, values = tiny.tensors(), tiny.floats(np.random.default_rng(4), (128, 128))
    stored = {"F16": values.astype(np.float16), "F32": values, "BF16": tiny.bfloat16(values)}[kind]
    arrays[f"{EMBED}.weight"] = stored
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=(f"{EMBED}.weight",) if kind == "BF16" else ())) as checkpoint:
        embedding = checkpoint.embedding()
        assert isinstance(embedding, PlainEmbedding)
        assert embedding.bfloat16 == (kind == "BF16")
        assert not embedding.rows.flags.writeable
        np.testing.assert_array_equal(embedding.rows, stored)


def quantized_embedding(bits):
    rng = np.random.default_rng(5)
    arrays = without(tiny.tensors(), f"{EMBED}.weight")
    trellis = tiny.words(rng, (128, 1 + 16 * bits))
    trellis[:, 0] = tiny.floats(rng, (128,)).astype(np.float16).view(np.int16)
    arrays[f"{EMBED}.trellis"] = trellis
    arrays[f"{EMBED}.signs"] = np.where(rng.integers(0, 2, (1, 256)), 1, -1).astype(np.float16)
    return arrays


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_quantized_embeddings_are_mapped_as_stored(tmp_path, bits):
    arrays = quantized_embedding(bits)
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint:
        embedding = checkpoint.embedding()
        assert isinstance(embedding, QuantizedEmbedding)
        assert (embedding.bits, embedding.hidden) == (bits, 128)
        np.testing.assert_array_equal(embedding.trellis, arrays[f"{EMBED}.trellis"])
        np.testing.assert_array_equal(embedding.signs, arrays[f"{EMBED}.signs"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F16", "F32", "BF16"])
def test_plain_embeddings_that_are_not_finite_are_refused_by_name(tmp_path, kind, value):
    arrays, values = tiny.tensors(), tiny.floats(np.random.default_rng(4), (128, 128))
    values[127, 5] = value
    stored = {"F16": values.astype(np.float16), "F32": values, "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}
    arrays[f"{EMBED}.weight"] = stored[kind]
    bf16 = (f"{EMBED}.weight",) if kind == "BF16" else ()
    expected = rf"model\.safetensors: tensor {EMBED}\.weight holds NaN or infinite"
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint:
        for read in (checkpoint.embedding, lambda: load_model(checkpoint, load_ops("cpu"), context=64)):
            with pytest.raises(CheckpointError, match=expected):
                read()


def test_each_tensor_of_floats_but_the_rows_of_ngram_tables_is_refused_by_name_when_it_is_not_finite(tmp_path):
    arrays = tiny.tensors()
    floats = [name for name, array in arrays.items() if array.dtype in (np.float16, np.float32)]
    assert {name.rpartition(".")[2] for name in floats} >= {"suh", "svh", "weight", "head_bias", "A_log", "dt_bias"}
    for number, name in enumerate(floats):
        poisoned = arrays[name].copy()
        poisoned.reshape(-1)[-1] = (np.nan, np.inf, -np.inf)[number % 3]
        folder = tiny.write(tmp_path / str(number), {**arrays, name: poisoned})
        with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
            read_all(checkpoint)
        assert f"model.safetensors: tensor {name} holds NaN or infinite values" in str(caught.value)


def test_a_quantized_embedding_with_a_nan_scale_is_refused(tmp_path):
    arrays = quantized_embedding(2)
    arrays[f"{EMBED}.trellis"][7, 0] = np.float16(np.nan).view(np.int16)
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint, pytest.raises(CheckpointError, match="NaN"):
        checkpoint.embedding()


def test_a_tied_head_is_the_embedding_unless_there_is_a_head(tmp_path):
    tied = tiny.config_json(tie_word_embeddings=True)
    arrays = tiny.tensors()
    with Checkpoint(tiny.write(tmp_path, arrays, tied)) as checkpoint:
        assert isinstance(checkpoint.head(), Exl3Linear)
    arrays = {name: array for name, array in arrays.items() if not name.startswith("lm_head")}
    with Checkpoint(tiny.write(tmp_path, arrays, tied)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.head().weight, arrays[f"{EMBED}.weight"].astype(np.float32))
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint, pytest.raises(CheckpointError, match="lm_head"):
        checkpoint.head()
    arrays = {name: array for name, array in quantized_embedding(3).items() if not name.startswith("lm_head")}
    with Checkpoint(tiny.write(tmp_path, arrays, tied)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.head().weight, dequantize_embedding(checkpoint.embedding()))


def table_arrays(rows_of_shards, kind, rng):
    """The n-gram table in the shards and dtype asked for, named as that variant names it."""
    width = 160 if kind != "I16" else 1 + 160 * tiny.NGRAM_BITS // 16
    arrays = {name: array for name, array in tiny.tensors().items() if not name.startswith(PLE)}
    whole = (
        tiny.words(rng, (sum(rows_of_shards), width))
        if kind == "I16"
        else tiny.floats(rng, (sum(rows_of_shards), width))
    )
    stored = {"I16": whole, "F32": whole, "F16": whole.astype(np.float16), "BF16": None}[kind]
    stored = tiny.bfloat16(whole) if stored is None else stored
    suffix = "trellis" if kind == "I16" else "weight"
    first, bf16 = 0, []
    for i, rows in enumerate(rows_of_shards):
        name = f"{TABLE}.{suffix}" if len(rows_of_shards) == 1 else f"{TABLE}.shard_{i}.{suffix}"
        arrays[name] = stored[first : first + rows]
        bf16 += [name] if kind == "BF16" else []
        first += rows
    heads = (f"{TABLE}.head_", f"{TABLE}.") if kind == "I16" else (f"{PLE}.ngram_heads_", f"{PLE}.")
    arrays[f"{heads[0]}offsets"] = np.array([0, 17], np.int64)
    arrays[f"{heads[0]}vocab_sizes"] = np.array([17, 19], np.int64)
    arrays[f"{heads[1]}layer_multipliers"] = np.array([3, 5, 7], np.int64)
    return arrays, stored, tuple(bf16)


@pytest.mark.parametrize("kind", ["I16", "F16", "F32", "BF16"])
@pytest.mark.parametrize("rows", [(40,), (20, 20), (15, 15, 10)])
def test_ngram_tables_are_mapped_in_every_form(tmp_path, kind, rows):
    arrays, stored, bf16 = table_arrays(rows, kind, np.random.default_rng(6))
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint:
        table = checkpoint.ngram_table(0)
        assert checkpoint.ngram_table("layers.0.ple.ple_embedding.ngram_embedding").name == table.name == TABLE
        assert checkpoint.has_ngram("layers.0")
        assert not checkpoint.has_ngram(1)
    assert [len(shard) for shard in table.shards] == list(rows)
    assert table.shard_rows == rows[0]
    assert (table.width, table.heads, table.head_bias) == (160, 2, None)
    assert table.bits == (tiny.NGRAM_BITS if kind == "I16" else None)
    assert table.bfloat16 == (kind == "BF16")
    assert not any(shard.flags.writeable or shard.flags.owndata for shard in table.shards)
    np.testing.assert_array_equal(np.concatenate(table.shards), stored)
    assert table.offsets.tolist() == [0, 17]
    assert table.sizes.tolist() == [17, 19]
    assert table.multipliers.tolist() == [3, 5, 7]
    assert table.offsets.dtype == table.sizes.dtype == table.multipliers.dtype == np.int64


def test_an_ngram_table_lies_in_a_file_of_its_own(tmp_path):
    arrays = tiny.tensors()
    apart = {name: array for name, array in arrays.items() if name.startswith(TABLE)}
    tiny.write(tmp_path, without(arrays, *apart))
    write_tensors(tmp_path / "ngram_embedding.safetensors", apart)
    with Checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.ngram_table(0).head_bias, apart[f"{TABLE}.head_bias"])


def fused_source():
    """The folder with unquantized experts, fused as Hugging Face stores them."""
    rng = np.random.default_rng(7)
    arrays = {name: array for name, array in tiny.tensors().items() if ".experts." not in name}
    for block in (f"{TEXT_PREFIX}layers.0.mlp", f"{TEXT_PREFIX}layers.1.mlp", "mtp.layers.0.mlp"):
        arrays[f"{block}.experts.gate_up_proj"] = tiny.floats(rng, (2, 128, 128))
        arrays[f"{block}.experts.down_proj"] = tiny.bfloat16(tiny.floats(rng, (2, 128, 64)))
    return arrays, tuple(name for name in arrays if name.endswith("experts.down_proj"))


def test_fused_experts_are_read_one_by_one(tmp_path):
    arrays, bf16 = fused_source()
    with Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint:
        for block, prefix in (("layers.1.mlp", TEXT_PREFIX), ("mtp.layers.0.mlp", "")):
            fused = arrays[f"{prefix}{block}.experts.gate_up_proj"]
            down = (arrays[f"{prefix}{block}.experts.down_proj"].astype(np.uint32) << 16).view(np.float32)
            experts = checkpoint.experts(block)
            for e in range(2):
                np.testing.assert_array_equal(experts.gate[e].weight, fused[e, :64])
                np.testing.assert_array_equal(experts.up[e].weight, fused[e, 64:])
                np.testing.assert_array_equal(experts.down[e].weight, down[e])
                np.testing.assert_array_equal(checkpoint.expert_source(block, e, "up_proj"), fused[e, 64:])
        assert checkpoint.experts(1).up[0].name.endswith("layers.1.mlp.experts.0.up_proj")


def test_a_quantized_expert_is_no_source(tmp_path):
    with Checkpoint(tiny.write(tmp_path)) as checkpoint:
        assert isinstance(checkpoint.experts(0).gate[1], Exl3Linear)
        with pytest.raises(CheckpointError, match="is quantized already"):
            checkpoint.expert_source(0, 1, "gate_proj")


def test_a_model_saved_by_transformers_reads_back(tmp_path):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen4_exp")
    torch.manual_seed(0)
    changes = {"ngram_vocab_size_base": 17, "split_ngram_parts": 4, "mtp_num_hidden_layers": None}
    text = module.Qwen4ExpTextConfig(**tiny.config_json(**changes)["text_config"])
    model = module.Qwen4ExpForCausalLM(text).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    state = {name.removeprefix("model."): tensor.float().numpy() for name, tensor in model.state_dict().items()}
    with Checkpoint(tmp_path) as checkpoint:
        read_all(checkpoint)
        for name in ("layers.0.linear_attn.in_proj_qkv", "layers.1.self_attn.indexer.index_qk_proj", "lm_head"):
            np.testing.assert_array_equal(checkpoint.linear(name).weight, state[f"{name}.weight"])
        np.testing.assert_array_equal(
            checkpoint.vector("layers.0.linear_attn.A_log"), state["layers.0.linear_attn.A_log"]
        )
        np.testing.assert_array_equal(
            checkpoint.experts(0).up[1].weight, state["layers.0.mlp.experts.gate_up_proj"][1, 64:]
        )
        table = checkpoint.ngram_table(0)
        rows = np.concatenate(table.shards).astype(np.uint32) << 16
        np.testing.assert_array_equal(rows.view(np.float32), state["layers.0.ple.ple_embedding.ngram_embedding.weight"])
        np.testing.assert_array_equal(table.sizes, [17, 19])


def put(name, array):
    return lambda arrays: arrays.update({name: array})


def drop(*names):
    return lambda arrays: [arrays.pop(name) for name in names]


def poison(name, value=np.nan):
    return lambda arrays: arrays[name].reshape(-1).__setitem__(3, value)


def qkv_read(checkpoint):
    return checkpoint.linear(QKV)


def k_read(checkpoint):
    return checkpoint.linear(K)


def gate_read(checkpoint):
    return checkpoint.linear(GATE)


def norm_read(checkpoint):
    return checkpoint.vector(NORM)


def table_read(checkpoint):
    return checkpoint.ngram_table(0)


def embed_read(checkpoint):
    return checkpoint.embedding()


BROKEN = {
    "no trellis": (
        drop(f"{QKV}.trellis"),
        qkv_read,
        "no model.language_model.layers.0.linear_attn.in_proj_qkv.trellis or",
    ),
    "no scales": (drop(f"{QKV}.suh"), qkv_read, ".trellis without"),
    "no output scales": (drop(f"{QKV}.svh"), qkv_read, "in_proj_qkv.svh or"),
    "trellis and weight": (
        put(f"{QKV}.weight", np.zeros((128, 128), np.float16)),
        qkv_read,
        "both a trellis and a weight",
    ),
    "trellis dtype": (put(f"{QKV}.trellis", np.zeros((8, 8, 32), np.int32)), qkv_read, "is I32, expected I16"),
    "trellis rows": (
        put(f"{QKV}.trellis", np.zeros((16, 8, 32), np.int16)),
        qkv_read,
        "[16, 8, 32], expected [8, 8, 16",
    ),
    "trellis axes": (put(f"{QKV}.trellis", np.zeros((64, 32), np.int16)), qkv_read, "[64, 32], expected [8, 8, 16"),
    "trellis width": (put(f"{QKV}.trellis", np.zeros((8, 8, 33), np.int16)), qkv_read, "with bits in 1, 1.5, 2"),
    "trellis of 4.5 bits": (put(f"{QKV}.trellis", np.zeros((8, 8, 72), np.int16)), qkv_read, "with bits in 1, 1.5, 2"),
    "trellis of 9 bits": (put(f"{QKV}.trellis", np.zeros((8, 8, 144), np.int16)), qkv_read, "with bits in 1, 1.5, 2"),
    "empty trellis": (put(f"{QKV}.trellis", np.zeros((8, 8, 0), np.int16)), qkv_read, "with bits in 1, 1.5, 2"),
    "scale dtype": (put(f"{QKV}.suh", np.ones(128, np.float32)), qkv_read, "suh is F32, expected F16"),
    "scale size": (put(f"{QKV}.svh", np.ones(64, np.float16)), qkv_read, "svh is F16 [64], expected [128]"),
    "NaN scale": (poison(f"{QKV}.suh"), qkv_read, "suh holds NaN or infinite values"),
    "infinite scale": (poison(f"{QKV}.svh", np.inf), qkv_read, "svh holds NaN or infinite values"),
    "both markers": (put(f"{QKV}.mcg", tiny.marker(tiny.MCG)), qkv_read, "both an mcg and a mul1 marker"),
    "unknown marker": (put(f"{QKV}.mul1", tiny.marker(12345)), qkv_read, "0x00003039, expected 0x83dcd12d"),
    "marker dtype": (put(f"{QKV}.mul1", np.float32(1)), qkv_read, "expected I32 []"),
    "marker shape": (put(f"{QKV}.mul1", np.zeros(2, np.int32)), qkv_read, "expected I32 []"),
    "bias size": (put(f"{K}.bias", np.zeros(31, np.float16)), k_read, "bias is F16 [31], expected [32]"),
    "bias dtype": (put(f"{K}.bias", np.zeros(32, np.int16)), k_read, "bias is I16, expected F16 or BF16 or F32"),
    "bias too large": (put(f"{K}.bias", np.full(32, 1e9, np.float32)), k_read, "NaN or infinite"),
    "weight missing": (drop(f"{GATE}.weight"), gate_read, "mlp.gate.weight"),
    "weight shape": (
        put(f"{GATE}.weight", np.zeros((128, 2), np.float16)),
        gate_read,
        "F16 [128, 2], expected [2, 128]",
    ),
    "weight dtype": (
        put(f"{GATE}.weight", np.zeros((2, 128), np.int8)),
        gate_read,
        "is I8, expected F16 or BF16 or F32",
    ),
    "weight NaN": (poison(f"{GATE}.weight"), gate_read, "NaN or infinite"),
    "vector missing": (drop(NORM), norm_read, f"no tensor {NORM}"),
    "vector shape": (put(NORM, np.zeros(17, np.float32)), norm_read, "[17], expected [16]"),
    "vector dtype": (put(NORM, np.zeros(16, np.float64)), norm_read, "is F64, expected"),
    "vector NaN": (poison(NORM), norm_read, "NaN or infinite"),
    "embedding shape": (put(f"{EMBED}.weight", np.zeros((127, 128), np.float16)), embed_read, "expected [128, 128]"),
    "embedding dtype": (put(f"{EMBED}.weight", np.zeros((128, 128), np.int16)), embed_read, "is I16"),
    "table missing": (drop(f"{TABLE}.trellis"), table_read, "file of its own"),
    "table width": (
        put(f"{TABLE}.trellis", np.zeros((40, 20), np.int16)),
        table_read,
        "expected [rows, 1 + 160 * bits",
    ),
    "table axes": (put(f"{TABLE}.trellis", np.zeros(40, np.int16)), table_read, "I16 [40], expected a matrix"),
    "table scalar": (put(f"{TABLE}.trellis", np.int16(4)), table_read, "I16 [], expected a matrix"),
    "table dtype": (put(f"{TABLE}.trellis", np.zeros((40, 21), np.float16)), table_read, "is F16, expected I16"),
    "table too short": (put(f"{TABLE}.trellis", np.zeros((35, 21), np.int16)), table_read, "inside its 35 rows"),
    "head size 0": (put(f"{TABLE}.head_vocab_sizes", np.array([17, 0])), table_read, "expected ranges inside"),
    "head offset": (put(f"{TABLE}.head_offsets", np.array([-1, 17])), table_read, "expected ranges inside"),
    "huge offset": (put(f"{TABLE}.head_offsets", np.array([0, (1 << 63) - 1])), table_read, "expected ranges inside"),
    "heads": (put(f"{TABLE}.head_offsets", np.arange(3)), table_read, "I64 [3], expected [2]"),
    "no heads": (drop(f"{TABLE}.head_offsets"), table_read, "head_offsets or"),
    "multipliers": (put(f"{TABLE}.layer_multipliers", np.arange(2)), table_read, "I64 [2], expected [3]"),
    "multiplier dtype": (put(f"{TABLE}.layer_multipliers", np.zeros(3)), table_read, "is F64, expected I64 or I32"),
    "head bias": (put(f"{TABLE}.head_bias", np.zeros((3, 160), np.float16)), table_read, "[3, 160], expected [2, 160]"),
    "head bias NaN": (poison(f"{TABLE}.head_bias"), table_read, "NaN or infinite"),
    "no such layer": (lambda arrays: None, lambda c: c.ngram_table(1), "layer 1 has no n-gram embedding"),
    "no such linear": (
        lambda arrays: None,
        lambda c: c.linear("layers.9.mlp.gate"),
        "is no linear layer of this model",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_group_that_cannot_be_used_is_refused_by_name(tmp_path, case):
    change, read, problem = BROKEN[case]
    arrays = tiny.tensors()
    change(arrays)
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint, pytest.raises(CheckpointError) as caught:
        read(checkpoint)
    message = str(caught.value)
    assert problem in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_packed_signs_of_the_wrong_size_are_refused(tmp_path):
    arrays = without(tiny.tensors(), f"{QKV}.suh")
    arrays[f"{QKV}.su"] = np.zeros(7, np.int16)
    with (
        Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint,
        pytest.raises(CheckpointError, match=r"\[7\], expected \[8\]"),
    ):
        checkpoint.linear(QKV)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [((20, 21), "20 rows as"), ((20, 19, 20), "20 rows as"), ((20, None, 20), "no tensor .*shard_1")],
)
def test_uneven_or_missing_shards_are_refused(tmp_path, rows, problem):
    arrays, _, _ = table_arrays([count or 20 for count in rows], "I16", np.random.default_rng(8))
    if None in rows:
        del arrays[f"{TABLE}.shard_{rows.index(None)}.trellis"]
    with Checkpoint(tiny.write(tmp_path, arrays)) as checkpoint, pytest.raises(CheckpointError, match=problem):
        checkpoint.ngram_table(0)


def test_fused_experts_of_the_wrong_shape_are_refused(tmp_path):
    arrays, bf16 = fused_source()
    name = f"{TEXT_PREFIX}layers.0.mlp.experts.gate_up_proj"
    arrays[name] = arrays[name][:1]
    with (
        Checkpoint(tiny.write(tmp_path, arrays, bf16=bf16)) as checkpoint,
        pytest.raises(CheckpointError, match=r"gate_up_proj is F32 \[1, 128, 128\], expected \[experts, 128, 128\]"),
    ):
        checkpoint.linear("layers.0.mlp.experts.1.up_proj")


def test_another_model_or_no_folder_is_refused(tmp_path):
    tiny.write(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="model_type is 'llama'"):
        Checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint(tmp_path / "nowhere")
