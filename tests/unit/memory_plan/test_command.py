"""The plan of every GPU config fits its header's GPUs; what does not fit is named by its key."""

import re
from pathlib import Path

import pytest
from lib.dry_runs import published_config
from omegaconf import OmegaConf
from transformers import LlamaConfig

from grpo_components.config.reading import read_config_file, read_settings
from grpo_tools.memory_plan.__main__ import main
from grpo_tools.memory_plan.plan import in_turns
from grpo_tools.memory_plan.role_memory import GIB, Device, RoleMemory

FOLDER = Path(__file__).parents[3] / "recipes/configs"
OFTEN = ("qwen3B_async_grpo", "qwen3B_colocated_grpo_1gpu", "qwen3_8B_lora_async_grpo_1gpu")
GPU_CONFIGS = [
    pytest.param(path.stem, marks=[] if path.stem in OFTEN else [pytest.mark.nightly])
    for path in sorted(FOLDER.glob("qwen*.yaml"))
]
ONE_GPU = "qwen0.5B_async_grpo_1gpu"
TURNS = (ONE_GPU, "qwen3_0.6B_async_grpo_1gpu", "qwen3B_sync_grpo", "qwen3B_colocated_grpo_1gpu")
MODEL = "model._component_=torchtune.models.qwen2_5.qwen2_5"
ALONE = "gpus_per_generator=1 gpus_per_trainer=1 gpus_per_reference=1"
CHECKPOINTING = "enable_activation_checkpointing"
COLOCATED = "qwen3B_colocated_grpo_1gpu"
GPU = Device(is_gpu=True, gib=80.0)
SMALL = ["--config", ONE_GPU, "--gpu-memory", "24"]


def plan(capsys, *arguments):
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_every_gpu_config_fits_the_gpus_of_its_header(name, capsys, tmp_path):
    header = (FOLDER / f"{name}.yaml").read_text().partition("\noutput_dir:")[0]
    sizing = header.partition("Sizing: ")[2]
    found = re.search(r"(one|\d+) GPUs? of (\d+) GB", sizing)
    assert found is not None
    gpus, memory = int(found[1].replace("one", "1")), found[2]
    arguments = ["--config", name, "--gpus", str(gpus), "--gpu-memory", memory]
    cfg = OmegaConf.load(FOLDER / f"{name}.yaml")
    if cfg.checkpointer is None:  # a policy of transformers, with the sizes of its folder
        published_config(Path(cfg.base_model_path).name).save_pretrained(tmp_path)
        arguments.append(f"base_model_path={tmp_path}")
    code, shown, errors = plan(capsys, *arguments)
    assert (code, errors) == (0, "")
    assert "everything fits" in shown
    assert re.search(rf"of {memory}\.0 GiB", shown)
    if name not in TURNS:  # what samples and what trains are as fast
        waits = re.findall(r"(\d+)%", shown.partition("would wait:")[2])
        assert max(map(int, waits)) <= 25


def test_with_lora_the_trainer_computes_the_reference(capsys):
    lora = ["--config", "qwen3B_async_grpo", "lora={rank: 8, alpha: 16}"]
    rates = []
    for kl_coeff in (0, 0.1):
        _, shown, _ = plan(capsys, *lora, f"loss.kl_coeff={kl_coeff}")
        assert "references" not in shown.partition("second (not measured):")[2]
        rates.append(int(re.findall(r"trainers ([\d,]+)", shown)[0].replace(",", "")))
    assert rates[1] == pytest.approx(rates[0] * 4 / 5, rel=0.01)


LARGE = "gpus_per_trainer=1 tokens_per_micro_batch=16384 logprob_chunk_tokens=16384"
STORE = "--gpus=1 gpus_per_trainer=1 object_store_memory=100000000"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("generator.kv_cache_gib=16", "generator.kv_cache_gib"),
        ("num_generators=2 generator.kv_cache_gib=10", "generator.kv_cache_gib"),
        ("gpus_per_trainer=1 enable_activation_checkpointing=false", CHECKPOINTING),
        (f"{ALONE} generator.kv_cache_gib=null {MODEL}_3b", "num_trainers"),
        (f"{ALONE} {MODEL}_14b_base", "num_references"),
        (f"{ALONE} {MODEL}_32b_base", "generator.tensor_parallel_size"),
        *((LARGE, "logprob_chunk_tokens"), (STORE, "num_generators")),
    ],
)
def test_what_does_not_fit_is_named_by_its_key_in_a_line(overrides, key, capsys):
    code, shown, errors = plan(capsys, *SMALL, "groups_per_step=64", *overrides.split())
    assert (code, errors) == (2, "")
    assert "everything fits" not in shown and "GiB each" in shown
    assert key in (named := not_fitting(shown))
    assert ("object_store_memory" in named) == ("object_store" in overrides)


def not_fitting(shown):
    """The keys that the last lines name."""
    lines = shown[shown.index("does not fit: ") :].splitlines()
    assert all(re.match(r"does not fit: [a-z_.]+: .+; allowed: .+", line) for line in lines), lines
    return [line.split()[3].rstrip(":") for line in lines]


