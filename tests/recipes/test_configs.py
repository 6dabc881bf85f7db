"""The shipped configs: one set of keys, the GPUs they need, the objectives that are documented."""

import re
from pathlib import Path

import pytest
from lib.chaos import RECIPE
from lib.checkpoints import write_base_model
from lib.tracked import tracked
from omegaconf import OmegaConf

from grpo_components.config import preflight
from grpo_components.config.components import build
from grpo_components.config.objective import build_loss
from grpo_components.config.reading import merge_overrides
from grpo_components.settings import Settings

FOLDER = Path(__file__).parents[2] / "recipes/configs"
PATHS = tracked("recipes/configs/*.yaml")
ONE_GPU = ("0.5B_async", "3B_colocated", "3_0.6B_async", "3_8B_lora_async")
NUM_GPUS = {f"qwen{name}_grpo_1gpu": 1 for name in ONE_GPU}
NUM_GPUS |= {f"qwen{name}_grpo": 8 for name in ("3_4B_async", "3B_async", "3B_sync", "7B_async")}
NUM_GPUS |= {"qwen14B_async_grpo": 16, "qwen32B_async_grpo": 64}
NAMES = {"tiny_async_grpo", "tiny_async_grpo_2x2", "tiny_lora_async_grpo", *NUM_GPUS}

DOCUMENTED = (FOLDER.parents[1] / "docs" / "objectives.md").read_text()
PRESETS = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|$", DOCUMENTED, re.MULTILINE))


def load(name):
    return OmegaConf.load(FOLDER / f"{name}.yaml")


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Load a config over the files that a base model has; the current folder is another one."""
    base, here = tmp_path / "base", tmp_path / "here"
    shards = [f"-{i:05d}-of-{n:05d}" for n in (2, 3, 4, 5, 8, 17) for i in range(1, n + 1)]
    write_base_model(base, 32768, ["", *shards])
    here.mkdir()
    monkeypatch.chdir(here)

    def ready(name):
        cfg = load(name)
        cfg.base_model_path, cfg.output_dir = str(base), str(tmp_path / "run")
        return cfg

    return ready


def test_the_configs_are_these():
    assert {path.stem for path in PATHS} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_all_configs_have_the_same_keys_in_the_same_order_and_plain_interpolation(name):
    reference, cfg = load("tiny_async_grpo"), load(name)
    assert list(cfg) == list(reference)
    for key in ("generator", "checkpointer", "loss", "optimizer", "profiler"):
        assert cfg[key] is None or list(cfg[key]) == list(reference[key])
    assert list(cfg) == [key for key in Settings.model_fields if key in cfg]
    found = re.findall(r"\$\{[^}]*\}?", (FOLDER / f"{name}.yaml").read_text())
    assert found and all(re.fullmatch(r"\$\{[a-z_.]+\}", part) for part in found)


@pytest.mark.parametrize("name", sorted(NAMES - set(NUM_GPUS)))
def test_the_tiny_configs_can_run_on_a_cpu(name, ready):
    preflight.read_config(ready(name))


def test_these_objectives_are_documented_as_overrides():
    named = {"GRPO", "DAPO", "Dr. GRPO", "GSPO", "CISPO", "REINFORCE++", "RLOO", "decoupled PPO"}
    named |= {"GRPO with dual clip", "GRPO with off-policy sequence mask"}
    assert set(PRESETS) >= named | {"GRPO, deviation of the batch (Lite PPO)"}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_documented_objective_is_accepted_as_its_overrides_are_printed(preset, ready):
    given = OmegaConf.to_container(ready("tiny_async_grpo"))
    checked = preflight.read_config(merge_overrides(given, PRESETS[preset].split()))
    for key in ("advantages", "aggregation", "off_policy"):
        assert callable(build(key, getattr(checked, key)))
    assert callable(build_loss(checked, lambda tokens, **clip: tokens))


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_the_gpu_configs_need_exactly_their_gpus(name, ready, num_gpus, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")  # here is no login
    cfg = ready(name)
    num_gpus(NUM_GPUS[name])
    preflight.read_config(cfg)
    for lacking, problem in ((NUM_GPUS[name] - 1, "GPU"), (0, r"^device: cuda given")):
        num_gpus(lacking)
        with pytest.raises(ValueError, match=problem):
            preflight.read_config(cfg)


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_prompt_and_rewards_agree_on_who_writes_the_opening_tag(name):
    cfg = load(name)
    assert cfg.dataset.prompt_template.endswith("<think>")
    assert cfg.dataset.prompt_template.count("{question}") == 1
    assert cfg.eval_dataset.prompt_template == cfg.dataset.prompt_template
    assert cfg.rewards.correctness.answer_format == "tag"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_header_says_how_to_get_the_model_and_how_to_launch(name):
    header = (FOLDER / f"{name}.yaml").read_text().partition("\noutput_dir:")[0]
    assert all(line.startswith("#") or not line for line in header.splitlines())
    assert f"tune run {RECIPE} --config {name}\n" in header and "Sizing: " in header
    download = f"--output-dir {load(name).base_model_path}"
    build_it = "python -m grpo_components.examples.tiny_policy"
    assert (download if name in NUM_GPUS else build_it) in header
