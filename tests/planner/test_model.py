"""Shapes: parameter counts equal published ones, configurations are read or refused."""

from __future__ import annotations

import pytest

from shardwright.core.errors import SpecError
from shardwright.planner.huggingface import from_config
from shardwright.planner.model import ModelSpec
from shardwright.planner.model_presets import MODELS, find_model

# As `model.safetensors.index.json` or the model card of each released checkpoint says.
PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-large-123b": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "mpt-7b": 6_649_286_656,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones_to_the_unit(name):
    assert find_model(name).num_parameters == PUBLISHED[name]


def test_gpt_3_has_the_174_6_billion_parameters_its_descriptions_round():
    assert find_model("gpt3-175b").num_parameters / 1e9 == pytest.approx(174.6, abs=0.01)


def test_a_70b_block_is_1_7_gb_in_two_bytes():
    assert 2 * find_model("llama-3-70b").block_numel / 1e9 == pytest.approx(1.711, abs=0.001)


def test_an_unknown_model_gets_the_nearest_name():
    with pytest.raises(SpecError, match="did you mean 'llama-3-8b'"):
        find_model("llama3-8b")


def test_names_match_in_any_case():
    assert find_model("Llama-3-8B") is MODELS["llama-3-8b"]


def test_a_llama_configuration_gives_the_preset_s_count():
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    assert from_config(config).num_parameters == PUBLISHED["llama-3-8b"]


def test_configurations_of_other_families_give_the_published_counts():
    qwen = {
        "model_type": "qwen2",
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    }
    gemma = {
        "model_type": "gemma2",
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256_000,
    }
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50_257,
    }
    opt = {
        "model_type": "opt",
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "vocab_size": 50_272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
    }
    bloom = {
        "model_type": "bloom",
        "n_layer": 24,
        "hidden_size": 1024,
        "n_head": 16,
        "vocab_size": 250_880,
    }
    mpt = {
        "model_type": "mpt",
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "vocab_size": 50_432,
        "max_seq_len": 2048,
        "no_bias": True,
        "attn_config": {"alibi": True},
    }
    names = ("qwen2.5-0.5b", "gemma-2-2b", "gpt2", "opt-125m", "bloom-560m", "mpt-7b")
    counts = [from_config(c).num_parameters for c in (qwen, gemma, gpt2, opt, bloom, mpt)]
    assert counts == [PUBLISHED[name] for name in names]


def test_an_unknown_architecture_is_refused_by_name():
    with pytest.raises(SpecError, match=r"model_type 'mixtral'.*no dense decoder"):
        from_config({"model_type": "mixtral"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts=8: a mixture of experts, and only dense"),
        ({"num_experts": 64, "model_type": "qwen3_moe"}, "num_experts=64: a mixture of experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: only unquantised models"),
        ({"model_type": "qwen3"}, r"Give the sizes in TOML .* with sample=\.\.\., which is traced"),
    ],
)
def test_experts_quantised_weights_and_unknown_kinds_are_refused_with_what_to_do(changes, message):
    with pytest.raises(SpecError, match=message):
        from_config({"model_type": "llama", **changes})


def test_a_configuration_without_a_needed_field_says_which():
    with pytest.raises(SpecError, match="lacks 'num_attention_heads'"):
        from_config({"model_type": "llama", "num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be greater than 0"),
        ({"hidden": -8}, "hidden must be greater than 0"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"hidden": 10}, "hidden must be a multiple of heads"),
        ({"positions": "learned"}, "learned positions need num_positions"),
        ({"norm": "batch"}, "unknown norm 'batch'"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    shape = {
        "name": "x",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "ffn_hidden": 128,
        "vocab": 100,
    }
    with pytest.raises(SpecError, match=message):
        ModelSpec(**{**shape, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2.0}, "layers must be a whole number, found 2.0"),
        ({"hidden": "64"}, "hidden must be a whole number, found '64'"),
        ({"heads": True}, "heads must be a whole number, found True"),
        ({"tied": "false"}, "tied must be true or false, found 'false'"),
        ({"name": 7}, "name must be a text, found 7"),
        ({"max_seq_len": -1}, "max_seq_len must be 0 or more, found -1"),
        ({"layers": 10**8}, "layers must be at most 10,000"),
    ],
)
def test_sizes_are_of_their_types_and_never_converted(changes, message):
    shape = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), 4)
    with pytest.raises(SpecError, match=message):
        ModelSpec(**{"name": "x", **shape, **changes})


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number, found '2'"),
        ({"hidden_size": 64.5}, "hidden_size must be a whole number, found 64.5"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be greater than 0, found 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"model_type": "opt", "max_position_embeddings": "9", "ffn_dim": 4}, "must be a whole"),
        ({"model_type": "mpt", "attn_config": "alibi"}, "attn_config must be a table"),
    ],
)
def test_fields_of_a_configuration_are_of_their_types(changes, message):
    with pytest.raises(SpecError, match=message):
        from_config({**LLAMA, **changes})


def test_null_in_a_configuration_stands_for_a_field_that_is_not_there():
    assert from_config({**LLAMA, "num_key_value_heads": None, "head_dim": None}).kv_heads == 4


def test_flops_per_token_are_six_per_matrix_element_and_causal_attention():
    model = find_model("llama-2-7b")
    matrices = 6 * (model.num_parameters - model.vocab * model.hidden - 65 * model.hidden)
    attention = 6 * 32 * 4096 * 4096
    assert model.flops_per_token(4096) == pytest.approx(matrices + attention)
    assert model.flops_per_token(4096, causal=False) == pytest.approx(matrices + 2 * attention)