TENSOR_PARALLEL = "generator.tensor_parallel_size"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("qwen9B", "--config: no config qwen9B"),
        (f"{ONE_GPU} num_trainer=2", "num_trainer: unknown key"),
        ("tiny_async_grpo --gpus=2", "--gpus, --gpu-memory: given, with device"),
        (f"{ONE_GPU} tensor_parallel_dim=4 num_trainers=4", "tensor_parallel_dim: 4"),
        (f"{ONE_GPU} {TENSOR_PARALLEL}=4 gpus_per_generator=1", f"{TENSOR_PARALLEL}: 4 given"),
        (f"{ONE_GPU} teacher.path=/nowhere", "teacher.path: no file /nowhere/config"),
        (f"{ONE_GPU} dataset.max_prompt_tokens=null", "dataset.max_prompt_tokens"),
    ],
)
def test_a_wrong_config_is_one_line_and_exit_code_2(arguments, message, capsys):
    code, _, errors = plan(capsys, "--config", *arguments.split())
    assert code == 2
    assert errors.startswith(f"config error: {message}")
    assert errors.count("\n") == 1


def test_a_config_on_a_cpu_counts_processes(capsys, tmp_path):
    """And a teacher is planned with the sizes of its own folder."""
    sizes = {"hidden_size": 2048, "intermediate_size": 64, "num_hidden_layers": 3}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    given = (f"teacher.path={tmp_path}", "num_teachers=3")
    code, shown, errors = plan(capsys, "--config", "tiny_async_grpo_2x2", *given)
    assert (code, errors) == (0, "")
    for role in ("2 x generator", "2 x trainer", "1 x reference", "3 x teacher"):
        assert role in shown
    (weights,) = re.findall(r"3 x teacher +([0-9.]+)", shown)
    parameters = 2048 * (2 * 32000 + 3 * (4 * 2048 + 3 * 64))
    assert float(weights) == pytest.approx(4 * parameters / 2**30, abs=0.05)


@pytest.mark.parametrize(
    ("training", "sampling", "most", "smaller"),
    [(60, 50, 62, "less cache"), (50, 60, 70, "less cache"), (79, 20, 81, "num_trainers")],
)
def test_a_gpu_holds_the_larger_turn_and_what_stays_of_the_other(training, sampling, most, smaller):
    trainer = RoleMemory(
        "trainer", 4, 1.0, training * GIB, resting=10 * GIB, smaller="num_trainers"
    )
    generator = RoleMemory("generator", 4, 1.0, sampling * GIB, resting=2 * GIB)
    together = in_turns(trainer, generator, GPU, "less cache")
    assert (together.count, together.share, together.total) == (4, 1.0, most * GIB)
    assert together.smaller == smaller


def test_turns_take_less_than_both_roles_and_no_less_than_either(capsys):
    code, shown, _ = plan(capsys, "--config", COLOCATED)
    assert code == 0
    totals = [float(total) for total in re.findall(r"^1 x \w+ .* ([\d.]+)$", shown, re.MULTILINE)]
    (used,) = re.findall(r"in turns: ([\d.]+) of 80.0 GiB", shown)
    assert max(totals) < float(used) < sum(totals)
    docs = (Path(__file__).parents[3] / "docs/memory_plan.md").read_text()
    printed = [line for line in shown.splitlines() if re.match("1 x |.* in turns: ", line)]
    assert len(printed) == 4 and all(line in docs for line in printed)
    code, shown, _ = plan(capsys, "--config", COLOCATED, "colocate=false", "--gpus", "1")
    assert code == 2 and "need 2 GPUs" in shown


def test_what_does_not_fit_is_named_and_a_reference_is_beside_both_turns(capsys):
    code, shown, _ = plan(capsys, "--config", COLOCATED, "--gpu-memory=48")
    assert code == 2 and not_fitting(shown)[0] == "num_trainers"
    reference = ["loss.kl_coeff=0.1", "gpus_per_trainer=0.8", "gpus_per_reference=0.2"]
    large = ["generator.kv_cache_gib=70", "generator.gpu_memory_utilization=0.83"]
    code, shown, _ = plan(capsys, "--config", COLOCATED, *reference, *large)
    assert code == 2 and "1 GPUs with trainer and generator in turns + reference: " in shown
    assert not_fitting(shown) == ["generator.gpu_memory_utilization", "generator.kv_cache_gib"]


def test_roles_are_on_the_gpus_that_ray_gives_them_with_the_generators_last(capsys):
    shares = ["gpus_per_trainer=1", "gpus_per_reference=0.2", "gpus_per_generator=0.8"]
    given = [*shares, "num_references=2", "num_generators=2", "--gpus=3"]
    code, shown, _ = plan(capsys, "--config", ONE_GPU, *given)
    assert code == 2 and "need 4 GPUs" in shown
    placed = re.findall(r"^(\d GPUs with .+): ", shown, re.MULTILINE)
    assert placed == [
        "2 GPUs with generator",
        "1 GPUs with trainer",
        "1 GPUs with reference + reference",
    ]


def test_time_outs_follow_from_lengths():
    for name in OFTEN:
        cfg = read_settings(read_config_file(name, ()))
        limits, response = cfg.timeouts, cfg.generator.max_response_tokens
        assert limits.rollout_s == max(600, 0.15 * response)
        assert limits.batch_s >= 2 * limits.rollout_s
        assert limits.train_step_s >= limits.collective_s
