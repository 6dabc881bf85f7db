"""Impossible partial runs are refused; possible ones get the right roles."""

from dataclasses import replace

import numpy as np
import pytest
from lib.config_errors import refusal_of
from lib.trajectories import response
from omegaconf import OmegaConf

from grpo_components.offline.partial_runs import (
    RecordedPrompts,
    check_partial_run,
    evaluated_version,
    roles_of,
    start_model,
)
from grpo_components.offline.trajectory_file import group_line
from grpo_components.state_files import write_state


def group(size=2):
    return [response(0, [0, 0], prompt_ids=np.arange(3), reward=1.0)] * size


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text("".join(group_line(group()) + "\n" for _ in range(4)))
    return str(path)


def values(**changes):
    whole = dict.fromkeys(("eval_only", "rollout_only", "resume_from_checkpoint"), False)
    whole |= dict.fromkeys(("train_from", "replay_events", "keep_best"))
    whole |= {"groups_per_step": 2, "group_size": 2, "num_steps": 4, "max_staleness": 3}
    whole |= {"reward_model": {"path": None}, "output_dir": "/run", **changes}
    return OmegaConf.create(whole | {"trains": not (whole["eval_only"] or whole["rollout_only"])})


def refusal(**changes):
    return str(refusal_of(check_partial_run, values(**changes)))


def test_whole_runs_and_each_half_are_allowed(recorded):
    for changes in ({}, {"eval_only": True}, {"rollout_only": True}, {"train_from": recorded}):
        check_partial_run(values(**changes))
    assert refusal(eval_only=True, replay_events="/a").startswith("eval_only: given with replay")


def test_a_file_that_does_not_fit_is_refused(recorded, tmp_path):
    assert refusal(train_from=str(tmp_path / "none")).startswith("train_from: no file")
    assert refusal(train_from=recorded, group_size=3).startswith("group_size: 3 given")
    assert refusal(train_from=recorded, groups_per_step=5).startswith("groups_per_step: 5 given")
    assert "at least 3 " in refusal(train_from=recorded, max_staleness=2)
    (tmp_path / "empty").touch()
    assert refusal(train_from=str(tmp_path / "empty")).startswith("train_from: ")
    (tmp_path / "torn").write_text("{")
    assert "torn, line 1: " in refusal(train_from=str(tmp_path / "torn"))


def test_recorded_groups_that_are_too_long_are_refused_by_their_line(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    longer = [replace(each, prompt_ids=np.arange(9)) for each in group()]
    path.write_text(group_line(group()) + "\n" + group_line(longer) + "\n")
    prompts = RecordedPrompts(str(path))
    prompts.check(11, "the model's")
    with pytest.raises(ValueError, match=r"^train_from: .*line 2, .* 11 tokens; .* 10,"):
        prompts.check(10, "the model's")


def test_a_model_to_evaluate_is_a_folder_with_weights(tmp_path):
    assert refusal(eval_only=str(tmp_path)).startswith("eval_only: ")
    (tmp_path / "model.safetensors").touch()
    assert refusal(eval_only=str(tmp_path)).startswith("eval_only: ")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    check_partial_run(values(eval_only=str(tmp_path)))


def test_the_other_half_is_stood_in_for(recorded):
    names = ("Trainer", "Generator")
    assert roles_of(values(), *names) == names
    rollout = roles_of(values(rollout_only=True), *names)
    assert rollout[0].endswith(".TrajectoryWriter") and rollout[1] == "Generator"
    train = roles_of(values(train_from=recorded), *names)
    assert train[0] == "Trainer" and train[1].endswith(".RecordedGroups")
    prompts = RecordedPrompts(recorded)
    assert (len(prompts), prompts.max_prompt_length) == (4, 3)
    text = f"(line 3 of {recorded})"
    assert prompts[2] == {"prompt_index": 2, "prompt_ids": [0, 1, 2], "prompt_text": text}


def test_a_checkpoint_of_ours_is_evaluated_under_its_version(tmp_path):
    evaluated = values(eval_only=str(tmp_path))
    assert start_model(evaluated) == {"model_path": str(tmp_path), "lora": None}
    assert evaluated_version(evaluated) == evaluated_version(values()) == 0
    write_state(tmp_path / "state", "driver", {"ledger": {"policy_version": 7}})
    assert evaluated_version(evaluated) == 7
    assert evaluated_version(values(eval_only=True, base_model_path=str(tmp_path))) == 7
    assert evaluated_version(values(eval_only=False, base_model_path=str(tmp_path))) == 0
