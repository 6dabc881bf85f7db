"""The auxiliary loss of experts is transformers' own over all trained tokens of an update."""

from functools import partial

import numpy as np
import pytest
import torch
from lib.trainer_ranks import (
    LEARNING_RATE,
    SIBLINGS,
    assert_weights_close,
    exported,
    largest_change,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.objective.penalties import Penalties

COEFF, EXPERTS, PER_TOKEN = 0.5, 4, 2
LAYOUTS = {
    "one rank, one micro-batch": (1, {}),
    "one rank, micro-batches, layers recomputed": (
        1,
        {"tokens_per_micro_batch": 12, "enable_activation_checkpointing": True},
    ),
    "two ranks, micro-batches": (2, {"tokens_per_micro_batch": 12}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN}
    config = AutoConfig.for_model(
        "qwen3_moe", **sizes, **heads, **experts, moe_intermediate_size=16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(base, tmp_path_factory):
    """The weights after a step of the loss, and the loss, from one row per response."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    rows = []
    for trajectory in SIBLINGS:
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        given = model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits
        trained = np.flatnonzero(trajectory.response_mask) + len(trajectory.prompt_ids) - 1
        rows.append([layer[torch.from_numpy(trained)] for layer in given])
    layers = tuple(torch.cat(layer) for layer in zip(*rows, strict=True))
    loss = load_balancing_loss_func(layers, EXPERTS, PER_TOKEN)
    (COEFF * loss).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad
    folder = tmp_path_factory.mktemp("expected")
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), loss.item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_and_its_gradient_are_those_of_transformers_over_the_whole_update(
    ranks, base, expected, layout
):
    num_ranks, changes = LAYOUTS[layout]
    weights, loss = expected
    results = ranks.step(
        base,
        num_ranks,
        SIBLINGS,
        np.zeros(len(SIBLINGS)),  # the policy loss has no gradient
        build_model=partial(hugging_face, str(base)),
        build_checkpointer=None,
        model_type=None,
        penalties=Penalties(load_balancing_coeff=COEFF),
        **changes,
    )
    for metrics, *_ in results:
        assert metrics["loss/load_balancing"] == pytest.approx(loss, rel=1e-5)
        assert metrics["loss/total"] == pytest.approx(COEFF * loss, rel=1e-5)
        assert 1 <= metrics["experts/load_max"] <= EXPERTS
    assert_weights_close(exported(results, 2), weights)
    before = load_file(base / "model.safetensors")
    assert largest_change(before, weights) > 1e-3
