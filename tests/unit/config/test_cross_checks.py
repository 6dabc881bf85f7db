"""Values that contradict each other, or that this machine cannot hold, are refused by a key."""

import sys

import pytest
import torch

from grpo_components.config.cross_checks import check_together

DECAY = "{schedule: linear, start: 0.1, end: 0.01, num_steps: 9}"
COSINE = "{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 3}"  # noqa: E501
QWEN3 = (
    "checkpointer._component_=grpo_components.models.qwen3_weights.Qwen3Checkpointer",
    "checkpointer.model_type=QWEN3",
)
TIS = "{_component_: grpo_components.objective.off_policy.TokenTIS}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["push_every_n_steps=4"], "push_every_n_steps"),
        (["max_staleness=0", "push_every_n_steps=2"], "push_every_n_steps"),
        (["loss.kl_coeff=0.1", "num_references=0"], "num_references"),
        (["min_generators=2"], "min_generators"),
        (["keep_policy_versions=true", "eval_only=true"], "keep_policy_versions"),
        (["keep_policy_versions=true", "rollout_only=true"], "keep_policy_versions"),
        ([f"loss.kl_coeff={DECAY}", "num_references=0"], "num_references"),
        (["reward_shaping.kl_coeff=0.1", "num_references=0"], "num_references"),
        (["reward_shaping.overlong_tokens=33"], "reward_shaping.overlong_tokens"),
        (["log_token_logprobs=true", "rollouts_logged_per_step=0"], "log_token_logprobs"),
        ([f"optimizer.lr={DECAY}", f"lr_scheduler={COSINE}"], "lr_scheduler"),
        (
            ["loss=grpo_components.objective.losses.DecoupledPPOLoss", f"off_policy={TIS}"],
            "off_policy",
        ),
        (["generator.top_k=50"], "generator.top_k"),
        (["generator.min_p=0.1"], "generator.min_p"),
        (["generator.presence_penalty=0.5"], "generator.presence_penalty"),
        (["generator.frequency_penalty=-0.5"], "generator.frequency_penalty"),
        (["generator.repetition_penalty=1.1"], "generator.repetition_penalty"),
        (["num_trainers=2", "updates_per_batch=33"], "num_trainers"),
        (["tokens_per_micro_batch=95"], "tokens_per_micro_batch"),
        (["generator.max_model_len=95"], "generator.max_model_len"),
        (["generator.max_response_tokens=449"], "generator.max_response_tokens"),
        (["rewards.correctness.is_success=false"], "rewards"),
        (["keep_best=loss/total"], "keep_best"),
        ([*QWEN3, "tokenizer.special_tokens_path=null"], "tokenizer._component_"),
        (["object_store_memory=1000000000000000"], "object_store_memory"),
    ],
)
def test_values_that_contradict_each_other_are_refused(refusal, overrides, key):
    assert refusal(*overrides).startswith(f"{key}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.kl_coeff=0", "num_references=0"],
        ["min_generators=2", "num_generators=2"],
        ["num_trainers=2", "updates_per_batch=32"],
        ["num_trainers=4", "tensor_parallel_dim=2", "data_parallel_replicate_dim=2"],
        ["tokens_per_micro_batch=96", "generator.max_model_len=96", "seed=0"],
        ["generator.max_response_tokens=448", "push_every_n_steps=3"],
        ["pull_every_m_rollouts=1000", "object_store_memory=80000000"],
        ["rewards.correctness.weight=-1", "generator.stop_token_ids=[1,2]"],
        ["reward_shaping.overlong_tokens=32", f"loss.kl_coeff={DECAY}"],
        [f"optimizer.lr={DECAY}", f"off_policy={TIS}"],
        [f"lr_scheduler={COSINE}"],
        ["off_policy={_component_: grpo_components.objective.off_policy.OffPolicySequenceMask}"],
        ["generator.top_k=-1", "generator.top_p=1", "generator.repetition_penalty=1.0"],
        ["generator.top_p=0.9", "generator.top_k=50", "generator.allow_biased_sampling=true"],
    ],
)
def test_values_at_the_edge_are_accepted(check, overrides):
    check(*overrides)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"groups_per_step": 2**14, "group_size": 2**14}, "groups_per_step"),
        ({"max_staleness": 10**6, "groups_per_step": 100}, "max_staleness"),
        ({"rollouts_in_flight": 2**14, "group_size": 2**8}, "rollouts_in_flight"),
        ({"num_generators": 1000, "rollouts_in_flight": 1000}, "num_generators"),
        ({"ppo_epochs": 10**4, "updates_per_batch": 2**10}, "ppo_epochs"),
        (
            {"generator__max_num_seqs": 4096, "generator__max_model_len": 2**22},
            "generator.max_num_seqs",
        ),
        (
            {"ptx": {"_component_": "a.B", "examples_per_update": 2**16}, "updates_per_batch": 99},
            "ptx.examples_per_update",
        ),
        ({"generator__kv_cache_gib": 2**19}, "generator.kv_cache_gib"),
    ],
)
def test_what_no_machine_can_hold_is_refused(settings_with, changes, key):
    with pytest.raises(ValueError, match=rf"^{key}: \d+ given.*; allowed: at most \d+$"):
        check_together(settings_with(**changes))


