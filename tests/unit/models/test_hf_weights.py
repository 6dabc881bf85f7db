"""torchtune's own conversion takes ours back bit for bit, layer by layer."""

import json
from functools import partial

import pytest
import torch
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.models.phi3 import phi3, phi3_hf_to_tune
from torchtune.models.qwen2 import qwen2, qwen2_hf_to_tune

from grpo_components.models.hf_weights import hf_converter, layer_groups

SIZES = {"vocab_size": 64, "num_layers": 3, "num_heads": 4, "embed_dim": 32, "max_seq_len": 16}
HF_CONFIG = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": None,
    "tie_word_embeddings": True,
}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "dim": 32}


def build(family):
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_dim": 48}
    if family == "QWEN2":
        model = qwen2(**sizes, num_kv_heads=2, tie_word_embeddings=True)
        return model, partial(qwen2_hf_to_tune, **HEADS, tie_word_embeddings=True)
    if family == "LLAMA3":
        return llama3(**sizes, num_kv_heads=2), partial(hf_to_tune, **HEADS)
    to_tune = partial(phi3_hf_to_tune, num_heads=4, num_kv_heads=4, dim=32)
    return phi3(**sizes, num_kv_heads=4), to_tune


@pytest.mark.parametrize("family", ["QWEN2", "LLAMA3", "PHI3_MINI"])
def test_layer_by_layer_conversion_is_undone_bit_for_bit_by_torchtunes_own(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    model, to_tune = build(family)
    state_dict, to_hf = model.state_dict(), hf_converter(family, tmp_path)
    converted = {}
    for names in layer_groups(state_dict):
        converted |= to_hf({name: state_dict[name] for name in names})
    back = to_tune(converted)
    assert back.keys() == state_dict.keys()
    assert all(torch.equal(back[name], state_dict[name]) for name in state_dict)
    assert all(name.startswith(("model.", "lm_head.")) for name in converted)


@pytest.mark.parametrize("family", ["GEMMA2", "LLAMA3_VISION", "REWARD"])
def test_a_family_that_cannot_be_converted_exactly_is_refused(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(ValueError, match=rf"^checkpointer\.model_type: {family}"):
        hf_converter(family, tmp_path)


def test_units_are_one_layer_or_one_tensor():
    groups = layer_groups(["tok.weight", "layers.0.a", "layers.10.a", "layers.0.b", "norm.scale"])
    assert groups == [["tok.weight"], ["layers.0.a", "layers.0.b"], ["layers.10.a"], ["norm.scale"]]
