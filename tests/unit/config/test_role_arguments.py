"""Each role gets the threads and GPUs that the config gives it, or its share of the cores."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from grpo_components.config.replayed import available_cpus
from grpo_components.config.start_roles import role_arguments
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import processes_of


@pytest.fixture
def arguments(settings_with):
    """The arguments of each kind of role, of the tiny config with other values at some keys."""

    def build(tokenizer=(), **changes):
        cfg = settings_with(**changes)
        given = {"objective": None, "longest_prompt": 64, "contract": StalenessContract.of(cfg)}
        tokenizer = SimpleNamespace(**{"stop_tokens": [0], **dict(tokenizer)})
        return role_arguments(cfg, processes_of(cfg, True), tokenizer=tokenizer, **given)

    return build


@pytest.mark.parametrize(
    ("given", "trainer", "generator"),
    [({}, None, None), ({"trainer": 5}, 5, None), ({"trainer": 1, "generator": 7}, 1, 7)],
)
def test_threads_are_those_of_the_config_or_the_cores_over_the_roles(
    settings_with, arguments, given, trainer, generator
):
    share = max(1, available_cpus(settings_with()) // 4)
    roles = arguments(num_trainers=2, num_generators=1, cpu_threads=given)
    threads = [roles[name]["cpu_threads"] for name in ("trainer", "generator", "reference")]
    assert threads == [trainer or share, generator or share, share]


@pytest.mark.parametrize(
    ("device", "share", "workers", "gpus"),
    [("cuda", 0.5, 1, 0.5), ("cuda", 1.0, 4, 4.0), ("cpu", 1.0, 4, 0)],
)
def test_a_generator_gets_a_gpu_for_each_tensor_parallel_worker(
    arguments, device, share, workers, gpus
):
    changes = {"gpus_per_generator": share, "generator__tensor_parallel_size": workers}
    generator = arguments(device=device, **changes)["generator"]
    assert generator["num_gpus"] == gpus
    assert generator["settings"].tensor_parallel_size == workers


def test_the_engine_receives_and_the_first_rank_sends_the_same_way(arguments):
    for way in ("object_store", "nccl"):
        roles = arguments(device="cuda", weights=way, generator__tensor_parallel_size=2)
        opens = roles["trainer"]["options"].open_sender
        transfer = None if way == "object_store" else way
        assert roles["generator"]["engine"].weight_transfer == transfer
        assert (opens is None) == (way == "object_store")
    assert opens.args == ("cuda",) and opens.keywords == {"workers": 2}


def test_adapters_are_the_engines_too(settings_with, arguments):
    lora = {"rank": 8, "alpha": 16.0}
    adapters = arguments(lora=lora)["generator"]["engine"].lora
    whole = settings_with(lora=lora).model_dump()
    assert OmegaConf.to_container(OmegaConf.create(whole)) == whole, "as a resume compares it"
    assert adapters.scale == 2.0 and len(adapters.target_modules) == 7  # every layer by default


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        ({"encoder": {"a": 0, "b": 1}, "special_tokens": {"<e>": 2, "<f>": 8}}, 9),  # Qwen's
        ({"vocab_size": 32, "special_tokens": {"<e>": 40}}, 41),  # Phi-3's
        ({"vocab_size": 32, "stop_tokens": [3]}, 32),
        ({"vocab_size": 32, "stop_tokens": [50]}, 51),
        ({}, None),
    ],
)
def test_all_who_sample_or_give_logprobs_know_the_same_ids(arguments, tokenizer, ids):
    roles = arguments(tokenizer)
    found = (roles["generator"]["engine"], roles["trainer"]["options"])
    assert [each.num_ids for each in found] == [ids] * 2 == [roles["reference"]["num_ids"], ids]


def test_agents_may_be_sampled_what_the_models_own_tokenizer_knows(settings_with, arguments):
    agents = {"_component_": "grpo_components.agents.environment.AgentEnvironment"}
    known = len(AutoTokenizer.from_pretrained(settings_with().base_model_path))
    roles = arguments({"vocab_size": known - 9}, environment={**agents, "agent": "a.b"})
    assert roles["generator"]["engine"].num_ids == known


def test_the_stand_ins_of_half_a_run_get_its_file(settings_with, arguments):
    cfg = settings_with()
    roles = arguments(rollout_only=True, log_token_logprobs=True, num_generators=2)
    path = f"{cfg.output_dir}/trajectories.jsonl"
    assert roles["trainer"] == {"path": path, "logged_responses": cfg.group_size}
    assert arguments()["trainer"]["restarts_alone"] is False
    assert roles["generator"]["min_living"] == 2
    roles = arguments(train_from="/a/trajectories.jsonl")
    assert roles["generator"] == {"path": "/a/trajectories.jsonl", "min_living": 1}
