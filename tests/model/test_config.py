"""Configs as people have them: what is read, what has a default, and what is refused by name."""

from __future__ import annotations

import json
import math

import pytest

from qkv.errors import ModelFileError
from qkv.model.config import PRESETS, from_gguf, from_hf
from qkv.model.families import ARCHITECTURES, FAMILIES

SOURCE = "config.json"
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "attention_bias": False,
}
GGUF = {
    "general.architecture": "qwen3",
    "qwen3.embedding_length": 1024,
    "qwen3.feed_forward_length": 3072,
    "qwen3.block_count": 28,
    "qwen3.attention.head_count": 16,
    "qwen3.attention.head_count_kv": 8,
    "qwen3.attention.key_length": 128,
    "qwen3.attention.value_length": 128,
    "qwen3.context_length": 40960,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.rope.freq_base": 1e6,
    "qwen3.rope.dimension_count": 128,
}


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def read(**changes):
    return from_hf({**QWEN3, **changes}, SOURCE)


def read_gguf(**changes):
    renamed = {key.replace("__", "."): value for key, value in changes.items()}
    return from_gguf({**GGUF, **renamed}, "x.gguf", vocab_size=151936, tied=True)


# ------------------------------------------------------------------------------------------ what is read


def test_a_published_config_is_the_preset():
    assert from_hf(QWEN3, SOURCE) == PRESETS["Qwen/Qwen3-0.6B"]


def test_gguf_metadata_says_the_same():
    assert read_gguf() == (PRESETS["Qwen/Qwen3-0.6B"], [])


def test_parameters_of_qwen3_are_counted_as_published():
    config = PRESETS["Qwen/Qwen3-0.6B"]
    assert config.parameter_count == 596_049_920
    assert math.prod(config.parameter_shapes()["model.embed_tokens.weight"]) == 155_582_464
    assert "lm_head.weight" not in config.parameter_shapes()


@pytest.mark.parametrize(
    ("name", "billions"), [("1.7B", 1.72), ("4B", 4.02), ("8B", 8.19), ("14B", 14.77), ("32B", 32.76)]
)
def test_the_other_sizes_have_about_the_parameters_their_names_say(name, billions):
    assert PRESETS[f"Qwen/Qwen3-{name}"].parameter_count / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(("family", "head_dim"), [("qwen3", 128), ("qwen2", 64), ("llama", 64), ("mistral", 64)])
def test_without_head_dim_each_family_has_its_own_default(family, head_dim):
    config = from_hf({**without(QWEN3, "head_dim"), "model_type": family}, SOURCE)
    assert config.head_dim == head_dim
    assert config.parameter_shapes()["model.layers.0.self_attn.q_proj.weight"] == (16 * head_dim, 1024)
    assert config.parameter_shapes()["model.layers.0.self_attn.o_proj.weight"] == (1024, 16 * head_dim)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_needs_no_head(tied):
    assert ("lm_head.weight" in read(tie_word_embeddings=tied).parameter_shapes()) is not tied


def test_qwen2_has_biases_though_no_key_says_so():
    """On q, k and v; o_proj and the MLP have none."""
    shapes = from_hf({**without(QWEN3, "attention_bias"), "model_type": "qwen2"}, SOURCE).parameter_shapes()
    biases = [name for name in shapes if name.endswith("bias")]
    assert len(biases) == 28 * 3
    assert {name.split(".")[-2] for name in biases} == {"q_proj", "k_proj", "v_proj"}
    assert not any("q_norm" in name for name in shapes)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_the_others_have_no_biases(family):
    shapes = from_hf({**QWEN3, "model_type": family}, SOURCE).parameter_shapes()
    assert not any(name.endswith("bias") for name in shapes)
    assert any("q_norm" in name for name in shapes) is (family == "qwen3")


def test_theta_is_read_from_both_forms():
    """transformers 5 writes `rope_parameters` and no top-level key; older versions wrote the key."""
    plain = without(QWEN3, "rope_theta", "rope_scaling")
    new = from_hf({**plain, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}, SOURCE)
    assert new == from_hf(QWEN3, SOURCE)
    assert from_hf(plain, SOURCE).rope_theta == 10000.0


