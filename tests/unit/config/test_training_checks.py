"""A layout, precision or memory option that cannot work is refused by its key, with the reason."""

import pytest

from grpo_components.config import training_checks
from grpo_components.config.training_checks import check_heads, check_training

VALUES = {"groups_per_step": 2, "group_size": 4, "compile": False}
CUDA = {"device": "cuda"}
LOW_BIT = {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "eps": 1e-5}}
OFFLOADING = {"enable_activation_offloading": True}
CHECKPOINTING = {"enable_activation_checkpointing": True}


def layout(ranks, tensor, replicate):
    return {
        "num_trainers": ranks,
        "tensor_parallel_dim": tensor,
        "data_parallel_replicate_dim": replicate,
    }


@pytest.mark.parametrize(
    "changes",
    [
        layout(4, 2, 2),
        layout(6, 3, 2),
        layout(8, 1, 8),
        layout(16, 2, 1),  # a part of the batch for each pair
        {"compile": True},
        LOW_BIT,
        {**CUDA, "dtype": "bf16", "reduce_dtype": "bf16"},
        {**CUDA, **OFFLOADING, **CHECKPOINTING, "fsdp_cpu_offload": True},
        {**layout(2, 2, 1), "checkpointer__model_type": "LLAMA3_2"},
        {**layout(2, 1, 2), "checkpointer__model_type": "GEMMA"},
    ],
)
def test_what_works_is_accepted(settings_with, changes, monkeypatch):
    monkeypatch.setattr(training_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    check_training(settings_with(**{**VALUES, **changes}))


@pytest.mark.parametrize(
    ("changes", "start", "reason"),
    [
        (layout(3, 2, 1), "tensor_parallel_dim: 2 given", "num_trainers: 3"),
        (layout(4, 2, 4), "data_parallel_replicate_dim: 4 given", "= 2"),
        (layout(9, 1, 1), "num_trainers: 9 given", "8 samples"),
        (
            {**layout(2, 2, 1), "checkpointer__model_type": "GEMMA"},
            "tensor_parallel_dim: 2 given",
            "no tensor-parallel plan for GEMMA; allowed: 1, or one of LLAMA3, LLAMA3_2, QWEN2",
        ),
        ({"dtype": "bf16"}, "dtype: bf16 given", "device: cpu"),
        ({**layout(2, 2, 1), "compile": True}, "compile: true given", "tensor_parallel_dim: 2"),
        (
            {"optimizer": {"_component_": "torchao.optim.AdamW4bit"}},
            "optimizer: torchao.optim.AdamW4bit given",
            "FSDP2 has sharded; allowed: torch.optim.AdamW, torchao.optim.AdamW8bit",
        ),
        (
            {"optimizer": {"_component_": "torchao.optim.AdamW8bit"}},
            "optimizer: torchao.optim.AdamW8bit given without eps",
            "allowed: optimizer.eps",
        ),
        ({"reduce_dtype": "bf16"}, "reduce_dtype: bf16 given", "device: cpu"),
        ({**OFFLOADING, **CHECKPOINTING}, "enable_activation_offloading: true", "device: cpu"),
        ({"fsdp_cpu_offload": True}, "fsdp_cpu_offload: true given", "device: cpu"),
        ({**CUDA, **OFFLOADING}, "enable_activation_offloading: true", "checkpointing: true"),
        (
            {**CUDA, "optimizer": {"_component_": "torchao.optim.CPUOffloadOptimizer"}},
            "optimizer: torchao.optim.CPUOffloadOptimizer given",
            "torchao.optim.CPUOffloadOptimizer",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(settings_with, changes, start, reason):
    with pytest.raises(ValueError, match="; allowed: ") as refused:
        check_training(settings_with(**{**VALUES, **changes}))
    assert str(refused.value).startswith(start)
    assert reason in str(refused.value)


@pytest.mark.parametrize(("changes", "key"), [({"compile": True}, "compile"), (LOW_BIT, "optim")])
def test_what_is_compiled_needs_a_compiler(settings_with, changes, key, monkeypatch):
    monkeypatch.setattr(training_checks.shutil, "which", lambda _: None)
    with pytest.raises(ValueError, match=rf"{key}.*finds no C\+\+ compiler"):
        check_training(settings_with(**{**VALUES, **changes}))
    monkeypatch.undo()
    monkeypatch.setattr(training_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(training_checks, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"{key}.*needs the package triton"):
        check_training(settings_with(**{**VALUES, **changes, **CUDA}))


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
)
def test_every_size_that_is_split_must_be_divisible(name):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96}
    check_heads(4, sizes)
    with pytest.raises(ValueError, match=f"tensor_parallel_dim: 4 given, .*{name} is 6"):
        check_heads(4, {**sizes, name: 6})
