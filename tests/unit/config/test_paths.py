"""A path of a config is the one that a shell would take, and can be looked up."""

import os
from pathlib import Path

import pytest

from grpo_components.config.paths import expand_paths, is_path, read_hf_config
from grpo_components.settings import Settings


def refusal(values):
    """The message with which paths are refused."""
    with pytest.raises(ValueError) as refused:
        expand_paths({"output_dir": "/tmp/run", **values})
    message = str(refused.value)
    assert len(message) <= 285 and "; allowed: " in message
    return message


@pytest.mark.parametrize(
    "key",
    [
        *("output_dir", "base_model_path", "tokenizer.path", "tokenizer.merges_file"),
        *("tokenizer.special_tokens_path", "checkpointer.checkpoint_dir", "dataset.source"),
        *("eval_dataset.source", "dataset.parts.math.source", "resume_from_checkpoint"),
        *("eval_only", "train_from", "replay_events", "reward_model.path", "ptx.source"),
        *("metric_logger.log_dir", "profiler.output_dir", "rewards.mine.model_path"),
        "environment.world.folder",
    ],
)
def test_a_tilde_is_the_home_folder_in_every_path(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    values = {}
    section = values
    *sections, name = key.split(".")
    for part in sections:
        section = section.setdefault(part, {})
    section[name] = "~/x/y"
    section["prompt_template"] = "~/x/y"
    section = expand_paths({"output_dir": "/tmp/run", **values})
    for part in sections:
        section = section[part]
    assert section[name] == "/home/of/me/x/y"
    assert section["prompt_template"] == "~/x/y", "other text is left alone"


def test_every_path_of_the_schema_is_known_by_its_name():
    paths = {"output_dir", "base_model_path", "resume_from_checkpoint", "eval_only", "train_from"}
    paths |= {"replay_events"}
    assert {key for key in Settings.model_fields if is_path(key)} == paths


@pytest.mark.parametrize("key", ["output_dir", "base_model_path", "eval_only", "train_from"])
@pytest.mark.parametrize(
    "path", ["x" * 300, "a/" * 3000, "~nobody-of-this-name/x", "a\0b", "\ud800", "circle/x"]
)
def test_a_path_that_no_system_call_takes_is_refused_by_key(key, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert refusal({key: path}).startswith(f"{key}: ")


def test_the_files_of_a_run_must_fit_below_its_folder(tmp_path):
    name = os.pathconf("/", "PC_NAME_MAX")
    assert refusal({"output_dir": str(tmp_path / ("x" * name))}).startswith("output_dir: ")
    assert refusal({"output_dir": str(tmp_path / ("x/" * 1900))}).startswith("output_dir: ")
    expand_paths({"output_dir": str(tmp_path / ("x" * (name - 8)))})


@pytest.mark.parametrize(
    "text", ["{", "[1]", "[" * 100_000, "\udcff", '{"vocab_size": "x"}', '{"hidden_size": 1e9}']
)
def test_a_damaged_config_of_a_model_is_named_with_its_key(tmp_path, text):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"^base_model_path: .*config\.json.*; allowed: "):
        read_hf_config("base_model_path", tmp_path)
    with pytest.raises(ValueError, match=r"^reward_model\.path: .*cannot be read"):
        read_hf_config("reward_model.path", tmp_path / "nowhere")