@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("plain", [None, {}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": None}])
def test_a_block_that_scales_nothing_is_plain_rope(block, plain):
    assert read(**{block: plain}) == PRESETS["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize("eos", [1, [1, 2], None])
def test_end_tokens_are_not_the_configs_business(eos):
    assert read(eos_token_id=eos) == PRESETS["Qwen/Qwen3-0.6B"]


def test_missing_kv_heads_are_all_heads():
    assert from_hf(without(QWEN3, "num_key_value_heads"), SOURCE).num_key_value_heads == 16


def test_gguf_defaults_are_reported():
    missing = {"qwen3.rope.freq_base", "qwen3.attention.key_length", "qwen3.attention.value_length"}
    missing.add("qwen3.rope.dimension_count")
    metadata = without(GGUF, *missing)
    config, assumed = from_gguf(metadata, "x.gguf", vocab_size=100, tied=False)
    assert (config.rope_theta, config.head_dim, config.vocab_size) == (10000.0, 64, 100)
    assert not config.tie_word_embeddings
    assert len(assumed) >= 2
    assert all(any(key in line for line in assumed) for key in ("rope.freq_base", "attention.key_length"))


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("block", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["longrope", "dynamic", "banana", 7])
def test_scaling_that_is_not_implemented_is_refused_by_name_never_ignored(block, key, kind):
    with pytest.raises(ModelFileError, match=rf"^config\.json: {block}.*{kind}"):
        read(**{block: {key: kind, "factor": 4.0}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding.(window|attention)"),
        ({"layer_types": 7}, "layer_types"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 65}, "head_dim 65 is odd"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, words):
    with pytest.raises(ModelFileError, match=words) as caught:
        read(**changes)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "vocab_size", "max_position_embeddings")
HOSTILE = [0, -1, 1.5, 128.0, "128", True, [1], {}, 10**30, float("nan"), float("inf")]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: repr(v)[:9])
@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_whole_numbers_a_decoder_can_have(key, value):
    with pytest.raises(ModelFileError, match=rf"^config\.json: {key} must be a whole number"):
        read(**{key: value})


@pytest.mark.parametrize(
    "value", [0, -1e-6, "1e-6", True, [1], float("nan"), float("inf"), 1e300, 10**400], ids=lambda v: repr(v)[:9]
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_reals_are_positive_numbers(key, value):
    with pytest.raises(ModelFileError, match=rf"^config\.json: {key} must be a (positive )?number"):
        read(**{key: value})


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "model_type"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelFileError, match=rf"^config\.json: .*{key}"):
        from_hf(without(QWEN3, key), SOURCE)


def test_messages_stay_short_whatever_the_file_holds():
    for key in SIZES:
        with pytest.raises(ModelFileError) as caught:
            read(**{key: "x" * 100_000})
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("key", ["model_type", "hidden_act", "rope_scaling", "layer_types"])
def test_so_do_they_for_values_that_are_quoted(key):
    for value in ("x" * 100_000, ["y" * 100_000], {"rope_type": "z" * 100_000}):
        try:
            read(**{key: value})
        except ModelFileError as error:
            assert len(str(error)) < 400
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "mamba"}, "'mamba'"),
        ({"qwen3__attention__sliding_window": 4096}, "sliding-window"),
        ({"qwen3__rope__scaling__type": "banana"}, "'banana'"),
        ({"qwen3__attention__value_length": 64}, "different sizes"),
        ({"qwen3__rope__dimension_count": 64}, "dimension_count"),
        ({"qwen3__block_count": 10**9}, "block_count"),
        ({"qwen3__attention__head_count_kv": [8] * 28}, "head_count_kv"),
        ({"qwen3__attention__layer_norm_rms_epsilon": 0.0}, "epsilon"),
    ],
)
def test_gguf_metadata_is_refused_by_key(changes, words):
    with pytest.raises(ModelFileError, match=words) as caught:
        read_gguf(**changes)
    assert str(caught.value).startswith("x.gguf: ")
    assert "\n" not in str(caught.value)


def test_every_family_is_known_to_gguf_or_says_so():
    for family in FAMILIES:
        config = from_hf({**QWEN3, "model_type": family}, SOURCE)
        assert config.architecture in ARCHITECTURES


def test_a_config_survives_json():
    """What json reads from a file is what the tests above use."""
    assert from_hf(json.loads(json.dumps(QWEN3)), SOURCE) == from_hf(QWEN3, SOURCE)
