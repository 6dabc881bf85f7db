"""Which configs may take turns on their GPUs, where each role then runs, and what it is told."""

import pytest
import torch

from grpo_components.config.needs import hosts_of, needs_of
from grpo_components.config.role_arguments import RoleArguments

TURNS = ("colocate=true", "max_staleness=0", "pull_every_m_rollouts=1")
GPU = (*TURNS, "device=cuda", "generator.gpu_memory_utilization=0.4")


@pytest.fixture
def num_gpus(monkeypatch):
    """Let this machine have a number of GPUs."""

    def has(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return has


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["num_generators=2", "num_trainers=2"],
        ["num_generators=2", "num_trainers=8", "generator.tensor_parallel_size=4"],
        ["loss.kl_coeff=0.1", "stale_groups=wait", "dynamic_sampling.enabled=true"],
    ],
)
def test_trainers_are_as_many_as_the_workers_of_all_generators(check, overrides):
    assert check(*TURNS, *overrides).colocate


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["max_staleness=1"], "max_staleness"),
        (["max_staleness=1", "push_every_n_steps=2"], "max_staleness"),
        (["pull_every_m_rollouts=2"], "pull_every_m_rollouts"),
        (["num_trainers=2"], "num_trainers"),
        (["num_generators=2"], "num_trainers"),
        (["generator.tensor_parallel_size=2"], "num_trainers"),
        (["eval_only=true"], "colocate"),
        (["rollout_only=true"], "colocate"),
        (["train_from=/tmp/trajectories.jsonl"], "colocate"),
    ],
)
def test_what_rules_turns_out_is_named(refusal, overrides, key):
    message = refusal(*TURNS, *overrides)
    assert message.startswith(f"{key}: ")
    assert ("no turns" if key == "colocate" else "colocate: true") in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["gpus_per_generator=0.5"], "gpus_per_generator"),
        (["generator.kv_cache_gib=null"], "generator.kv_cache_gib"),
        (
            ["gpus_per_trainer=0.8", "num_trainers=2", "generator.tensor_parallel_size=2"],
            "gpus_per_trainer",
        ),
        (["gpus_per_trainer=0.3"], "generator.gpu_memory_utilization"),
    ],
)
def test_shares_of_a_gpu_are_the_pairs(refusal, num_gpus, overrides, key):
    num_gpus(8)
    assert refusal(*GPU, *overrides).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], 1),
        (["num_generators=3", "num_trainers=3"], 3),
        (["num_trainers=4", "generator.tensor_parallel_size=4"], 4),
        (["num_generators=2", "num_trainers=2", "loss.kl_coeff=0.1"], 3),
        (["gpus_per_trainer=0.8", "gpus_per_reference=0.2", "loss.kl_coeff=0.1"], 1),
    ],
)
def test_a_colocated_run_needs_the_trainers_gpus_and_those_of_who_takes_no_turns(
    check, refusal, num_gpus, overrides, gpus
):
    num_gpus(gpus)
    assert check(*GPU, *overrides).colocate
    if gpus > 1:
        num_gpus(gpus - 1)
        message = refusal(*GPU, *overrides)
        assert message.startswith("num_trainers: ") and f"need {gpus} GPUs" in message


def test_each_generator_runs_beside_its_own_trainers(settings_with):
    changes = {"num_generators": 2, "num_trainers": 4, "generator__tensor_parallel_size": 2}
    cfg = settings_with(device="cuda", colocate=True, **changes)
    assert hosts_of(cfg, 0) == ["trainer_0", "trainer_1"]
    assert hosts_of(cfg, 1) == ["trainer_2", "trainer_3"]
    assert hosts_of(settings_with(device="cuda", **changes), 0) == []
    assert hosts_of(settings_with(colocate=True, **changes), 0) == []  # on a CPU


def test_in_a_cluster_a_generator_takes_no_room_but_its_trainers(settings_with):
    changes = {"num_generators": 2, "num_trainers": 4, "generator__tensor_parallel_size": 2}
    arguments = RoleArguments(*({"num_gpus": gpus} for gpus in (0, 0, 1, 1, 1, 1, 2)))
    cfg = settings_with(device="cuda", colocate=True, **changes)
    ((family, need),) = needs_of(cfg, arguments, 0).items()
    assert (family, need.count, need.together, need.guests) == ("trainer", 4, 2, "generator")
    assert need.resources == {"GPU": 1} and "base_model_path" in need.paths
    split = needs_of(settings_with(device="cuda", **changes), arguments, 0)
    assert set(split) == {"trainer", "generator"}
    assert all(need.together == 1 and not need.guests for need in split.values())
