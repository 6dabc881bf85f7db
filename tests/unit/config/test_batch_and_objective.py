"""Batch, objective, trainer and adapters: what does not go together is refused by its key."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from equivalence.families import FAMILIES, random_checkpoint
from lib.config_errors import refusal_of, refused_key
from torchtune.models.qwen2 import qwen2

from grpo_components.config.model_trial import check_adapters
from grpo_components.config.objective import build_loss, build_penalties
from grpo_components.objective.losses import GSPOLoss
from grpo_components.settings import MAX_GENERATOR_KL

GSPO = "loss._component_=grpo_components.objective.losses.GSPOLoss"
LORA = "lora.rank=8 lora.alpha=16"


def test_a_loss_is_a_section_not_a_name(values_with, settings_with):
    assert refused_key(settings_with, loss="my.Loss") == "loss"
    assert settings_with(loss={"_component_": None}).loss.clip_low == 0.2


def test_without_a_component_the_loss_is_the_recipes_own(check):
    clip = build_loss(check("loss.clip_high=0.3 ~loss.clip_low"), lambda tokens, **clip: clip)
    assert clip(Namespace(step=0)) == {"clip_low": 0.2, "clip_high": 0.3}


def test_a_parameter_of_the_recipes_loss_that_nothing_gives_is_refused_before_a_call(check):
    def own(tokens, clip_low, my_coeff, bonus=0.0):
        return clip_low, my_coeff, bonus

    error = refusal_of(build_loss, check("~loss.clip_high"), own)
    assert error.key == "loss" and "my_coeff" in error.problem
    assert "partial(my_loss, my_coeff=cfg.user.my_coeff)" in error.allowed
    given = build_loss(check("~loss.clip_high"), partial(own, my_coeff=3))
    assert given(Namespace(step=0)) == (0.2, 3, 0.0)


def test_a_component_gets_its_own_arguments_and_the_penalties_get_theirs(check):
    cfg = check(f"{GSPO} loss.kl_coeff=0.1 loss.kl_estimator=k2 loss.entropy_coeff=0.01")
    loss, penalties = build_loss(cfg, lambda tokens: None), build_penalties(cfg)
    assert isinstance(loss, GSPOLoss) and loss.clip_low(0) == 0.2
    assert penalties.kl_coeff(0) == 0.1 and penalties.entropy_coeff == 0.01
    assert penalties.needs_reference


def test_keys_of_a_fork_are_passed_through(read):
    assert read().user == {}
    with pytest.raises(AttributeError) as missing:
        read().user.my_coeff  # noqa: B018
    assert missing.value.full_key == "user.my_coeff"
    user = read("user.my_coeff=0.5 user.names=[a,b] user.part._component_=no.such.Thing").user
    assert user == {"my_coeff": 0.5, "names": ["a", "b"], "part": {"_component_": "no.such.Thing"}}


def test_a_kl_needs_no_reference_beside_adapters(read):
    assert read(f"{LORA} loss.kl_coeff=0.1 num_references=2").num_references == 0


def test_the_bound_on_the_disagreement_is_that_of_the_dtype_or_of_the_config(read, settings_with):
    biased = "generator.top_p=0.9 generator.allow_biased_sampling=true"
    assert read().max_generator_kl == MAX_GENERATOR_KL["fp32"]
    assert read(f"max_generator_kl=0.5 {biased}").max_generator_kl == 0.5
    assert read(biased).max_generator_kl is None
    lora = {"rank": 8, "alpha": 16.0}
    assert settings_with(lora=lora).max_generator_kl == MAX_GENERATOR_KL["fp32"]
    assert settings_with(lora=lora | {"dropout": 0.1}).max_generator_kl is None


def test_adapters_of_layers_that_the_base_model_names_otherwise_are_refused(
    settings_with, tmp_path
):
    base = random_checkpoint(FAMILIES["PHI4"], tmp_path, seed=0)
    with torch.device("meta"):
        model = qwen2(256, 2, 4, 2, 128, 192, 256)
    cfg = settings_with(lora={"rank": 8, "alpha": 16.0}, base_model_path=str(base))
    assert refused_key(check_adapters, cfg, model) == "lora.target_modules"
