"""A transformers policy trains as the torchtune decoder with the same weights does."""

from functools import partial

import pytest
import torch
from lib.policies import TRANSFORMERS_SIZES, random_weights
from lib.trainer_ranks import (
    ADVANTAGES,
    SIBLINGS,
    assert_is_update,
    assert_weights_close,
    assert_weights_equal,
    expected_update,
    export,
    exported,
    step,
)
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_components.exchange.weights import checkpoint_shapes
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.loading import load_hugging_face
from grpo_components.models.meshes import Sharding

LAYOUTS = {
    "one rank, layers recomputed": (1, {"enable_activation_checkpointing": True}),
    "two shards": (2, {}),
    "one layer on two ranks": (2, {"sharding": Sharding(tensor=2)}),
}


def transformers_policy(base):
    build = partial(hugging_face, str(base))
    return {"build_model": build, "build_checkpointer": None, "model_type": None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_torchtune_decoder(ranks, base, layout):
    num_ranks, changes = LAYOUTS[layout]
    weights, metrics = expected_update(base, SIBLINGS, ADVANTAGES)
    policy = transformers_policy(base)
    results = ranks.step(base, num_ranks, SIBLINGS, ADVANTAGES, **policy, **changes)
    assert_is_update(results, weights, metrics)


def test_the_norms_of_qwen3s_heads_are_trained_as_on_one_rank(ranks, tmp_path):
    config = AutoConfig.for_model("qwen3", **TRANSFORMERS_SIZES, head_dim=16)
    model = random_weights(AutoModelForCausalLM.from_config(config), std=0.15)
    model.save_pretrained(tmp_path)
    calls = [step(SIBLINGS, ADVANTAGES), *export(1)]
    expected = exported(ranks.run(tmp_path, 1, calls, **transformers_policy(tmp_path)), 2)
    assert sum(name.endswith(("q_norm.weight", "k_norm.weight")) for name in expected) == 4
    for sharding in (Sharding(), Sharding(tensor=2)):
        results = ranks.run(tmp_path, 2, calls, sharding=sharding, **transformers_policy(tmp_path))
        assert_weights_close(exported(results, 2), expected)


def test_a_model_of_experts_exports_the_names_of_its_files_and_resumes(ranks, tmp_path):
    base = tmp_path / "base"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model("qwen3_moe", **TRANSFORMERS_SIZES, **experts, head_dim=8)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    saved = tmp_path / "saved"
    save = [("hold_state", False), ("write_state", str(saved))]
    calls = [step(SIBLINGS, ADVANTAGES), *save, step(SIBLINGS, ADVANTAGES, 1), *export(2)]
    adam = {"build_optimizer": partial(torch.optim.Adam, lr=1e-3)}
    through = ranks.run(base, 2, calls, **transformers_policy(base), **adam)
    trained = exported(through, 5)
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    assert shapes == checkpoint_shapes(base)
    assert any(".experts.3." in name for name in shapes)
    again = [("load_state", str(saved)), *calls[3:]]
    resumed = ranks.run(base, 2, again, **transformers_policy(base), **adam)
    assert_weights_equal(exported(resumed, 3), trained)
    assert checkpoint_shapes(saved) == shapes
    load_hugging_face(saved)  # refuses missing and unknown tensors
