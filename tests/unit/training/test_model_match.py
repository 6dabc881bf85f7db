"""What of a built model differs from its base's config.json, in every family and by every route."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from equivalence.families import FAMILIES, hf_config_of
from torch import nn
from torchtune.models.gemma import gemma
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.phi3 import phi3
from torchtune.modules import MultiHeadAttention, RMSNorm
from transformers import AutoConfig

from grpo_components.training.model_match import differences, read_hf_config, sliding_window


def found(name, hf_config=None, *, edit=None, builder=None, **changes):
    """(argument, found, expected) of each difference of a family's model, after some changes."""
    family = FAMILIES[name]
    build = family.build_model if builder is None else builder
    with torch.device("meta"):
        model = partial(build, **changes)()
    if edit is not None:
        edit(model)
    hf_config = hf_config_of(family) if hf_config is None else hf_config
    listed = differences(model, family.model_type, hf_config)
    return list(dict.fromkeys((d.argument, d.found, d.expected) for d in listed))


def changed(name, **values):
    """The config of a family, some of its values replaced; None takes a key away."""
    given = hf_config_of(FAMILIES[name]).to_dict()
    given = {key: value for key, value in {**given, **values}.items() if value is not None}
    return AutoConfig.for_model(**given)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_base_models_own_builder_makes_no_difference(name):
    assert found(name) == []


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("argument", "value"), [("norm_eps", 2.0), ("attn_dropout", 0.9), ("rope_base", 10.0)]
)
def test_what_no_weight_shows_is_found_in_every_family(name, argument, value):
    ((key, actual, expected),) = found(name, **{argument: value})
    assert (key, actual) == (argument, value)
    assert expected != value


@pytest.mark.parametrize("name", ["LLAMA2", "LLAMA3", "MISTRAL", "PHI4", "QWEN2 (untied)"])
def test_heads_that_have_the_same_shapes_are_found(name):
    differing = {
        key: (actual, expected)
        for key, actual, expected in found(name, num_heads=2, num_kv_heads=1)
    }
    assert differing["num_heads"] == (2, 4)
    assert differing["num_kv_heads"] == (1, 2)
    assert differing["head_dim"] == (64, 32)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("LLAMA2", {"num_layers": 3}, ("num_layers", 3, 2)),
        ("GEMMA", {"vocab_size": 300}, ("vocab_size", 300, 256)),
        ("PHI3_MINI", {"intermediate_dim": 64}, ("intermediate_dim", 64, 192)),
        ("QWEN2 (tied)", {"tie_word_embeddings": False}, ("tie_word_embeddings", False, True)),
        ("QWEN2 (untied)", {"tie_word_embeddings": True}, ("tie_word_embeddings", True, False)),
        ("GEMMA", {"head_dim": 32}, ("head_dim", 32, 64)),
        ("QWEN3 (tied)", {"head_dim": 128}, ("head_dim", 128, 64)),
        ("QWEN3 (tied)", {"num_heads": 8}, ("num_heads", 8, 4)),
        ("LLAMA3_2", {"scale_factor": 8}, ("scale_factor", 8, 32.0)),
    ],
)
def test_other_arguments_of_the_builders_are_found(name, change, expected):
    assert expected in found(name, **change)


def test_a_default_of_torchtune_that_is_not_the_bases_is_found():
    """`norm_eps` deleted: torchtune's builder takes 1e-5."""
    hf_config = changed("QWEN2 (tied)", rms_norm_eps=1e-6)
    assert found("QWEN2 (tied)", hf_config) == [("norm_eps", 1e-5, 1e-6)]
    assert found("QWEN2 (tied)", hf_config, norm_eps=1e-6) == []


