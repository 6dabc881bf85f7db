"""Phases follow each other from the start of the process, and none is counted twice."""

import json
import time

import psutil
import pytest

from grpo_components.records.phases import Phases


def test_the_phases_add_up_to_the_time_since_the_process_began(tmp_path):
    shown = []
    phases = Phases(tmp_path / "logs" / "phases.jsonl", 2, shown.append)
    for name in ("starting Ray", "training", "training", "report"):
        phases.begin(name)
    phases.end()
    records = [json.loads(line) for line in (tmp_path / "logs" / "phases.jsonl").open()]
    assert [each["phase"] for each in records] == [
        *("imports, config and data", "starting Ray", "training", "report"),
    ]
    assert {each["attempt"] for each in records} == {2} and len(shown) == 4
    age = time.time() - psutil.Process().create_time()
    assert sum(each["seconds"] for each in records) == pytest.approx(age, abs=1)


def test_a_folder_that_cannot_be_written_does_not_keep_the_run_from_ending(tmp_path):
    (tmp_path / "logs").touch()
    phases = Phases(tmp_path / "logs" / "phases.jsonl", 0)
    phases.begin("closing roles")
    phases.end()
