"""Batch, objective, trainer and adapters: what does not go together is refused by its key."""

from argparse import Namespace

import pytest
import torch
from equivalence.families import FAMILIES, random_checkpoint
from lib.config_errors import refused_key
from torchtune.models.qwen2 import qwen2

from grpo_components.config.files import check_heads
from grpo_components.config.model_trial import check_adapters
from grpo_components.config.objective import build_loss, build_penalties
from grpo_components.objective.losses import GSPOLoss
from grpo_components.settings import MAX_GENERATOR_KL

DECAY = "{schedule: linear, start: 0.1, end: 0.01, num_steps: 9}"
LRS = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
COSINE = f"{{_component_: {LRS}, num_warmup_steps: 3}}"
LOSSES = "grpo_components.objective.losses"
GSPO = f"loss._component_={LOSSES}.GSPOLoss"
TIS = "off_policy={_component_: grpo_components.objective.off_policy.TokenTIS}"
LORA = "lora.rank=8 lora.alpha=16"
SMALL = "groups_per_step=2 group_size=4"
LOW_BIT = "optimizer._component_=torchao.optim.AdamW8bit"
CUDA = "device=cuda"
OFFLOADING = "enable_activation_offloading=true"
CHECKPOINTING = "enable_activation_checkpointing=true"
TAKES = """
class Takes:
    def __init__(self, kl_coeff=0.0):
        pass

    def __call__(self, tokens):
        raise NotImplementedError
"""


def layout(ranks, tensor, replicate):
    dims = f"tensor_parallel_dim={tensor} data_parallel_replicate_dim={replicate}"
    return f"{SMALL} num_trainers={ranks} {dims}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("num_trainers=2 updates_per_batch=33", "num_trainers"),
        ("tokens_per_micro_batch=95", "tokens_per_micro_batch"),
        # objective
        ("loss.kl_coeff=0.1 num_references=0", "num_references"),
        (f"num_references=0 loss.kl_coeff={DECAY}", "num_references"),
        ("reward_shaping.kl_coeff=0.1 num_references=0", "num_references"),
        ("reward_shaping.overlong_tokens=33", "reward_shaping.overlong_tokens"),
        ("advantages.kl_coeff=x", "advantages.kl_coeff"),
        ("advantages.kl_coeff={schedule: linear}", "advantages.kl_coeff.start"),
        (f"optimizer.lr={DECAY} lr_scheduler={COSINE}", "lr_scheduler"),
        (f"loss={LOSSES}.DecoupledPPOLoss {TIS}", "off_policy"),
        ("loss.dual_clip=3.0", "loss.dual_clip"),
        (f"{GSPO} loss.kl_estimator=k4", "loss.kl_estimator"),
        ("loss.entropy_coeff=-1", "loss.entropy_coeff"),
        ("user=3", "user"),
        # trainer
        (layout(3, 2, 1), "tensor_parallel_dim"),
        (layout(4, 2, 4), "data_parallel_replicate_dim"),
        (layout(9, 1, 1), "num_trainers"),
        (f"{layout(2, 2, 1)} checkpointer.model_type=GEMMA", "tensor_parallel_dim"),
        (f"{layout(2, 2, 1)} compile=true", "compile"),
        ("dtype=bf16", "dtype"),
        ("reduce_dtype=bf16", "reduce_dtype"),
        (f"{OFFLOADING} {CHECKPOINTING}", "enable_activation_offloading"),
        (f"{CUDA} {OFFLOADING}", "enable_activation_offloading"),
        ("fsdp_cpu_offload=true", "fsdp_cpu_offload"),
        (f"{LOW_BIT} optimizer.eps=null", "optimizer"),
        (f"{CUDA} optimizer._component_=torchao.optim.CPUOffloadOptimizer", "optimizer"),
        # adapters
        ("lora.rank=8", "lora.alpha"),
        (f"{LORA} lora.target_modules=[qkv]", "lora.target_modules"),
        (f"{LORA} lora.target_modules=[q_proj,q_proj]", "lora.target_modules"),
        (
            f"{LORA} lora.target_modules=[q_proj,o_proj] checkpointer.model_type=PHI4",
            "lora.target_modules",
        ),
        (f"{LORA} weights=nccl", "weights"),
        (f"{LORA} tensor_parallel_dim=2 num_trainers=2", "tensor_parallel_dim"),
        (f"{LORA} reward_shaping.kl_coeff=0.1", "reward_shaping.kl_coeff"),
        # teacher
        ("teacher.coeff=1", "teacher.path"),
    ],
)
def test_what_is_refused_by_its_key(read, overrides, key):
    assert refused_key(read, overrides) == key