def test_a_key_that_config_json_lacks_is_transformers_default(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    hf_config = read_hf_config(tmp_path)
    assert (hf_config.rms_norm_eps, hf_config.rope_parameters["rope_theta"]) == (1e-6, 10_000.0)


def test_scaled_positions_are_found_in_both_directions():
    llama3_0, llama3_1_ = hf_config_of(FAMILIES["LLAMA3"]), hf_config_of(FAMILIES["LLAMA3 (3.1)"])
    sizes = FAMILIES["LLAMA3"].build_model.keywords
    assert found("LLAMA3", llama3_0, builder=partial(llama3_1, **sizes)) == [
        ("scale_factor", 8, "none")
    ]
    ((argument, actual, expected),) = found("LLAMA3", llama3_1_)
    assert (argument, actual, expected) == ("rope", "RotaryPositionalEmbeddings", "llama3")
    other = {**llama3_1_.rope_parameters, "high_freq_factor": 2.0}
    differing = found("LLAMA3 (3.1)", changed("LLAMA3 (3.1)", rope_parameters=other))
    assert ("high_freq_factor", 4, 2.0) in differing


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
def test_a_scaling_that_torchtune_does_not_have_is_found(scaling):
    rope = {"rope_theta": 1e6, **scaling}
    ((argument, _, _),) = found("QWEN2 (tied)", changed("QWEN2 (tied)", rope_parameters=rope))
    assert argument == "rope"


def test_the_other_order_of_rotated_dimensions_is_found():
    """The builder of Phi-3 has the names and shapes of Llama's, and turns other pairs."""
    sizes = FAMILIES["LLAMA2"].build_model.keywords
    ((argument, actual, _),) = found("LLAMA2", builder=partial(phi3, **sizes))
    assert (argument, actual) == ("rope", "Phi3RotaryPositionalEmbeddings")


def test_gemmas_norm_activation_and_embedding_are_found():
    sizes = {**FAMILIES["GEMMA"].build_model.keywords, "norm_eps": 1e-6, "head_dim": 32}
    llama_like = changed("LLAMA2", tie_word_embeddings=True, rms_norm_eps=1e-6)
    with torch.device("meta"):
        model = gemma(**sizes)
    differing = {d.argument for d in differences(model, "LLAMA3_2", llama_like)}
    assert differing == {"norm", "activation", "tok_embeddings"}


def test_a_module_that_a_builder_has_exchanged_is_found():
    def exact_gelu(model):
        for layer in model.layers:
            layer.mlp.activation = nn.GELU()

    def one_other_norm(model):
        model.layers[1].mlp_norm = RMSNorm(128, eps=1e-3)

    def dropout(model):
        model.layers[1].sa_scale = nn.Dropout(0.1)

    def no_positions(model):
        for layer in model.layers:
            layer.attn.pos_embeddings = None

    def seeing_ahead(model):
        model.layers[0].attn.is_causal = False

    assert [d[0] for d in found("GEMMA", edit=exact_gelu)] == ["activation"]
    assert found("LLAMA2", edit=one_other_norm) == [("norm_eps", 1e-3, 1e-5)]
    assert found("LLAMA2", edit=dropout) == [("attn_dropout", 0.1, 0.0)]
    assert [d[0] for d in found("LLAMA2", edit=no_positions)] == ["rope"]
    assert [d[0] for d in found("LLAMA2", edit=seeing_ahead)] == ["is_causal"]


def test_attention_that_normalizes_after_rope_is_found():
    """torchtune's, with modules of the same names and shapes."""

    def with_torchtunes_attention(model):
        for layer in model.layers:
            layer.attn.__class__ = MultiHeadAttention

    (difference,) = found("QWEN3 (untied)", edit=with_torchtunes_attention)
    assert difference == ("attn", "MultiHeadAttention", "qwen3")


def test_a_model_in_memory_is_left_as_it_is():
    family = FAMILIES["GEMMA"]
    model = family.build_model()
    before = copy.deepcopy(model.state_dict())
    assert list(differences(model, family.model_type, hf_config_of(family))) == []
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "phi3", "sliding_window": 2047}, 2047),
        ({"model_type": "phi3"}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 64}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, 64),
        ({"model_type": "qwen3", "sliding_window": 64}, None),
        ({"model_type": "llama", "sliding_window": 0}, None),
        ({}, None),
    ],
)
def test_the_window_of_the_generators_attention(raw, window):
    assert sliding_window(raw) == window


def test_a_config_json_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such family"}')
    with pytest.raises(ValueError, match=f"^base_model_path: .*{tmp_path / 'config.json'}"):
        read_hf_config(tmp_path)
