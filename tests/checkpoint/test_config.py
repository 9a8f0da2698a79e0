"""config.json: what is accepted, in which spellings, and that everything else is refused by name."""

import json
import os

import pytest

from isobit.checkpoint.config import FlashNextConfig, load_config, load_stop_tokens, parse_config
from isobit.checkpoint.names import canonical_name, required_tensors
from isobit.errors import CheckpointError
from tests.checkpoint.tiny import TEXT, config, config_json


def save(folder, value, name="config.json"):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_a_nested_config_gives_fields_and_derived_sizes(tmp_path):
    parsed = load_config(save(tmp_path, config_json()))
    assert parsed.layer_types == ("linear_attention", "full_attention")
    assert parsed.attention_layers == (1,)
    assert parsed.delta_layers == (0,)
    assert parsed.ple_layers == (0,)
    assert parsed.has_ple(0)
    assert parsed.ple_end_token == 5
    assert parsed.rotary_dim == 8
    assert parsed.index_blocks == 8
    assert parsed.conv_channels == 2 * 32 + 64
    assert parsed.stream_width == 256
    assert (parsed.ngram_heads, parsed.ngram_width) == (2, 160)
    assert parsed.has_mtp
    assert parsed.unknown_keys == ()


def test_the_config_cannot_be_changed():
    with pytest.raises(ValueError):
        config().hidden_size = 3


@pytest.mark.parametrize("model_type", ["qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next"])
def test_a_flat_config_is_the_same_config(tmp_path, model_type):
    assert load_config(save(tmp_path, {"model_type": model_type, **TEXT})) == config()


@pytest.mark.parametrize("name", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_every_name_of_sparse_attention_is_one_kind(name):
    assert config(layer_types=["linear_attention", name]) == config()


def test_an_interval_stands_for_layer_types():
    parsed = config(layer_types=None, full_attention_interval=3, num_hidden_layers=6)
    assert parsed.attention_layers == (2, 5)
    assert config(layer_types=None, num_hidden_layers=8).attention_layers == (3, 7)


def test_the_first_end_token_cuts_ngrams():
    assert config(eos_token_id=[7, 5]).ple_end_token == 7
    assert config(eos_token_id=[7, 5]).eos_token_ids == (7, 5)


def test_rotary_settings_are_read_from_every_place():
    flat = config(rope_parameters=None, rope_theta=10000.0, partial_rotary_factor=0.25)
    assert flat == config()
    whole = {"type": "mrope", "rope_theta": 10000, "mrope_section": [4, 6, 6]}
    assert config(rope_parameters=whole, indexer_head_dim=32).rotary_dim == 32
    both = {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert config(rope_parameters=both, partial_rotary_factor=0.25) == config()


def test_the_gate_of_deltanet_defaults_to_the_activation():
    assert config(output_gate_type=None).output_gate_type == "silu"
    assert config(output_gate_type="sigmoid").output_gate_type == "sigmoid"


def test_tied_embeddings_are_read_from_either_level():
    assert config(tie_word_embeddings=True).tie_word_embeddings
    assert parse_config({**config_json(), "tie_word_embeddings": True}).tie_word_embeddings
    assert not config().tie_word_embeddings


def test_keys_without_influence_are_accepted_and_strange_ones_are_listed():
    value = config_json(initializer_range=0.1, attention_dropout=0.0, use_cache=False, dtype="bfloat16", sparkle=3)
    value |= {"vision_config": {"depth": 2}, "image_token_id": 9, "architectures": ["X"], "glitter": True}
    assert parse_config(value).unknown_keys == ("glitter", "sparkle")


REFUSED = {
    "hidden_act": ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
    "output gate": ({"output_gate_type": "tanh"}, 'output_gate_type is "tanh"'),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, 'rope_parameters.rope_type is "yarn"'),
    "rope factor": ({"rope_parameters": {"rope_theta": 1.0, "factor": 4}}, "rope_parameters.factor is 4"),
    "rope scaling": ({"rope_scaling": {"type": "linear", "factor": 2}}, 'rope_scaling.rope_type is "linear"'),
    "two thetas": ({"rope_theta": 5.0}, "rope_theta is 5.0, expected 10000.0"),
    "no theta": ({"rope_parameters": None}, "rope_theta is missing"),
    "theta": ({"rope_parameters": {"rope_theta": "x"}}, 'rope_theta is "x"'),
    "layer type": ({"layer_types": ["linear_attention", "mamba"]}, 'layer_types[1] is "mamba"'),
    "layer count": ({"num_hidden_layers": 3}, "layer_types names 2 layers, but num_hidden_layers is 3"),
    "text": ({"hidden_size": "128"}, 'hidden_size is "128"'),
    "negative": ({"hidden_size": -1}, "hidden_size is -1"),
    "fraction": ({"hidden_size": 128.5}, "hidden_size is 128.5"),
    "true": ({"num_experts": True}, "num_experts is true"),
    "missing": ({"hidden_size": None}, "hidden_size is missing"),
    "no layers": ({"num_hidden_layers": None, "layer_types": None}, "num_hidden_layers is missing"),
    "streams": ({"hc_count": 1}, "hc_count is 1"),
    "chosen": ({"num_experts_per_tok": 3}, "num_experts_per_tok 3 is more than num_experts 2"),
    "experts": ({"num_experts": 0}, "num_experts is 0"),
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 2}, "no multiple of num_key_value_heads"),
    "value heads": ({"linear_num_value_heads": 3}, "no multiple of linear_num_key_heads"),
    "indexer": ({"indexer_n_heads": None}, "indexer_n_heads is missing"),
    "index keys": ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2, expected 1"),
    "budget": ({"indexer_budget": 30}, "indexer_budget 30 is no multiple"),
    "block": ({"indexer_compress_ratio": 3, "indexer_budget": 30}, "indexer_compress_ratio is 3"),
    "index width": ({"indexer_head_dim": 4}, "8 rotary dimensions do not fit into indexer_head_dim 4"),
    "odd rotary": ({"head_dim": 12}, "gives 3 rotary dimensions"),
    "ple layer": ({"ple_layer_ids": [3]}, "ple_layer_ids holds 3"),
    "ple on attention": ({"ple_layer_ids": [2]}, "ple_layer_ids holds 2, a sparse attention layer"),
    "ple width": ({"ple_embed_dim": 321}, "ple_embed_dim 321 is no multiple"),
    "ple end": ({"eos_token_id": None}, "eos_token_id is missing"),
    "end token": ({"eos_token_id": "x"}, 'eos_token_id is "x"'),
    "end tokens": ({"eos_token_id": [5, -1]}, "negative or too large"),
    "mtp": ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
    "sliding window": ({"sliding_window": 128}, "sliding_window is 128"),
    "routing": ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
    "scaling": ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
    "dense layers": ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
    "quantization": ({"quantization_config": {"quant_method": "fp8"}}, 'quantization_config.quant_method is "fp8"'),
    "endless layers": ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
    "endless experts": ({"num_experts": 10**9}, "num_experts is 1000000000"),
    "interval": ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
    "wide": ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
    "endless budget": ({"indexer_budget": 2**20 + 4}, "indexer_budget is 1048580"),
    "window": ({"max_position_embeddings": 1}, "max_position_embeddings is 1"),
    "infinite eps": ({"rms_norm_eps": float("inf")}, "rms_norm_eps is Infinity"),
    "no number": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    "empty mtp": ({"mtp_num_hidden_layers": ""}, 'mtp_num_hidden_layers is ""'),
    "empty tie": ({"tie_word_embeddings": []}, "tie_word_embeddings is []"),
    "empty gate": ({"output_gate_type": ""}, 'output_gate_type is ""'),
    "text model": ({"model_type": "llama"}, 'text_config.model_type is "llama"'),
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_config_is_refused_without_waiting(tmp_path, name):
    save(tmp_path, config_json())
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
        load_stop_tokens(tmp_path, load_config(tmp_path))


