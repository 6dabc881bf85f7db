"""Files, folders and base model of a run, and half runs: refused by key, or accepted."""

import json
import os
from operator import attrgetter
from pathlib import Path

import pytest
from lib.checkpoints import write_checkpoint
from lib.config_errors import refusal_of, refused_key
from omegaconf import OmegaConf

from grpo_components.config.files import check_against_model, check_output
from grpo_components.config.reading import read_settings
from grpo_components.records.run_folder import lock_folder


def test_a_value_to_be_filled_in_and_a_base_model_without_its_config_are_refused(cfg, refused):
    (Path(cfg.base_model_path) / "config.json").unlink()
    assert refused() == "base_model_path"
    cfg.seed = "???"
    assert refused() == "seed"


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
PHI_4 = {"num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 17920}


@pytest.mark.parametrize(
    ("sizes", "fits", "wrong"),
    [
        (HEADS, "num_trainers=2 tensor_parallel_dim=2", "num_trainers=4 tensor_parallel_dim=4"),
        (HEADS, "generator.tensor_parallel_size=4", "generator.tensor_parallel_size=3"),
        (PHI_4, "generator.tensor_parallel_size=2", "generator.tensor_parallel_size=4"),
    ],
)
def test_a_base_model_that_cannot_be_trained_is_refused(cfg, check, refused, sizes, fits, wrong):
    Path(cfg.base_model_path, "config.json").write_text(json.dumps(sizes))
    check(fits)
    assert refused(wrong) == wrong.split()[-1].partition("=")[0]


HF_CONFIG = {"vocab_size": 384, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("name", "fits", "wrong"),
    [
        ("stop_token_ids", [0, 383], [384]),
        ("stop_token_ids", [0], [1, -1]),
        ("max_model_len", 512, 513),
        ("max_response_tokens", 448, 449),
    ],
)
def test_tokens_and_lengths_are_those_of_the_model(settings_with, name, fits, wrong):
    def given(value):
        return settings_with(dataset__max_prompt_tokens=64, **{f"generator__{name}": value})

    check_against_model(given(fits), HF_CONFIG)
    assert refused_key(check_against_model, given(wrong), HF_CONFIG) == f"generator.{name}"


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_learned_reward_is_a_classifier(check, refused, tmp_path, monkeypatch, where):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, given = tmp_path / "classifier", f"reward_model.path={tmp_path}/classifier"
    if where == "hub":
        folder, given = tmp_path / "models--a--b/snapshots/abc", "reward_model.path=a/b"
        (tmp_path / "models--a--b/refs").mkdir(parents=True)
        (tmp_path / "models--a--b/refs/main").write_text("abc")
    assert refused(given) == "reward_model.path"
    folder.mkdir(parents=True)
    for architectures in ('["Qwen2ForCausalLM"]', "[]"):
        (folder / "config.json").write_text(f'{{"architectures": {architectures}}}')
        assert refused(given) == "reward_model.path"
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    check(given)


def test_a_runs_own_checkpoint_is_not_evaluated_into_its_folder(cfg, refused):
    inside = f"{cfg.output_dir}/checkpoints/best"
    Path(inside).mkdir(parents=True)
    Path(inside, "config.json").write_text('{"architectures": ["SomeForCausalLM"]}')
    assert refused(f"eval_only={inside}") == "output_dir"


def test_a_good_config_comes_back_resolved_with_every_default(cfg, check):
    settings = check()
    assert settings.tokenizer.path == f"{cfg.base_model_path}/vocab.json"
    assert settings.timeouts.reward_s == 10 and settings.reward_workers == 1
    assert settings.generator.enforce_eager is True
    whole = settings.model_dump()
    assert [key for key in whole if key in cfg] == list(cfg), "the order of keys is kept"
    assert "timeouts" not in cfg, "the given config is left alone"
    check("output_dir=run")
    assert not Path("run").exists(), "checking leaves nothing behind"


def test_an_enabled_profiler_traces_into_the_folder_of_the_run(cfg, read):
    assert "output_dir" not in read().profiler
    profiler = read("profiler.enabled=true").profiler
    assert profiler.output_dir == f"{cfg.output_dir}/profile"
    assert (profiler.cuda, profiler.xpu) == (False, False)
    chosen = read("profiler.enabled=true profiler.output_dir=/elsewhere").profiler
    assert chosen.output_dir == "/elsewhere"


def test_held_out_prompts_follow_those_trained_on(check):
    held_out = check("dataset.chat_template=torchtune dataset.system_prompt=Briefly.").eval_dataset
    assert (held_out.chat_template, held_out.system_prompt) == ("torchtune", "Briefly.")


def test_a_tilde_is_the_home_folder_in_every_path(values_with, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    keys = ("output_dir", "tokenizer__merges_file", "dataset__source", "resume_from_checkpoint")
    keys += ("checkpointer__checkpoint_dir", "reward_model__path", "metric_logger__log_dir")
    read = read_settings(values_with(**dict.fromkeys(keys, "~/x/y")))
    for key in keys:
        assert attrgetter(key.replace("__", "."))(read) == "/home/of/me/x/y"


# ---- output_dir against all other paths ---------------------------------------------------------

INPUTS = {
    "base_model_path": "base",
    "dataset.source": "data",
    "eval_dataset.parts.0.source": "held",
    "environment.world.database": "env",
    "reward_model.path": "scorer",
    "train_from": "rollouts",
    "replay_events": "first",
}


@pytest.fixture
def check_with(tiny_config, tmp_path, monkeypatch):
    """Check the tiny config whose inputs have a place each, with another output_dir and values."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    named = ("base/model", "base/vocab.json", "data/train.jsonl", "scorer/config.json", "env/db")
    for name in (*named, "first/receipts.jsonl", "rollouts/trajectories.jsonl", "held/out.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    base, run = f"{tmp_path}/base", f"{tmp_path}/run"
    values = {
        "base_model_path": base,
        "tokenizer": {"path": f"{base}/vocab.json"},
        "checkpointer": {"checkpoint_dir": base, "output_dir": run},
        "dataset": {"source": f"{tmp_path}/data/train.jsonl", "split": "train"},
        "eval_dataset": {"parts": [{"source": f"{tmp_path}/held/out.csv"}]},
        "environment": {"world": {"database": f"{tmp_path}/env/db"}},
        "reward_model": {"path": f"{tmp_path}/scorer"},
        "metric_logger": {"log_dir": f"{run}/logs"},
        "profiler": {"output_dir": f"{run}/profile"},
        "train_from": f"{tmp_path}/rollouts/trajectories.jsonl",
        "replay_events": f"{tmp_path}/first/receipts.jsonl",
    }

    def check_with(output_dir=run, **changes):
        given = OmegaConf.merge(tiny_config, values, {"output_dir": str(output_dir)}, changes)
        check_output(read_settings(given))

    return check_with


def problem_with(check_with, *output_dir, **changes):
    """The problem of an output_dir that is refused."""
    error = refusal_of(check_with, *output_dir, **changes)
    assert error.key == "output_dir"
    return error.problem


@pytest.mark.parametrize("where", ["{0}", "{1}", "../{2}"])
@pytest.mark.parametrize(("key", "folder"), INPUTS.items())
def test_a_folder_that_holds_what_is_read_is_refused(check_with, tmp_path, key, folder, where):
    (tmp_path / "link").symlink_to(tmp_path / folder)
    output_dir = where.format(tmp_path / folder, tmp_path / "link", folder)
    assert key in problem_with(check_with, output_dir)


def test_a_link_to_what_lies_in_the_folder_is_followed(check_with, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.jsonl").touch()
    Path("train.jsonl").symlink_to(tmp_path / "run" / "mine.jsonl")
    assert "dataset.source" in problem_with(check_with, dataset={"source": "train.jsonl"})


@pytest.mark.parametrize("folder", ["/", "/proc/foo", "/etc", "~"])
def test_folders_of_the_system_and_homes_are_refused(check_with, tmp_path, monkeypatch, folder):
    (tmp_path / "home/.config").mkdir(parents=True)
    (tmp_path / "home/.config/mine").touch()
    monkeypatch.setenv("HOME", f"{tmp_path}/home")
    problem_with(check_with, Path(folder).expanduser())


HALVES = ("resume_from_checkpoint", "eval_only", "rollout_only")


@pytest.mark.parametrize("key", [None, *HALVES, "train_from", "replay_events"])
def test_a_folder_in_use_is_refused_for_every_kind_of_run(check_with, tmp_path, key):
    write_checkpoint(tmp_path / "run/checkpoints/step_2")
    (tmp_path / "run/checkpoints/latest").symlink_to("step_2")
    lock = lock_folder(tmp_path / "run")
    kind = {key: True} if key in HALVES else {}
    others = dict.fromkeys({"train_from", "replay_events"} - {key})
    assert str(os.getpid()) in problem_with(check_with, **others, **kind)
    lock.close()


def test_a_run_goes_on_in_its_folder_whatever_else_lies_there(check_with, tmp_path):
    write_checkpoint(tmp_path / "run/checkpoints/step_2")
    (tmp_path / "run" / "notes.md").touch()
    for path in (f"{tmp_path}/run/checkpoints/step_2", "../run/checkpoints/step_2"):
        check_with(resume_from_checkpoint=path)
    problem_with(check_with)


@pytest.mark.parametrize("output_dir", ["kept/step_2", "kept"])
def test_the_checkpoint_of_another_run_is_not_written_to(check_with, tmp_path, output_dir):
    write_checkpoint(tmp_path / "kept/step_2")
    (tmp_path / "kept/receipts.jsonl").write_text('{"event": "start"}\n')
    resumed = {"resume_from_checkpoint": f"{tmp_path}/kept/step_2"}
    problem_with(check_with, tmp_path / output_dir, **resumed)
