"""A what-if is planned by what it changes, and refused by key where that cannot change."""

import json
from pathlib import Path

import pytest
from lib.checkpoints import write_checkpoint
from lib.config_errors import refused_key
from omegaconf import OmegaConf

from grpo_components._plugin import recipes_folder
from grpo_components.config import preflight
from grpo_components.config.reading import read_settings
from grpo_components.config.replay_check import check_replay
from grpo_components.config.what_if import check_what_if, left_out
from grpo_components.replay.recorded_run import FORMAT


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def values(tmp_path):
    """A config that names a finished run of 4 steps, each of which trained two groups."""
    run = tmp_path / "finished"
    tiny = OmegaConf.load(recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    tiny.output_dir, tiny.base_model_path, tiny.num_steps = str(run), str(tmp_path / "base"), 4
    config = preflight.settings_of(tiny).model_dump()
    (run / "logs").mkdir(parents=True)
    OmegaConf.save(config, run / "config.yaml")
    (run / "logs" / "schedule_generator_0.jsonl").touch()
    start = {"event": "start", "attempt": 0, "cpus": 5, "format": FORMAT}
    write(run / "logs" / "events.jsonl", start)
    steps = [
        {
            "record": "step",
            "attempt": 0,
            "step": step,
            "trained": [{"group_id": group} for group in (2 * step - 2, 2 * step - 1)],
        }
        for step in (1, 2, 3, 4)
    ]
    write(run / "receipts.jsonl", *steps, {"record": "end", "attempt": 0, "finished": True})
    elsewhere = json.loads(json.dumps(config).replace(str(run), str(tmp_path / "new")))
    return elsewhere | {"replay_events": str(run), "replay_until": 2}


def planned(values):
    settings = read_settings(values)
    check_replay(settings)
    return check_what_if(settings)


def test_without_a_changed_key_the_whole_run_is_repeated(values):
    free = {"log_level": "ERROR", "save_every_n_steps": 1}
    assert planned(values | free).what_if is None
    assert planned(values | {"replay_until": None}).what_if is None
    # As with `--config RUN/config.yaml`, whose other paths still lie in the recorded run.
    old, new = values["replay_events"], values["output_dir"]
    assert json.dumps(values).count(new) > 1
    copied = json.loads(json.dumps(values).replace(new, old)) | {"output_dir": new}
    assert planned(copied).what_if is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("clip_grad_norm", 9.0), ("ppo_epochs", 2), ("loss", {"clip_low": 0.1}), ("optimizer", {})],
)
def test_a_key_of_the_step_leaves_it_the_recorded_batch(values, key, value):
    changed = {"lr": 1.0} if key == "optimizer" else value
    values[key] = values[key] | changed if isinstance(changed, dict) else changed
    first = planned(values)
    plan = first.what_if
    assert plan is not None and plan.step == 3 and plan.keeps_batch
    assert all(name.startswith(key) for name in plan.changed)
    assert getattr(plan.later, key) == values[key] != getattr(first, key)
    given = {name: values[name] for name in ("output_dir", "replay_events", "replay_until")}
    assert given.items() <= first.model_dump().items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_staleness", 1),
        ("groups_per_step", 3),
        ("num_steps", 9),
        ("user", {"mine": 1}),
        ("mask_overlong", True),
    ],
)
def test_a_key_of_the_rollouts_begins_with_the_state_after_the_step(values, key, value):
    plan = planned(values | {key: value, "stale_tokens": "mask"}).what_if
    assert plan is not None and plan.step == 3 and not plan.keeps_batch


def test_a_group_is_left_out_of_the_step_that_trained_it_and_of_the_live_part_only(values):
    values["replay_without"] = [7]
    first = planned(values)
    plan = first.what_if
    assert plan is not None and plan.step == 4 and plan.keeps_batch
    assert plan.changed == ("replay_without",)
    assert left_out(first) == frozenset() and left_out(plan.later) == {7}
    also = planned(values | {"replay_without": [7, 5]}).what_if
    assert also is not None and also.step == 3
    with_another = planned(values | {"clip_grad_norm": 9.0}).what_if
    assert with_another is not None and with_another.step == 3


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replay_until": 4}, "replay_until"),
        ({"replay_until": 2, "num_steps": 2}, "replay_until"),
        ({"replay_until": -1}, "replay_until"),
        ({"replay_until": 1.5}, "replay_until"),
        ({"replay_events": None}, "replay_until"),
        ({"replay_until": None, "replay_without": [7]}, "replay_without"),
        ({"replay_without": [3]}, "replay_without"),
        ({"replay_without": "7"}, "replay_without"),
        ({"seed": 1}, "seed"),
        ({"group_size": 3}, "group_size"),
        ({"shuffle": False}, "shuffle"),
        ({"num_generators": 2}, "num_generators"),
        ({"num_trainers": 2}, "num_trainers"),
        ({"loss": {"kl_coeff": 0.1}}, "loss.kl_coeff"),
        ({"reward_model": {"path": "/m"}}, "reward_model.path"),
        # without `replay_until`, a replay changes nothing that training depends on
        ({"replay_until": None, "optimizer": {"lr": 1.0}}, "optimizer.lr"),
        ({"replay_until": None, "resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ({"replay_until": None, "device": "cuda"}, "device"),
        ({"replay_events": "/nowhere"}, "replay_events"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(values, changes, key):
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    assert refused_key(planned, values) == key


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("receipts.jsonl", {"record": "end", "attempt": 0, "finished": False}),
        ("receipts.jsonl", {"record": "end", "attempt": 1, "finished": True}),
        ("logs/events.jsonl", {"event": "rollback", "attempt": 0}),
        ("logs/events.jsonl", {"event": "lost", "attempt": 0, "role": "a", "given_up": True}),
        ("logs/schedule_generator_0.jsonl", None),
        ("config.yaml", None),
    ],
)
def test_a_run_that_cannot_be_replayed_is_refused(values, file, line):
    path = Path(values["replay_events"]) / file
    if line is None:
        path.unlink()
    else:
        path.write_text(path.read_text() + json.dumps(line) + "\n")
    assert refused_key(planned, values) == "replay_events"


def test_it_goes_on_only_from_a_checkpoint_after_the_step(values, tmp_path):
    values["optimizer"] = values["optimizer"] | {"lr": 1.0}
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step_{step}", {"ledger": {"steps_done": step}})
    values["resume_from_checkpoint"] = str(tmp_path / "step_1")
    assert refused_key(planned, values) == "resume_from_checkpoint"
    values["resume_from_checkpoint"] = str(tmp_path / "step_2")
    live = planned(values)
    assert live.what_if is None and live.optimizer.lr == 1.0


def test_a_run_has_one_part_and_a_what_if_that_changes_something_two(values):
    def resumes(given):
        return [part.get("resume_from_checkpoint") for part in preflight.parts_of(given)]

    assert resumes(OmegaConf.create(values | {"replay_until": None})) == [False]
    assert resumes(OmegaConf.create(values)) == [False]
    changed = OmegaConf.create(values | {"clip_grad_norm": 9.0})
    assert resumes(changed) == [False, True]
    changed.resume_from_checkpoint = True
    assert resumes(changed)[:1] == [True]
