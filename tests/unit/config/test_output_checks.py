"""No run takes the folder of what it reads, or of a living run, whatever half of a run it is."""

import functools
import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.config.output_checks import check_folder, check_inputs
from grpo_components.config.reading import read_settings
from grpo_components.records.folder_lock import lock_folder
from grpo_components.state_files import write_state

KEYS = ("resume_from_checkpoint", "eval_only", "rollout_only", "train_from", "replay_events")


@pytest.fixture
def values(tmp_path, monkeypatch):
    """What a config names, each in a place of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files = ("base/model", "base/vocab.json", "data/train.jsonl", "scorer/config.json", "env/db")
    for name in (*files, "first/logs/events.jsonl", "rollouts/trajectories.jsonl", "held/out.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return {
        "output_dir": str(tmp_path / "run"),
        "base_model_path": f"{tmp_path}/base",
        "tokenizer": {"path": f"{tmp_path}/base/vocab.json"},
        "checkpointer": {"checkpoint_dir": f"{tmp_path}/base", "output_dir": f"{tmp_path}/run"},
        "dataset": {"source": f"{tmp_path}/data/train.jsonl", "split": "train"},
        "eval_dataset": {"parts": [{"source": f"{tmp_path}/held/out.csv"}]},
        "environment": {"world": {"database": f"{tmp_path}/env/db"}},
        "reward_model": {"path": f"{tmp_path}/scorer"},
        "metric_logger": {"log_dir": f"{tmp_path}/run/logs"},
        "profiler": {"output_dir": f"{tmp_path}/run/profile"},
        "resume_from_checkpoint": False,
        "eval_only": False,
        "rollout_only": False,
        "train_from": f"{tmp_path}/rollouts/trajectories.jsonl",
        "replay_events": f"{tmp_path}/first/logs/events.jsonl",
    }


INPUTS = {
    "base_model_path": "base",
    "dataset.source": "data",
    "eval_dataset.parts.0.source": "held",
    "environment.world.database": "env",
    "reward_model.path": "scorer",
    "train_from": "rollouts",
    "replay_events": "first",
}


@functools.cache
def tiny():
    config = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"
    return OmegaConf.to_container(OmegaConf.load(config), resolve=True)


def read(values):
    """Settings of the tiny config with these values in their sections."""
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    sections = {key: {**tiny().get(key, {}), **value} for key, value in nested.items()}
    return read_settings({**tiny(), **values, **sections})


def inputs(values):
    check_inputs(read(values))


def folder_of(values):
    check_folder(read(values))


def refusal(check, values, output_dir):
    with pytest.raises(ValueError) as refused:
        check(values | {"output_dir": str(output_dir)})
    message = str(refused.value)
    assert message.startswith("output_dir: ") and "; allowed: " in message and "\n" not in message
    return message


def test_a_folder_of_its_own_is_accepted(values):
    inputs(values)
    folder_of(values)


@pytest.mark.parametrize("where", ["{0}", "{0}/", "{1}", "../{2}", "{0}/../{2}"])
@pytest.mark.parametrize(("key", "folder"), INPUTS.items())
def test_a_folder_that_holds_what_is_read_is_refused_with_both_keys(
    values, tmp_path, key, folder, where
):
    (tmp_path / "link").symlink_to(tmp_path / folder)
    output_dir = where.format(tmp_path / folder, tmp_path / "link", folder)
    assert key in refusal(inputs, values, output_dir)


@pytest.mark.parametrize("key", ["base_model_path", "reward_model.path", "replay_events"])
def test_a_folder_inside_of_what_is_read_is_refused_with_both_keys(values, tmp_path, key):
    (tmp_path / "link").symlink_to(tmp_path / INPUTS[key])
    for inside in (tmp_path / INPUTS[key] / "a" / "b", tmp_path / "link" / "a"):
        assert key in refusal(inputs, values, inside)


def test_a_link_to_what_lies_in_the_folder_is_followed(values, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.jsonl").touch()
    Path("train.jsonl").symlink_to(tmp_path / "run" / "mine.jsonl")
    values["dataset"]["source"] = "train.jsonl"
    assert "dataset.source" in refusal(inputs, values, tmp_path / "run")


def test_a_word_that_is_no_path_is_none(values):
    Path("train").mkdir()  # the name of a split as well
    inputs(values | {"output_dir": "train"})


@pytest.mark.parametrize("output_dir", [".", "..", "/", "/.."])
def test_the_current_folder_and_what_it_lies_in_are_refused(values, output_dir):
    refusal(inputs, values, output_dir)


@pytest.mark.parametrize("folder", ["/etc", "/usr", "~"])
def test_folders_of_the_system_and_homes_are_refused(values, tmp_path, monkeypatch, folder):
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "mine").touch()
    monkeypatch.setenv("HOME", str(home))
    assert Path(folder).expanduser().name in refusal(folder_of, values, Path(folder).expanduser())


@pytest.mark.parametrize("key", [None, *KEYS])
def test_a_folder_in_use_is_refused_for_every_kind_of_run(values, tmp_path, key):
    checkpoint = tmp_path / "run/checkpoints/step_2"
    write_state(checkpoint / "state", "driver", {})
    (tmp_path / "run/checkpoints/latest").symlink_to("step_2")
    lock = lock_folder(tmp_path / "run")
    changes = {} if key is None else {key: True if key in KEYS[:3] else values[key]}
    in_use = f" is in use by pid {os.getpid()} on "
    assert in_use in refusal(folder_of, values | changes, values["output_dir"])
    lock.release()


def test_a_run_goes_on_in_its_folder_whatever_else_lies_there(values, tmp_path):
    write_state(tmp_path / "run/checkpoints/step_2/state", "driver", {})
    (tmp_path / "run" / "notes.md").touch()
    for path in (f"{tmp_path}/run/checkpoints/step_2", "../run/checkpoints/step_2"):
        folder_of(values | {"resume_from_checkpoint": path})
    refusal(folder_of, values, values["output_dir"])


@pytest.mark.parametrize("inside", ["", "/more"])
def test_the_checkpoint_of_another_run_is_not_written_to(values, tmp_path, inside):
    write_state(tmp_path / "kept/step_2/state", "driver", {})
    changes = {"resume_from_checkpoint": f"{tmp_path}/kept/step_2"}
    message = refusal(folder_of, values | changes, f"{tmp_path}/kept/step_2{inside}")
    assert inside == "" or "resume_from_checkpoint" in message


def test_a_folder_of_a_run_is_no_place_for_another(values, tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    keys = ("output_dir", "base_model_path", "max_staleness", "groups_per_step", "group_size")
    (run / "config.yaml").write_text(json.dumps(dict.fromkeys(keys, 1)))
    (run / "receipts.jsonl").write_text('{"record": "start"}\n')
    folder_of(values | {"output_dir": str(run)})
    for inside in ("checkpoints/mine", "logs", "profile"):
        assert str(run) in refusal(folder_of, values, run / inside)


@pytest.mark.parametrize("folder", ["/proc/foo", "/proc/self/a/b"])
def test_a_place_in_which_not_even_root_can_make_a_folder_is_refused(values, folder):
    with pytest.raises(ValueError, match=r"^output_dir: .*/proc.*; allowed: "):
        inputs({**values, "output_dir": folder})


def test_a_check_of_the_place_leaves_nothing_there(values, tmp_path):
    before = sorted(tmp_path.iterdir())
    inputs({**values, "output_dir": str(tmp_path / "a" / "run")})
    assert sorted(tmp_path.iterdir()) == before
