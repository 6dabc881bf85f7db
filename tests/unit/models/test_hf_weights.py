"""Units of conversion, and families that are refused; the equivalence ladder compares tensors."""

import json

import pytest

from grpo_components.models.hf_weights import hf_converter, layer_groups

HF_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


@pytest.mark.parametrize("family", ["GEMMA2", "LLAMA3_VISION", "REWARD"])
def test_a_family_that_cannot_be_converted_exactly_is_refused(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(ValueError, match=rf"^checkpointer\.model_type: {family}"):
        hf_converter(family, tmp_path)


def test_units_are_one_layer_or_one_tensor():
    groups = layer_groups(["tok.weight", "layers.0.a", "layers.10.a", "layers.0.b", "norm.scale"])
    assert groups == [["tok.weight"], ["layers.0.a", "layers.0.b"], ["layers.10.a"], ["norm.scale"]]
