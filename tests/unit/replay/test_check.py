"""Finished runs can be replayed, if nothing that decides them has changed; others are refused."""

import json
from pathlib import Path

import pytest
from lib.config_errors import refused_key
from lib.rows import write_rows
from omegaconf import OmegaConf

from grpo_components._plugin import recipes_folder
from grpo_components.config.reading import read_settings
from grpo_components.config.replayed import available_cpus
from grpo_components.exchange.event_order import FORMAT
from grpo_tools.replay.check import check_replay


@pytest.fixture
def values(tmp_path):
    """A checked config that names a finished run."""
    base, run = tmp_path / "base", tmp_path / "finished"
    tiny = OmegaConf.load(recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    tiny.output_dir, tiny.base_model_path = str(run), str(base)
    config = read_settings(OmegaConf.to_container(tiny, resolve=True)).model_dump()
    (run / "logs").mkdir(parents=True)
    OmegaConf.save(config, run / "config.yaml")
    (run / "logs" / "schedule_generator_0.jsonl").touch()
    write_rows(run / "receipts.jsonl", START, END)
    elsewhere = json.dumps(config).replace(str(run), str(tmp_path / "new"))
    return json.loads(elsewhere) | {"replay_events": str(run)}


def check(values):
    check_replay(read_settings(values), read_settings)


def test_a_finished_run_can_be_replayed_by_its_folder_or_its_log_and_with_other_cpus(values):
    check(values | {"log_level": "ERROR", "replay_until": values["num_steps"]})
    for more in ("", "/receipts.jsonl"):
        given = values | {"replay_events": values["replay_events"] + more}
        check(given)
        assert available_cpus(read_settings(given)) == 5


def test_the_base_model_may_lie_elsewhere(values):
    base = values["base_model_path"]
    assert refused_key(check, values | {"base_model_path": "/elsewhere"}) == "tokenizer.path"
    check(json.loads(json.dumps(values).replace(base, "/elsewhere")))


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("device", {"device": "cuda"}),
        ("resume_from_checkpoint", {"resume_from_checkpoint": True}),
        ("max_staleness", {"max_staleness": 1}),
        ("replay_until", {"replay_until": 10**6}),
        ("replay_until", {"replay_until": 1, "replay_events": None}),
    ],
)
def test_a_key_that_matters_is_named(values, key, changes):
    assert refused_key(check, values | changes) == key


def test_the_folder_of_the_run_to_replay_is_not_moved_aside(values):
    assert refused_key(check, values | {"output_dir": values["replay_events"]}) == "output_dir"


FILES = ("config.yaml", "receipts.jsonl", "logs/schedule_generator_0.jsonl")
START = {"event": "start", "attempt": 0, "cpus": 5, "format": FORMAT}
RESTART = {"event": "restart", "attempt": 0, "role": "generator_0"}
END = {"event": "end", "attempt": 0, "finished": True}


@pytest.mark.parametrize(
    ("file", "events"),
    [
        *((name, None) for name in FILES),
        ("receipts.jsonl", [START, END | {"finished": False}]),
        ("receipts.jsonl", [START]),
        ("receipts.jsonl", [START, {"event": "rollback", "attempt": 0}, END]),
        ("receipts.jsonl", [START, START | {"attempt": 1}, END]),
        ("receipts.jsonl", [START, RESTART | {"given_up": True}, END]),
        ("receipts.jsonl", [START, {"event": "interrupt", "attempt": 0, "group": 1}, END]),
        ("receipts.jsonl", [START | {"format": 1}, END]),
    ],
)
def test_a_run_that_lacks_something_is_refused(values, file, events):
    """A file, its end, or an undisturbed course."""
    path = Path(values["replay_events"]) / file
    path.unlink()
    if events is not None:
        write_rows(path, *events)
    assert refused_key(check, values) == "replay_events"


def test_a_run_with_restarts_can_be_replayed(values):
    path = Path(values["replay_events"]) / "receipts.jsonl"
    write_rows(path, START, RESTART | {"given_up": False}, END)
    check(values)
