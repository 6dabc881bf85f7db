"""A trainer with adapters: what it trains, exports, saves, and takes for its reference."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lib.logprobs import whole_logprobs
from lib.trainer_ranks import (
    ADVANTAGES,
    RAGGED,
    SMALL,
    WHOLE,
    assert_metrics_close,
    assert_weights_close,
    assert_weights_equal,
    export,
    exported,
    hf_weights,
    largest_change,
    step,
    whole_model,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from grpo_components.models.lora import pushed_shapes
from grpo_components.models.meshes import Sharding
from grpo_components.objective.composition import Penalties
from grpo_components.objective.losses import DecoupledPPOLoss
from grpo_components.settings import LoraSettings

LORA = LoraSettings(
    rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"), save_merged=True
)
ADAPTED = {
    "lora": LORA,
    "needs_reference": True,
    "build_optimizer": partial(torch.optim.AdamW, lr=3e-2, fused=True),
    "ppo_epochs": 2,  # the first update leaves A as it is, because B is 0
}
PLAIN = [replace(trajectory, reference_logprobs=None) for trajectory in RAGGED]


def two_steps(batch):
    return [step(batch, ADVANTAGES), *export(1), step(batch, ADVANTAGES, 1), *export(2)]


@pytest.fixture(scope="module")
def recorded(base):
    """The batch with reference logprobs that were computed beforehand."""
    model = whole_model(base).requires_grad_(False)
    return [replace(t, reference_logprobs=whole_logprobs(model, t)[0].numpy()) for t in PLAIN]


@pytest.fixture(scope="module")
def expected(ranks, base, recorded):
    return ranks.run(base, 1, two_steps(recorded), **ADAPTED)


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, {"tokens_per_micro_batch": SMALL}),
        (2, {"tokens_per_micro_batch": SMALL, "enable_activation_checkpointing": True}),
        (2, {"tokens_per_micro_batch": WHOLE, "sharding": Sharding(replicate=2)}),
    ],
)
def test_the_policy_without_adapters_is_the_reference(ranks, base, expected, num_ranks, changes):
    results = ranks.run(base, num_ranks, two_steps(PLAIN), **ADAPTED | changes)
    for number in (0, 3):
        assert_metrics_close(results[0][number], expected[0][number])
    assert expected[0][3]["loss/kl_reference"] > 1e-4
    for number in (2, 5):
        adapter = exported(results, number)
        assert_weights_close(adapter, exported(expected, number))
    assert {name: tuple(t.shape) for name, t in adapter.items()} == pushed_shapes(base, LORA)
    assert all(tensor.any() for tensor in adapter.values())


def test_a_checkpoint_has_the_adapter_its_moments_and_merged_weights(ranks, base, tmp_path):
    save = [("hold_state", False), ("write_state", str(tmp_path))]
    calls = [step(PLAIN, ADVANTAGES), *save, step(PLAIN, ADVANTAGES, 1), *export(2)]
    whole = ranks.run(base, 1, calls, **ADAPTED)
    saved = FileSystemReader(tmp_path / "state" / "trainer").read_metadata().state_dict_metadata
    trained = {name for name in saved if name.startswith("model.")}
    assert len(trained) == 12 and all("lora_" in name for name in trained)
    assert sum("exp_avg" in name for name in saved) == 2 * len(trained), saved.keys()
    before, merged = hf_weights(base), load_file(tmp_path / "model.safetensors")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, tensor in before.items():
        path = f"base_model.model.{name.removesuffix('weight')}"
        if f"{path}lora_A.weight" in adapter:
            added = adapter[f"{path}lora_B.weight"] @ adapter[f"{path}lora_A.weight"]
            tensor = tensor + LORA.scale * added
        torch.testing.assert_close(merged[name], tensor)
    resume = [("load_state", str(tmp_path)), step(PLAIN, ADVANTAGES, 1), *export(2)]
    again = ranks.run(base, 1, resume, **ADAPTED)
    assert_weights_equal(exported(again, 3), exported(whole, 5))
    resharded = ranks.run(base, 2, resume, **ADAPTED)
    assert_weights_close(exported(resharded, 3), exported(whole, 5))


def test_base_weights_in_bf16_and_adapters_in_float32_are_sharded_together(ranks, base):
    options = {"dtype": "bf16", "enable_activation_checkpointing": True}
    results = ranks.step(base, 2, PLAIN, ADVANTAGES, **ADAPTED | options)
    assert results[0][0]["skipped_because"] == ""
    adapter = exported(results, 2)
    assert {tensor.dtype for tensor in adapter.values()} == {torch.bfloat16}
    assert all(tensor.any() for tensor in adapter.values())


def test_dropout_falls_on_training_passes_alone(ranks, base, recorded):
    """The reference, whose logprobs the policy has at first, is computed without it."""
    lora = LORA.model_copy(update={"dropout": 0.9})
    options = ADAPTED | {"lora": lora, "penalties": Penalties(kl_coeff=0.1)}
    first, again, given, without = (
        exported(ranks.step(base, 1, batch, ADVANTAGES, **changes), 2)
        for batch, changes in [(PLAIN, options)] * 2 + [(recorded, options), (PLAIN, ADAPTED)]
    )
    assert_weights_equal(first, again)
    assert_weights_close(first, given)
    assert largest_change(first, without) > 1e-3


def test_dropout_does_not_fall_on_the_logprobs_that_a_step_starts_from(ranks, base):
    """Of two steps that change nothing, both start from the same policy."""
    lora = LORA.model_copy(update={"dropout": 0.5})
    still = np.zeros_like(ADVANTAGES)
    calls = [step(PLAIN, ADVANTAGES), step(PLAIN, still, 1), step(PLAIN, still, 2), *export(3)]
    options = {"lora": lora, "needs_reference": False, "loss": DecoupledPPOLoss(max_weight=2.0)}
    sgd = partial(torch.optim.SGD, lr=1.0)
    given = ADAPTED | options | {"build_optimizer": sgd, "logged_responses": 99}
    first, second, third, *_ = ranks.run(base, 1, calls, **given)[0]
    assert second["token_logprobs"] == third["token_logprobs"] != first["token_logprobs"]
    assert second["ratio/mean"] != third["ratio/mean"], "the trained passes have dropout"
