"""A `model` that is not the base model's is refused in one line with the key and both values."""

from __future__ import annotations

import json

import pytest
import torch
from omegaconf import OmegaConf

from grpo_components.config.building import build
from grpo_components.config.model_checks import check_model

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN2_3B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
LLAMA3_2_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
MODEL = {
    "_component_": "torchtune.models.qwen2.qwen2",
    "vocab_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
    "norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def check(tmp_path, hf_config, node, model_type="QWEN2"):
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    node = OmegaConf.create(node)
    with torch.device("meta"):
        model = build("model", node)
    check_model(node, model, model_type, tmp_path)


def refusal(*args, **kwargs):
    with pytest.raises(ValueError) as refused:
        check(*args, **kwargs)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_the_models_of_the_tried_configs_are_the_bases(tmp_path):
    check(tmp_path, QWEN2, MODEL)
    check(tmp_path, QWEN2_3B, {"_component_": "torchtune.models.qwen2_5.qwen2_5_3b"})
    llama = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
    check(tmp_path, LLAMA3_2_1B, llama, "LLAMA3_2")
    qwen3 = {"_component_": "grpo_components.models.qwen3.qwen3_4b"}
    check(tmp_path, QWEN3_4B, qwen3, "QWEN3")
    later = {**QWEN3_4B, "rope_theta": 5e6, "max_position_embeddings": 262144}  # July 2025
    check(tmp_path, later, {**qwen3, "rope_base": 5e6}, "QWEN3")
    message = refusal(tmp_path, later, qwen3, "QWEN3")
    assert message.startswith("model.rope_base: not given, so it is 1000000.0, and ")


@pytest.mark.parametrize(
    ("given", "theirs", "allowed"),
    [
        ({"norm_eps": 2}, "rms_norm_eps: 1e-06", "1e-06"),
        ({"attn_dropout": 0.9}, "no dropout", "0.0"),
        ({"rope_base": 10}, "rope_theta: 1000000.0", "1000000.0"),
        ({"num_heads": 2, "num_kv_heads": 1}, "num_attention_heads: 4", "4"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: true", "true"),
    ],
)
def test_a_key_of_another_value_is_named_with_both(tmp_path, given, theirs, allowed):
    name, value = next(iter(given.items()))
    message = refusal(tmp_path, QWEN2, {**MODEL, **given})
    assert message.startswith(f"model.{name}: {str(value).lower()} given, and ")
    assert theirs in message
    assert message.endswith(f"; allowed: {allowed}")


def test_a_deleted_key_is_named_with_the_builders_default(tmp_path):
    node = {key: value for key, value in MODEL.items() if key != "norm_eps"}
    message = refusal(tmp_path, QWEN2, node)
    assert message.startswith("model.norm_eps: not given, so it is 1e-05, and ")
    assert message.endswith("rms_norm_eps: 1e-06; allowed: 1e-06")


def test_a_named_builder_of_another_model_is_named(tmp_path):
    node = {"_component_": "torchtune.models.qwen2_5.qwen2_5_3b"}
    message = refusal(tmp_path, {**QWEN2_3B, "rope_theta": 1e4}, node)
    assert message.startswith("model: torchtune.models.qwen2_5.qwen2_5_3b has rope_base: 1000000.0")
    assert message.endswith(f"rope_theta: 10000.0; allowed: the builder of {tmp_path}")


def test_a_scaling_that_no_builder_has_says_so(tmp_path):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    message = refusal(tmp_path, {**QWEN2, "rope_scaling": scaling}, MODEL)
    assert "rope_scaling: dynamic" in message
    assert message.endswith("; allowed: a model without it")


def test_a_family_with_the_same_names_and_another_function_is_refused(tmp_path):
    granite = {**LLAMA3_2_1B, "model_type": "granite"}
    node = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
    message = refusal(tmp_path, granite, node, "LLAMA3_2")
    assert message.startswith("checkpointer.model_type: LLAMA3_2 given, and ")
    assert "granite" in message and "llama | mistral" in message


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_decoder.py").write_text(
        "from torch import nn\nfrom torchtune.models.qwen2 import qwen2\n\n"
        "def decoder(**sizes):\n    model = qwen2(**sizes)\n"
        "    model.layers[0].attn = nn.Identity()\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(tmp_path, QWEN2, {**MODEL, "_component_": "my_decoder.decoder"})
    assert message.startswith("model: my_decoder.decoder cannot be compared with config.json of ")
