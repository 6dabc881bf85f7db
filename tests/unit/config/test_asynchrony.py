"""Who runs, how far apart, on which GPUs, and which way the weights go: refused or accepted."""

import pytest
from lib.config_errors import refused_key

from grpo_components.config.open_run import build_reuse, open_run
from grpo_components.config.preflight import check_gpus
from grpo_components.config.start_roles import hosts_of, needs_of
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import processes_of

WORKERS = "generator.tensor_parallel_size"
LESS = "device=cuda generator.gpu_memory_utilization=0.4"
GPU = f"{LESS} colocate=true max_staleness=0 pull_every_m_rollouts=1"
FIFTHS = "loss.kl_coeff=0.1 gpus_per_reference=0.2"  # both on one GPU, before the generators
FULLEST = "loss.kl_coeff=0.1 gpus_per_trainer=0.6 gpus_per_reference=0.7 teacher.path=/a/model"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("device=cuda gpus_per_generator=0.4", "generator.gpu_memory_utilization"),
        (f"{LESS} {WORKERS}=2 gpus_per_generator=0.9", "gpus_per_generator"),
        ("device=cuda gpus_per_trainer=0.5 num_trainers=2", "gpus_per_trainer"),
        (f"{GPU} gpus_per_trainer=0.3", "generator.gpu_memory_utilization"),
    ],
)
def test_a_share_of_a_gpu_that_cannot_be_is_refused(refused, num_gpus, overrides, key):
    num_gpus(0)
    assert refused("device=cuda") == "device"
    num_gpus(8)
    assert refused(overrides) == key


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (f"{LESS} num_generators=4 num_trainers=3 loss.kl_coeff=0.1", 8),
        (f"{LESS} num_generators=3 gpus_per_generator=0.5", 3),
        (f"{LESS} num_generators=2 gpus_per_generator=0.7 gpus_per_trainer=0.3", 2),
        (f"{LESS} num_generators=2 num_trainers=3 eval_only=true", 2),  # no trainer is started
        (f"{LESS} {FIFTHS} reward_model.path=/a/model eval_only=true", 1),  # nor what groups need
        (f"{LESS} reward_model.path=/a/model gpus_per_reward_model=0.5 gpus_per_trainer=0.5", 2),
        (f"{LESS} gpus_per_trainer=0.8 teacher.path=/a/model gpus_per_teacher=0.2", 2),
        (f"{LESS} teacher.path=/a/model num_teachers=3", 5),
        (f"{LESS} teacher.path=/a/model num_teachers=3 rollout_only=true", 1),
        (f"{LESS} num_teachers=3", 2),  # no teacher, whatever its number
        (f"{LESS} {FIFTHS} num_references=2 num_generators=2 gpus_per_generator=0.8", 4),
        (f"{LESS} {FULLEST} gpus_per_teacher=0.3 gpus_per_generator=0.4", 2),
        (f"{GPU} num_trainers=4 {WORKERS}=4", 4),
        (f"{GPU} num_generators=2 num_trainers=2 loss.kl_coeff=0.1", 3),
        (f"{GPU} gpus_per_trainer=0.8 gpus_per_reference=0.2 loss.kl_coeff=0.1", 1),
    ],
)
def test_roles_need_this_many_gpus_and_no_fewer(read, num_gpus, overrides, gpus):
    settings = read(overrides)
    num_gpus(gpus)
    check_gpus(settings, here=True)
    num_gpus(gpus - 1)
    too_many = "num_trainers" if settings.colocate else "num_generators"
    assert refused_key(check_gpus, settings, here=True) == ("device" if gpus == 1 else too_many)
    check_gpus(settings, here=False)  # a joined cluster counts its own


FAMILIES = ("trainer", "reference", "teacher", "reward_model")
PAIRS = {"num_generators": 2, "num_trainers": 4, "generator__tensor_parallel_size": 2}
PAIRS |= {"max_staleness": 0, "pull_every_m_rollouts": 1}


def test_each_generator_runs_beside_its_own_trainers(settings_with):
    cfg = settings_with(device="cuda", colocate=True, **PAIRS)
    assert hosts_of(cfg, 0) == ["trainer_0", "trainer_1"]
    assert hosts_of(cfg, 1) == ["trainer_2", "trainer_3"]
    assert hosts_of(settings_with(device="cuda", **PAIRS), 0) == []
    assert hosts_of(settings_with(colocate=True, **PAIRS), 0) == []  # on a CPU


def test_in_a_cluster_a_generator_takes_no_room_but_its_trainers(settings_with):
    arguments = {key: {"num_gpus": 1} for key in FAMILIES} | {"generator": {"num_gpus": 2}}
    cfg = settings_with(device="cuda", colocate=True, **PAIRS)
    counts = processes_of(cfg, needs_reference=False)
    ((family, need),) = needs_of(cfg, arguments, counts).items()
    assert (family, need.count, need.together, need.guests) == ("trainer", 4, 2, "generator")
    assert need.resources == {"GPU": 1}
    split = needs_of(settings_with(device="cuda", **PAIRS), arguments, counts)
    assert set(split) == {"trainer", "generator"}
    assert all(need.together == 1 and not need.guests for need in split.values())
    tensor_parallel = settings_with(device="cuda", tensor_parallel_dim=2, **PAIRS)
    groups = needs_of(tensor_parallel, arguments, counts)
    assert (groups["trainer"].together, groups["generator"].together) == (2, 1)


def test_groups_are_reused_as_the_config_says(settings_with):
    assert not build_reuse(settings_with()).most
    reuse = build_reuse(settings_with(replay_generation={"share": 0.5}))
    assert reuse.describe() == {"replay_generation": {"share": 0.5, "max_uses": 2}}
    assert reuse.counts == (0, 4)


def test_a_fork_that_would_ignore_the_curriculum_is_refused(settings_with):
    stream = PromptStream([{"prompt_index": i} for i in range(3)], shuffle=True, seed=1)
    ledger = Ledger(StalenessContract(1, 1), 1, stream)
    cfg = settings_with(curriculum={})
    given = ledger, stream, lambda step: 1.0, None, [], []
    assert refused_key(open_run, cfg, *given) == "curriculum"
