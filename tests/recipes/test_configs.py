"""The shipped configs: one set of keys, and components that exist and take what they are given."""

import inspect
import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path, _merge_yaml_and_cli_args

from grpo_components import tiny_policy
from grpo_components.running import preflight
from grpo_components.running.building import build

FOLDER = Path(__file__).parents[2] / "recipes/configs"
PATHS = sorted(FOLDER.glob("*.yaml"))
NUM_GPUS = {"qwen3B_async_grpo": 8, "qwen3B_sync_grpo": 8, "qwen0.5B_async_grpo_1gpu": 1}
NAMES = {"tiny_async_grpo", "tiny_async_grpo_2x2", *NUM_GPUS}
RECIPE = "async_grpo_full_finetune_distributed"


DOCUMENTED = (FOLDER.parents[1] / "docs" / "objectives.md").read_text()
PRESETS = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|$", DOCUMENTED, re.MULTILINE))


def load(name: str) -> DictConfig:
    cfg = OmegaConf.load(FOLDER / f"{name}.yaml")
    assert isinstance(cfg, DictConfig)
    return cfg


def as_written(cfg: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(cfg))


def components(node: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every node with a `_component_`, at any depth, with its dotted key."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    if isinstance(node, dict) and "_component_" in node:
        yield key, node
    for name, child in children:
        if isinstance(child, dict | list):
            yield from components(child, f"{key}.{name}".strip("."))


@pytest.fixture
def base_model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that a base model has; the current folder is another one."""
    base, here = tmp_path / "base", tmp_path / "here"
    for folder in (base / "data", here):
        folder.mkdir(parents=True)
    shards = ("model.safetensors", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    for name in (*shards, "vocab.json", "merges.txt", "tokenizer.json"):
        (base / name).touch()
    for name in ("train", "held_out"):
        (base / "data" / f"{name}.jsonl").touch()
    (base / "config.json").write_text(json.dumps({"max_position_embeddings": 512 * 3}))
    monkeypatch.chdir(here)
    return base


def test_the_configs_are_these():
    assert {path.stem for path in PATHS} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_all_configs_have_the_same_keys_in_the_same_order(name):
    reference = load("tiny_async_grpo")
    cfg = load(name)
    assert list(cfg) == list(reference)
    for key in ("generator", "checkpointer", "loss", "optimizer", "profiler"):
        assert list(cfg[key]) == list(reference[key])
    assert list(cfg) == [key for key in preflight.SCHEMA if key in cfg]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_interpolation_is_plain(name):
    found = re.findall(r"\$\{[^}]*\}?", (FOLDER / f"{name}.yaml").read_text())
    assert found
    assert all(re.fullmatch(r"\$\{[a-z_.]+\}", part) for part in found)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_component_exists_and_takes_its_arguments(name):
    resolved = OmegaConf.to_container(load(name), resolve=True)
    found = dict(components(resolved))
    assert {"model", "rewards.correctness", "environment", "profiler"} <= set(found)
    for key, node in found.items():
        component = _get_component_from_path(node["_component_"])
        own = ("_component_", "weight", "is_success") if key.startswith("rewards.") else ()
        arguments = {name: value for name, value in node.items() if name not in own}
        arguments.pop("_component_", None)
        inspect.signature(component).bind_partial(**arguments)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_tune_validate_accepts_every_config(name):
    config.validate(load(name))


@pytest.mark.parametrize("name", sorted(NAMES - set(NUM_GPUS)))
def test_the_tiny_configs_can_run_on_a_cpu(name, base_model_path, tmp_path):
    cfg = load(name)
    cfg.base_model_path, cfg.output_dir = str(base_model_path), str(tmp_path / "run")
    preflight.check(cfg)


def test_these_objectives_are_documented_as_overrides():
    named = {"DAPO", "Dr. GRPO", "GSPO", "CISPO", "REINFORCE++", "RLOO", "decoupled PPO"}
    assert set(PRESETS) >= named


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_documented_objective_is_accepted_as_its_overrides_are_printed(
    preset, base_model_path, tmp_path
):
    given = Namespace(**as_written(load("tiny_async_grpo")))
    cfg = _merge_yaml_and_cli_args(given, PRESETS[preset].split())
    cfg.base_model_path, cfg.output_dir = str(base_model_path), str(tmp_path / "run")
    checked = preflight.check(cfg)
    for key in ("loss", "advantages", "aggregation", "off_policy"):
        assert callable(build(key, checked[key]))


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_the_gpu_configs_need_exactly_their_gpus(name, base_model_path, tmp_path, monkeypatch):
    cfg = load(name)
    cfg.base_model_path, cfg.output_dir = str(base_model_path), str(tmp_path / "run")
    for gpus in (NUM_GPUS[name], NUM_GPUS[name] - 1):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)  # noqa: B023
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)  # noqa: B023
        if gpus == NUM_GPUS[name]:
            preflight.check(cfg)
        else:
            with pytest.raises(ValueError, match="GPU"):
                preflight.check(cfg)


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_the_gpu_configs_are_refused_without_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device: cuda given"):
        preflight.check(load(name))


def test_the_synchronous_config_is_the_asynchronous_one_with_other_knobs():
    synchronous, asynchronous = load("qwen3B_sync_grpo"), load("qwen3B_async_grpo")
    ours, theirs = as_written(synchronous), as_written(asynchronous)
    different = {key for key in ours if ours[key] != theirs[key]}
    knobs = {"max_staleness", "push_every_n_steps", "pull_every_m_rollouts", "rollouts_in_flight"}
    assert different <= knobs | {"output_dir"}
    assert synchronous.max_staleness == 0
    assert synchronous.push_every_n_steps == synchronous.pull_every_m_rollouts == 1


@pytest.mark.parametrize("name", ["tiny_async_grpo", "tiny_async_grpo_2x2"])
def test_the_tiny_configs_describe_the_tiny_policy(name):
    cfg, architecture = load(name), tiny_policy.ARCHITECTURE
    assert Path(cfg.base_model_path) == tiny_policy.DEFAULT_OUTPUT_DIR
    assert cfg.dataset.prompt_template == tiny_policy.PROMPT_TEMPLATE
    assert cfg.generator.max_response_tokens == tiny_policy.MAX_RESPONSE_TOKENS
    described = {
        "vocab_size": cfg.model.vocab_size,
        "hidden_size": cfg.model.embed_dim,
        "intermediate_size": cfg.model.intermediate_dim,
        "num_hidden_layers": cfg.model.num_layers,
        "num_attention_heads": cfg.model.num_heads,
        "num_key_value_heads": cfg.model.num_kv_heads,
        "max_position_embeddings": cfg.model.max_seq_len,
        "rms_norm_eps": cfg.model.norm_eps,
        "tie_word_embeddings": cfg.model.tie_word_embeddings,
    }
    assert described == {key: architecture[key] for key in described}


@pytest.mark.parametrize("name", sorted(NUM_GPUS))
def test_prompt_and_rewards_agree_on_who_writes_the_opening_tag(name):
    cfg = load(name)
    assert cfg.dataset.prompt_template.endswith("<think>")
    assert cfg.dataset.prompt_template.count("{question}") == 1
    assert cfg.eval_dataset.prompt_template == cfg.dataset.prompt_template
    assert cfg.rewards.correctness.answer_format == "tag"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_header_says_how_to_get_the_model_and_how_to_launch(name):
    cfg = load(name)
    header = (FOLDER / f"{name}.yaml").read_text().partition("\noutput_dir:")[0]
    assert all(line.startswith("#") or not line for line in header.splitlines())
    assert f"tune run {RECIPE} --config {name}\n" in header
    assert "Sizing: " in header
    get_it = f"--output-dir {cfg.base_model_path}"
    assert (get_it if name in NUM_GPUS else "python -m grpo_components.tiny_policy") in header
