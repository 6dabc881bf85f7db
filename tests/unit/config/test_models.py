"""Model, optimizer and scheduler are those of the checkpoint and can be built, or are refused."""

from pathlib import Path

import pytest
import torch
from lib.config_errors import refusal_of, refused_key
from lib.policies import SIZES
from lib.trainer_ranks import random_policy
from omegaconf import OmegaConf

from grpo_components.config.model_trial import try_training

QWEN2 = {"_component_": "torchtune.models.qwen2.qwen2", "tie_word_embeddings": True, **SIZES}
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


@pytest.fixture
def cfg(tmp_path):
    """A config over the checkpoint of a small policy."""
    return OmegaConf.create(
        {
            **{"base_model_path": str(random_policy(tmp_path)), "num_steps": 10, "lora": None},
            "model": QWEN2,
            "checkpointer": {"model_type": "QWEN2"},
            "model_type": "${checkpointer.model_type}",
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
            "lr_scheduler": {"_component_": SCHEDULE, "num_warmup_steps": 2},
        }
    )


def of_torch(optimizer, num_training_steps, name, **arguments):
    """A scheduler of torch, most of which take no `num_training_steps`."""
    return getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)


def times(optimizer, num_training_steps, factors):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 4)])


RISES = [(3, 0, 0), (3, 2, 0), (3, 3, 1), (3, 100, 1), (1, 0, 0), (1, 1, 1)]
"""Steps, those of the warm-up, and whether that is doubted."""
FACTORS = [([0, 0, 0, 0, 0], 1), ([0, 0, 0, 0, 1], 1), ([1, 0, 0, 0, 0], 0)]
FACTORS += [([1, 0.1, 0.2, 0.3, 0.4], 0)]


@pytest.mark.parametrize(
    ("num_steps", "component", "arguments", "is_doubted"),
    [
        *((steps, SCHEDULE, {"num_warmup_steps": n}, doubt) for steps, n, doubt in RISES),
        *((4, f"{__name__}.times", {"factors": factors}, doubt) for factors, doubt in FACTORS),
        (4, f"{__name__}.of_torch", {"name": "LinearLR", "total_iters": 9}, 1),
        (4, f"{__name__}.of_torch", {"name": "LinearLR", "total_iters": 2}, 0),
    ],
)
def test_a_rate_of_0_or_one_that_only_rises_is_told_once(
    cfg, num_steps, component, arguments, is_doubted
):
    cfg.num_steps, cfg.lr_scheduler = num_steps, {"_component_": component, **arguments}
    assert len(try_training(cfg)) == is_doubted


@pytest.mark.parametrize(("warmup", "is_doubted"), [(0, 0), (4, 0), (5, 1)])
def test_a_warm_up_of_the_optimizers_own_schedule_counts_as_well(cfg, warmup, is_doubted):
    cfg.num_steps, cfg.lr_scheduler = 4, None
    cfg.optimizer.lr = {"schedule": "constant", "start": 1e-3, "warmup_steps": warmup}
    assert len(try_training(cfg)) == is_doubted


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("model", {"vocab_size": 10**13}, "model"),  # and takes no memory
        ("model", {"num_layers": 3}, "model"),
        ("model", {"_component_": "torchtune.models.llama3.llama3"}, "model"),
        ("model", {"_component_": "collections.Counter"}, "checkpointer.model_type"),
        ("checkpointer", {"model_type": "LLAMA3"}, "checkpointer.model_type"),
        ("optimizer", {"lr": -1.0}, "optimizer"),
        ("optimizer", {"_component_": "torch.optim.LBFGS"}, "optimizer"),
        ("optimizer", {"_component_": "torch.optim.SparseAdam"}, "optimizer"),
        ("lr_scheduler", {"_component_": "torch.optim.lr_scheduler.StepLR"}, "lr_scheduler"),
    ],
)
def test_what_the_trainer_could_not_use_is_refused_before_it_starts(cfg, section, change, key):
    cfg[section].update(change)
    if change.get("_component_", "").endswith("llama3"):
        del cfg.model.tie_word_embeddings
    assert refused_key(try_training, cfg) == key


def test_a_tensor_of_another_shape_is_named_with_both_shapes(cfg):
    cfg.model.embed_dim = 48
    error = refusal_of(try_training, cfg)
    assert error.key == "model"
    assert all(part in error.problem for part in ("embed_tokens", "[64, 48]", "[64, 32]"))


def test_a_checkpoint_without_its_weights_is_refused(cfg):
    (Path(cfg.base_model_path) / "model.safetensors").unlink()
    assert refused_key(try_training, cfg) == "model"
