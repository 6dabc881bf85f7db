"""The shipped configs: one set of keys, the GPUs they need, the objectives that are documented."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from lib.tracked import tracked
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.config._utils import _merge_yaml_and_cli_args

from grpo_components.config import preflight
from grpo_components.config.components import build
from grpo_components.config.objective import build_loss
from grpo_components.settings import Settings

FOLDER = Path(__file__).parents[2] / "recipes/configs"
PATHS = tracked("recipes/configs/*.yaml")
ONE_GPU = ("0.5B_async", "3B_colocated", "3_0.6B_async", "3_8B_lora_async")
NUM_GPUS = {f"qwen{name}_grpo_1gpu": 1 for name in ONE_GPU}
NUM_GPUS |= {f"qwen{name}_grpo": 8 for name in ("3_4B_async", "3B_async", "3B_sync", "7B_async")}
NUM_GPUS |= {"qwen14B_async_grpo": 16, "qwen32B_async_grpo": 64}
NAMES = {"tiny_async_grpo", "tiny_async_grpo_2x2", "tiny_lora_async_grpo", *NUM_GPUS}
RECIPE = "async_grpo_full_finetune_distributed"

DOCUMENTED = (FOLDER.parents[1] / "docs" / "objectives.md").read_text()
PRESETS = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|$", DOCUMENTED, re.MULTILINE))


def load(name):
    return OmegaConf.load(FOLDER / f"{name}.yaml")


@pytest.fixture
def base_model_path(tmp_path, monkeypatch):
    """A folder with the files that a base model has; the current folder is another one."""
    base, here = tmp_path / "base", tmp_path / "here"
    for folder in (base / "data", here):
        folder.mkdir(parents=True)
    shards = [f"-{i:05d}-of-{n:05d}" for n in (2, 3, 4, 5, 8, 17) for i in range(1, n + 1)]
    names = ["vocab.json", "merges.txt", "tokenizer.json", "data/train.jsonl"]
    for name in (*names, "data/held_out.jsonl"):
        (base / name).touch()
    for shard in ("", *shards):
        save_file({"weight": torch.zeros(1)}, base / f"model{shard}.safetensors")
    (base / "config.json").write_text(json.dumps({"max_position_embeddings": 32768}))
    monkeypatch.chdir(here)
    return base


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
def test_the_tiny_configs_can_run_on_a_cpu(name, base_model_path, tmp_path):
    cfg = load(name)
    cfg.base_model_path, cfg.output_dir = str(base_model_path), str(tmp_path / "run")
    preflight.check(cfg)


def test_these_objectives_are_documented_as_overrides():
    named = {"GRPO", "DAPO", "Dr. GRPO", "GSPO", "CISPO", "REINFORCE++", "RLOO", "decoupled PPO"}
    named |= {"GRPO with dual clip", "GRPO with off-policy sequence mask"}
    assert set(PRESETS) >= named | {"GRPO, deviation of the batch (Lite PPO)"}


@pytest.fixture
def with_preset(base_model_path, tmp_path):
    paths = (f"base_model_path={base_model_path}", f"output_dir={tmp_path / 'run'}")

    def check(name):
        given = Namespace(**OmegaConf.to_container(load("tiny_async_grpo")))
        return preflight.check(_merge_yaml_and_cli_args(given, [*PRESETS[name].split(), *paths]))

    return check


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_documented_objective_is_accepted_as_its_overrides_are_printed(preset, with_preset):
    checked = with_preset(preset)
    for key in ("advantages", "aggregation", "off_policy"):
        assert callable(build(key, getattr(checked, key)))
    assert callable(build_loss(checked, lambda tokens, **clip: tokens))


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_the_gpu_configs_need_exactly_their_gpus(name, base_model_path, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")  # here is no login
    cfg = load(name)
    cfg.base_model_path, cfg.output_dir = str(base_model_path), str(tmp_path / "run")

    def check(gpus):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        preflight.check(cfg)

    check(NUM_GPUS[name])
    with pytest.raises(ValueError, match="GPU"):
        check(NUM_GPUS[name] - 1)
    with pytest.raises(ValueError, match=r"^device: cuda given"):
        check(0)


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