@pytest.mark.parametrize(
    "overrides",
    [
        "loss.kl_coeff=0 num_references=0",
        "num_trainers=2 updates_per_batch=32",
        "num_trainers=4 tensor_parallel_dim=2 data_parallel_replicate_dim=2",
        "tokens_per_micro_batch=96",
        f"reward_shaping.overlong_tokens=32 loss.kl_coeff={DECAY}",
        f"optimizer.lr={DECAY} {TIS}",
        f"lr_scheduler={COSINE}",
        "off_policy={_component_: grpo_components.objective.off_policy.OffPolicySequenceMask}",
        layout(4, 2, 2),
        layout(6, 3, 2),
        layout(8, 1, 8),
        layout(16, 2, 1),  # a part of the batch for each pair
        "compile=true",
        f"{LOW_BIT} optimizer.eps=1e-5",
        f"{CUDA} dtype=bf16 reduce_dtype=bf16",
        f"{CUDA} {OFFLOADING} {CHECKPOINTING} fsdp_cpu_offload=true",
        f"{layout(2, 2, 1)} checkpointer.model_type=LLAMA3_2",
        f"{layout(2, 1, 2)} checkpointer.model_type=GEMMA",
        LORA,
        f"{LORA} loss.kl_coeff=0.1",
        "teacher.path=/a teacher.coeff=0.1",
    ],
)
def test_what_is_accepted(read, overrides):
    read(overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (f"{GSPO} loss.epsilon=3.0", "loss.epsilon"),
        ("loss._component_=my.Loss", "loss._component_"),
        ("loss._component_=takes_kl.Takes ~loss.clip_low ~loss.clip_high", "loss.kl_coeff"),
    ],
)
def test_an_argument_that_the_loss_does_not_take_is_refused(refused, overrides, key, tmp_path):
    (tmp_path / "here" / "takes_kl.py").write_text(TAKES)
    assert refused(overrides) == key


def test_a_loss_is_a_section_not_a_name(values_with, settings_with):
    assert refused_key(settings_with, loss="my.Loss") == "loss"
    assert settings_with(loss={"_component_": None}).loss.clip_low == 0.2


def test_without_a_component_the_loss_is_the_recipes_own(check):
    clip = build_loss(check("loss.clip_high=0.3 ~loss.clip_low"), lambda tokens, **clip: clip)
    assert clip(Namespace(step=0)) == {"clip_low": 0.2, "clip_high": 0.3}


def test_a_component_gets_its_own_arguments_and_the_penalties_get_theirs(check):
    cfg = check(f"{GSPO} loss.kl_coeff=0.1 loss.kl_estimator=k2 loss.entropy_coeff=0.01")
    loss, penalties = build_loss(cfg, lambda tokens: None), build_penalties(cfg)
    assert isinstance(loss, GSPOLoss) and loss.clip_low(0) == 0.2
    assert penalties.kl_coeff(0) == 0.1 and penalties.entropy_coeff == 0.01
    assert penalties.needs_reference


def test_keys_of_a_fork_are_passed_through(read):
    assert read().user == {}
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


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
)
def test_every_size_that_is_split_must_be_divisible(name):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 96}
    check_heads(4, sizes)
    assert refused_key(check_heads, 4, {**sizes, name: 6}) == "tensor_parallel_dim"