def test_a_warm_up_never_samples_colder_than_vllm_does(settings_with):
    """vLLM raises a lower temperature to 0.01, and the trainer would divide by another."""
    warm = {"schedule": "constant", "start": 1.0, "warmup_steps": 101}
    with pytest.raises(ValueError, match=r"^generator\.temperature\.warmup_steps: .* 100$"):
        check_together(settings_with(generator__temperature=warm))
    check_together(settings_with(generator__temperature=warm | {"warmup_steps": 100}))


def test_a_biased_sampler_is_refused_with_the_neutral_value_and_the_switch(refusal):
    message = refusal("generator.top_p=0.9")
    assert message.startswith("generator.top_p: 0.9 given")
    assert message.endswith("allowed: 1, or generator.allow_biased_sampling: true")


def test_exactly_one_reward_means_success(cfg, refusal):
    cfg.rewards.other = cfg.rewards.correctness
    message = refusal()
    assert message.startswith("rewards: ") and "correctness and other" in message


@pytest.mark.parametrize(
    ("logger", "package"),
    [("TensorBoardLogger", "tensorboard"), ("WandBLogger", "wandb"), ("CometLogger", "comet_ml")],
)
def test_a_logger_whose_package_is_missing_says_how_to_get_it(
    settings_with, monkeypatch, logger, package
):
    monkeypatch.setitem(sys.modules, package, None)
    node = {"_component_": f"torchtune.training.metric_logging.{logger}"}
    with pytest.raises(ValueError, match=rf"^metric_logger: .*`pip install {package}`"):
        check_together(settings_with(metric_logger=node))


@pytest.fixture
def num_gpus(monkeypatch):
    """Pretends that the machine has this many GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_cuda_without_a_gpu_is_refused(refusal, num_gpus):
    num_gpus(0)
    message = refusal("device=cuda")
    assert message.startswith("device: cuda given") and message.endswith("allowed: cpu")


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (["num_generators=4", "num_trainers=3", "loss.kl_coeff=0.1"], 8),
        (["num_generators=4", "num_trainers=3"], 7),  # the reference is not started
        (["num_generators=3", "gpus_per_generator=0.5", "generator.gpu_memory_utilization=0.4"], 3),
        (["num_generators=3", "gpus_per_generator=0.9", "num_trainers=1"], 4),
        (["num_generators=2", "gpus_per_generator=0.7", "gpus_per_trainer=0.3"], 2),
        (["num_generators=2", "num_trainers=3", "eval_only=true"], 2),  # no trainer is started
        (["num_generators=2", "num_trainers=3", "generator.tensor_parallel_size=4"], 11),
    ],
)
def test_roles_need_this_many_gpus_and_no_fewer(check, refusal, num_gpus, overrides, gpus):
    overrides = ["device=cuda", "generator.gpu_memory_utilization=0.4", *overrides]
    num_gpus(gpus)
    assert check(*overrides).generator.enforce_eager is False
    num_gpus(gpus - 1)
    message = refusal(*overrides)
    assert message.startswith("num_generators: ") and f"need {gpus} GPUs" in message


def test_shares_of_a_gpu_must_be_possible(refusal, num_gpus):
    num_gpus(8)
    message = refusal("device=cuda", "gpus_per_generator=0.4")
    assert message.startswith("generator.gpu_memory_utilization: 0.85 given")
    shared = ("generator.tensor_parallel_size=2", "gpus_per_generator=0.9")
    message = refusal("device=cuda", "generator.gpu_memory_utilization=0.4", *shared)
    assert message.startswith("gpus_per_generator: 0.9 given, and each of the 2 workers")
    message = refusal("device=cuda", "gpus_per_trainer=0.5", "num_trainers=2")
    assert message.startswith("gpus_per_trainer: 0.5 given")
