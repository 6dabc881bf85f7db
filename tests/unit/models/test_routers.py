"""Only models for which transformers has a load-balancing loss get one."""

import pytest
import torch
from torchtune.models.qwen2 import qwen2
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_components.models.routers import check_has_routers

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 32,
}


def of_transformers(model_type):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_experts_with_a_loss_are_taken(model_type):
    check_has_routers(of_transformers(model_type))


@pytest.mark.parametrize("kind", ["qwen2", "glm4_moe", "torchtune"])
def test_other_models_are_refused_by_key(kind):
    """GLM-4.5 balances its experts by a bias of the router instead."""
    if kind == "torchtune":
        sizes = {"num_heads": 2, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 32}
        model = qwen2(vocab_size=64, num_layers=1, max_seq_len=64, **sizes)
    else:
        model = of_transformers(kind)
    with pytest.raises(ValueError, match=r"^loss\.load_balancing_coeff: .*allowed: 0"):
        check_has_routers(model)
