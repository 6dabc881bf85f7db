"""Model, optimizer and scheduler are those of the checkpoint and can be built, or are refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lib.config_errors import refusal_of, refused_key
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

from grpo_components.config.building import build, check_components
from grpo_components.config.model_checks import check_model

SIZES = {
    "vocab_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
    "tie_word_embeddings": True,
}
HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


@pytest.fixture
def cfg(tmp_path):
    """A config over the checkpoint of a small policy."""
    torch.manual_seed(0)
    to_hf = partial(qwen2_tune_to_hf, num_heads=4, num_kv_heads=2, dim=32, tie_word_embeddings=True)
    weights = {n: t.contiguous() for n, t in to_hf(qwen2(**SIZES).state_dict()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    return OmegaConf.create(
        {
            "base_model_path": str(tmp_path),
            "num_steps": 10,
            "model": {"_component_": "torchtune.models.qwen2.qwen2", **SIZES},
            "checkpointer": {"model_type": "QWEN2"},
            "model_type": "${checkpointer.model_type}",
            "lora": None,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
            "lr_scheduler": {"_component_": SCHEDULE, "num_warmup_steps": 2},
            "loss": {"load_balancing_coeff": 0.0},
            "compile": False,
            "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
        }
    )


def test_what_fits_together_passes_with_and_without_a_scheduler(cfg):
    check_components(cfg)
    cfg.lr_scheduler = None
    check_components(cfg)


@pytest.mark.parametrize(
    ("num_steps", "warmup", "is_doubted"),
    [(3, 0, 0), (3, 1, 0), (3, 2, 0), (3, 3, 1), (3, 100, 1), (1, 0, 0), (1, 1, 1), (1, 9, 1)],
)
def test_a_run_that_ends_in_its_warm_up_is_told_once(cfg, num_steps, warmup, is_doubted):
    cfg.num_steps, cfg.lr_scheduler.num_warmup_steps = num_steps, warmup
    assert len(check_components(cfg)) == is_doubted


def of_torch(optimizer, num_training_steps, name, **arguments):
    """A scheduler of torch, most of which take no `num_training_steps`."""
    return getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)


def times(optimizer, num_training_steps, factors):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[min(step, 4)])


@pytest.mark.parametrize(
    ("function", "arguments", "is_doubted"),
    [
        ("times", {"factors": [0, 0, 0, 0, 0]}, 1),
        ("times", {"factors": [0, 0, 0, 0, 1]}, 1),
        ("times", {"factors": [0, 0, 0, 1e-9, 0]}, 0),
        ("times", {"factors": [1, 0, 0, 0, 0]}, 0),
        ("times", {"factors": [1, 0.1, 0.2, 0.3, 0.4]}, 0),
        ("of_torch", {"name": "ConstantLR", "factor": 0.0, "total_iters": 99}, 1),
        ("of_torch", {"name": "LinearLR", "total_iters": 9}, 1),
        ("of_torch", {"name": "LinearLR", "total_iters": 2}, 0),
        ("of_torch", {"name": "OneCycleLR", "max_lr": 1e-2, "total_steps": 5}, 0),
        ("of_torch", {"name": "ExponentialLR", "gamma": 0.5}, 0),
    ],
)
def test_a_rate_of_0_or_one_that_only_rises_is_told_once(cfg, function, arguments, is_doubted):
    cfg.num_steps = 4
    cfg.lr_scheduler = {"_component_": f"{__name__}.{function}", **arguments}
    assert len(check_components(cfg)) == is_doubted


@pytest.mark.parametrize(("warmup", "is_doubted"), [(0, 0), (4, 0), (5, 1)])
def test_a_warm_up_of_the_optimizers_own_schedule_counts_as_well(cfg, warmup, is_doubted):
    cfg.num_steps, cfg.lr_scheduler = 4, None
    cfg.optimizer.lr = {"schedule": "constant", "start": 1e-3, "warmup_steps": warmup}
    assert len(check_components(cfg)) == is_doubted


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("model", {"embed_dim": 64}, "model"),
        ("model", {"vocab_size": 60}, "model"),
        ("model", {"vocab_size": 10**13}, "model"),  # and takes no memory
        ("model", {"intermediate_dim": 64}, "model"),
        ("model", {"num_kv_heads": 4}, "model"),
        ("model", {"num_layers": 1}, "model"),
        ("model", {"num_layers": 3}, "model"),
        ("model", {"norm_eps": 2.0}, "model.norm_eps"),
        ("model", {"attn_dropout": 0.9}, "model.attn_dropout"),
        ("model", {"rope_base": 10.0}, "model.rope_base"),
        ("model", {"num_heads": 2, "num_kv_heads": 1}, "model.num_heads"),
        ("model", {"no_such": 1}, "model"),
        ("model", {"_component_": "torchtune.models.llama3.llama3"}, "model"),
        ("checkpointer", {"model_type": "LLAMA3"}, "checkpointer.model_type"),
        ("loss", {"load_balancing_coeff": 0.01}, "loss.load_balancing_coeff"),
        ("optimizer", {"lr": -1.0}, "optimizer"),
        ("optimizer", {"_component_": "torch.optim.LBFGS"}, "optimizer"),
        ("optimizer", {"_component_": "torch.optim.SparseAdam"}, "optimizer"),
        ("optimizer", {"no_such": 1}, "optimizer"),
        ("lr_scheduler", {"no_such": 1}, "lr_scheduler"),
        ("lr_scheduler", {"_component_": "torch.optim.lr_scheduler.StepLR"}, "lr_scheduler"),
    ],
)
def test_what_the_trainer_could_not_use_is_refused_before_it_starts(cfg, section, change, key):
    cfg[section].update(change)
    if change.get("_component_", "").endswith("llama3"):
        del cfg.model.tie_word_embeddings
    assert refused_key(check_components, cfg) == key


def test_a_model_that_is_none_is_refused(cfg):
    cfg.model = {"_component_": "collections.Counter"}
    assert refused_key(check_components, cfg) == "checkpointer.model_type"


def test_a_tensor_of_another_shape_is_named_with_both_shapes(cfg):
    cfg.model.embed_dim = 64
    problem = refusal_of(check_components, cfg).problem
    assert "embed_tokens" in problem and "[50, 64]" in problem and "[50, 32]" in problem


def test_a_checkpoint_without_its_weights_is_refused(cfg):
    (Path(cfg.base_model_path) / "model.safetensors").unlink()
    assert refused_key(check_components, cfg) == "model"


@pytest.mark.parametrize("login", [None, "WANDB_API_KEY", "WANDB_MODE"])
def test_weights_and_biases_needs_a_login(cfg, monkeypatch, tmp_path, login):
    monkeypatch.setenv("HOME", str(tmp_path))  # and so no .netrc
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    cfg.metric_logger._component_ = "torchtune.training.metric_logging.WandBLogger"
    if login is None:
        assert refused_key(check_components, cfg) == "metric_logger"
    else:
        monkeypatch.setenv(login, "offline")
        check_components(cfg)


# ---- the model's function, from config.json -----------------------------------------------------

QWEN2 = HF_CONFIG | {"rms_norm_eps": 1e-6}
QWEN2_3B = QWEN2 | {
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "intermediate_size": 11008,
}
QWEN3_4B = QWEN2_3B | {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "sliding_window": None,
}
LATER = QWEN3_4B | {"rope_theta": 5e6, "max_position_embeddings": 262144}  # July 2025
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
MODEL = {"_component_": "torchtune.models.qwen2.qwen2", **SIZES, "norm_eps": 1e-6}
QWEN2_5 = {"_component_": "torchtune.models.qwen2_5.qwen2_5_3b"}
LLAMA = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
QWEN3 = {"_component_": "grpo_components.models.qwen3.qwen3_4b"}


def compare(folder, hf_config, node, model_type="QWEN2"):
    (folder / "config.json").write_text(json.dumps(hf_config))
    node = OmegaConf.create(node)
    with torch.device("meta"):
        model = build("model", node)
    check_model(node, model, model_type, folder)


@pytest.mark.parametrize(
    "given",
    [
        (QWEN2, MODEL),
        (QWEN2_3B, QWEN2_5),
        (LLAMA3_2_1B, LLAMA, "LLAMA3_2"),
        (QWEN3_4B, QWEN3, "QWEN3"),
        (LATER, QWEN3 | {"rope_base": 5e6}, "QWEN3"),
    ],
)
def test_the_models_of_the_tried_configs_are_the_bases(tmp_path, given):
    compare(tmp_path, *given)


@pytest.mark.parametrize(
    ("given", "key", "values"),
    [
        ((LATER, QWEN3, "QWEN3"), "model.rope_base", ("1000000.0", "5000000.0")),
        ((QWEN2, MODEL | {"norm_eps": 2}), "model.norm_eps", ("2", "1e-06")),
        ((QWEN2, MODEL | {"attn_dropout": 0.9}), "model.attn_dropout", ("0.9", "0.0")),
        ((QWEN2, MODEL | {"rope_base": 10}), "model.rope_base", ("10", "1000000.0")),
        ((QWEN2, MODEL | {"num_heads": 2, "num_kv_heads": 1}), "model.num_heads", ("2", "4")),
        (
            (QWEN2, MODEL | {"tie_word_embeddings": False}),
            "model.tie_word_embeddings",
            ("false", "true"),
        ),
        (
            (QWEN2, {k: v for k, v in MODEL.items() if k != "norm_eps"}),
            "model.norm_eps",
            ("1e-05", "1e-06"),
        ),
        ((QWEN2_3B | {"rope_theta": 1e4}, QWEN2_5), "model", ("1000000.0", "builder of")),
        (
            (QWEN2 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, MODEL),
            "model",
            ("dynamic", "a model without it"),
        ),
        (
            (LLAMA3_2_1B | {"model_type": "granite"}, LLAMA, "LLAMA3_2"),
            "checkpointer.model_type",
            ("granite", "llama | mistral"),
        ),
        (
            (QWEN2, MODEL | {"_component_": f"{__name__}.without_attention"}),
            "model",
            ("cannot be compared", "builder of"),
        ),
    ],
)
def test_a_model_of_another_function_is_refused_with_both_values(tmp_path, given, key, values):
    error = refusal_of(compare, tmp_path, *given)
    assert error.key == key
    assert values[0] in error.problem and values[1] in error.allowed


def without_attention(**sizes):
    model = qwen2(**sizes)
    model.layers[0].attn = torch.nn.Identity()
    return model
