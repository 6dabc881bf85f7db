"""Adapters go with what can place, push and compare them; else the refusal names the key."""

import pytest
import torch
from torchtune.models.qwen2 import qwen2

from grpo_components.config import role_arguments
from grpo_components.config.lora_checks import check_adapters, check_lora
from grpo_components.config.training_checks import default_bound
from grpo_components.equivalence.families import FAMILIES, random_checkpoint

LORA = {"rank": 8, "alpha": 16.0}
TARGETS = "lora__target_modules"


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({TARGETS: ["q_proj", "q_proj"]}, r"^lora\.target_modules: .* with a name twice"),
        (
            {TARGETS: ["q_proj", "o_proj"], "checkpointer__model_type": "PHI4"},
            r"^lora\.target_modules: q_proj given with .*PHI4.*allowed: o_proj, down_proj$",
        ),
        ({"weights": "gloo"}, r"^weights: gloo given with lora.*allowed: object_store"),
        ({"tensor_parallel_dim": 2, "num_trainers": 2}, r"^tensor_parallel_dim: 2 given with lora"),
        (
            {"reward_shaping__kl_coeff": 0.1},
            r"^reward_shaping\.kl_coeff: 0\.1 given with lora.*loss\.kl_coeff",
        ),
    ],
)
def test_what_adapters_rule_out_is_refused(settings_with, changes, refusal):
    check_lora(settings_with(**{key: value for key, value in changes.items() if "lora" not in key}))
    with pytest.raises(ValueError, match=refusal):
        check_lora(settings_with(lora=dict(LORA), **changes))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("lora.rank=0", "lora.rank: 0 given"),
        ("lora.rank=513", "lora.rank: 513 given"),
        ("lora.alpha=0", "lora.alpha: 0 given"),
        ("lora.dropout=1", "lora.dropout: 1 given"),
        ("lora.target_modules=[qkv]", "lora.target_modules"),
        ("lora.target_modules=[]", "lora.target_modules"),
        ("lora.use_dora=true", "lora.use_dora"),
        ("lora=true", "lora: true given"),
    ],
)
def test_a_wrong_value_is_refused_by_name(refusal, override, problem):
    assert refusal("lora.rank=8", "lora.alpha=16", override).startswith(problem)


def test_a_kl_needs_no_reference_beside_adapters(settings_with):
    cfg = settings_with(lora=dict(LORA), loss__kl_coeff=0.1, num_references=2)
    assert cfg.num_references == 0
    check_lora(cfg)
    arguments = role_arguments._engine_options(cfg, 64)
    assert arguments.lora is not None and arguments.lora.scale == 2.0
    assert len(arguments.lora.target_modules) == 7  # every layer by default


def test_dropout_lifts_the_bound_on_the_mismatch(settings_with):
    assert default_bound(settings_with(lora=dict(LORA))) == default_bound(settings_with())
    assert default_bound(settings_with(lora=LORA | {"dropout": 0.1})) is None


def test_layers_that_the_base_model_has_under_other_names_are_refused(settings_with, tmp_path):
    base = random_checkpoint(FAMILIES["PHI4"], tmp_path, seed=0)
    changes = {"lora": dict(LORA), "base_model_path": str(base)}
    with torch.device("meta"):
        model = qwen2(256, 2, 4, 2, 128, 192, 256)
    with pytest.raises(ValueError, match=r"^lora\.target_modules: unknown tensor .*gate_proj"):
        check_adapters(settings_with(**changes), model)