def test_a_long_wrong_value_is_cut(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load_config(save(tmp_path, config_json(hidden_size=[1] * 10_000)))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_field_and_value(tmp_path, case):
    changes, problem = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        load_config(save(tmp_path, config_json(**changes)))
    message = str(caught.value)
    assert problem in message
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"model_type": "qwen3_next"}', "model_type is 'qwen3_next', expected one of qwen4_exp"),
        ("{}", "model_type is None"),
        ('{"model_type": "qwen4_exp", "text_config": 3}', "text_config is 3"),
        ("[" * 100_000, "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_config_of_ours_is_refused(tmp_path, content, problem):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as caught:
        load_config(tmp_path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load_config(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    save(tmp_path, "x", "file")
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_config(tmp_path / "file")


def test_stop_tokens_come_from_the_generation_config_and_else_from_the_config(tmp_path):
    assert load_stop_tokens(tmp_path, config(eos_token_id=[5, 6])) == {5, 6}
    save(tmp_path, {"temperature": 1}, "generation_config.json")
    assert load_stop_tokens(tmp_path, config()) == {5}
    save(tmp_path, {"eos_token_id": 9}, "generation_config.json")
    assert load_stop_tokens(tmp_path, config()) == {9}
    save(tmp_path, {"eos_token_id": [9, 10]}, "generation_config.json")
    assert load_stop_tokens(tmp_path, config()) == {9, 10}
    save(tmp_path, {"eos_token_id": "end"}, "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        load_stop_tokens(tmp_path, config())


def test_configs_that_transformers_writes_are_read_as_it_means_them(tmp_path):
    module = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    theirs = module.Qwen4ExpConfig(text_config={k: v for k, v in TEXT.items() if k != "mtp_num_hidden_layers"})
    theirs.save_pretrained(tmp_path)
    parsed = load_config(tmp_path)
    shared = FlashNextConfig.model_fields.keys() & vars(theirs.text_config).keys()
    assert len(shared) > 30
    for name in shared - {"layer_types"}:
        expected = getattr(theirs.text_config, name)
        assert getattr(parsed, name) == (tuple(expected) if isinstance(expected, list) else expected), name
    defaults = module.Qwen4ExpTextConfig()
    for name, field in FlashNextConfig.model_fields.items():
        if hasattr(defaults, name) and not field.is_required() and getattr(defaults, name) is not None:
            expected = getattr(defaults, name)
            assert field.default == (tuple(expected) if isinstance(expected, list) else expected), name


def test_the_required_tensors_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen4_exp")
    text = module.Qwen4ExpTextConfig(**{k: v for k, v in TEXT.items() if k != "mtp_num_hidden_layers"})
    with torch.device("meta"):
        state = module.Qwen4ExpForCausalLM(text).state_dict()
    theirs = {canonical_name(name): tuple(tensor.shape) for name, tensor in state.items()}
    fused = {name for name in theirs if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    table = {name for name in theirs if ".ple_embedding." in name}
    mine = {}
    for group in required_tensors(config(), mtp=False):
        if group.kind != "ngram":
            mine[group.tensor] = group.shape or (group.out_features, group.in_features)
    separate = {name for name in mine if ".experts." in name}
    assert mine.keys() - separate == theirs.keys() - fused - table
    assert all(mine[name] == theirs[name] for name in mine.keys() - separate)
    assert len(fused) == 4
    assert len(separate) == 12
