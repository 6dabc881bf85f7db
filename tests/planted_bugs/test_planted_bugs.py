"""Every bug of the museum reaches what it changes, and the page tells what was found."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from planted_bugs.bugs import BUGS, PlantingError
from planted_bugs.exhibits import EXHIBITS
from planted_bugs.runs import Outcome, caught, check_planted

TESTS = Path(__file__).parents[1]
HOOK = TESTS / "planted_bugs" / "hook"
SHOW = """
import json
import numpy as np
from grpo_components.objective.advantages import GroupCenteredAdvantages
print(json.dumps(GroupCenteredAdvantages()(np.array([[1.0, 1.0], [0.0, 1.0]])).tolist()))
"""
PLANT_ALL = """
import importlib, inspect, sys
sys.path.append(sys.argv[1])
from planted_bugs.bugs import BUGS, plant
for name, bug in BUGS.items():
    original = inspect.unwrap(plant(name, importlib.import_module(bug.module)))
    _, *given = inspect.signature(bug.fault).parameters.values()
    named = [each.name for each in given if each.kind == each.POSITIONAL_OR_KEYWORD]
    expected = list(inspect.signature(original).parameters)
    if len(named) == len(given):
        assert named == expected, (name, named, expected)
    assert named == expected[: len(named)] or name == "seeds_reused", (name, named, expected)
"""
SWALLOW = """
try:
    import grpo_components.errors
except Exception:
    pass
"""
BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}


@pytest.fixture
def hooked(interpreter):
    """Runs code in a process that has the hook."""

    def run(code, path, bug, **variables):
        own = {"PYTHONPATH": str(path), "GRPO_MUSEUM": bug, **variables}
        return interpreter("-c", code, env={**os.environ, **own})

    return run


def test_every_exhibit_has_a_thread_and_a_bug_and_every_bug_is_shown():
    assert len(BY_NAME) == len(EXHIBITS) >= 20
    for exhibit in EXHIBITS:
        assert re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", exhibit.thread)
        assert exhibit.name in BUGS or any("planted_bugs." in each for each in exhibit.overrides)
    assert set(BY_NAME) >= set(BUGS)


@pytest.mark.parametrize(("bug", "expected"), [("", [[0, 0], [-0.5, 0.5]]), ("wrong_axis", None)])
def test_the_hook_plants_a_bug_into_any_process_and_none_without_its_name(hooked, bug, expected):
    found = json.loads(hooked(SHOW, HOOK, bug).stdout)
    assert found == (expected or [[0.5, 0], [-0.5, 0]])


def test_every_bug_replaces_a_function_that_there_is_and_takes_its_arguments(interpreter):
    done = interpreter("-c", PLANT_ALL, TESTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("lost", "lost is not planted: grpo_components.errors has no gone of its own"),
        ("unknown", "unknown is not planted: there is none of this name"),
    ],
)
def test_no_process_survives_a_bug_that_is_not_planted(hooked, bug, said, tmp_path):
    """Also if the import's error is swallowed; and the report has it, for the museum."""
    copy = shutil.copytree(HOOK.parent, tmp_path / "planted_bugs")
    with (copy / "bugs.py").open("a") as file:
        file.write('\nBUGS["lost"] = Bug("grpo_components.errors", "gone", "a/b#1", str)\n')
    report = tmp_path / "report"
    for code in ("import grpo_components.errors", SWALLOW):
        done = hooked(code, copy / "hook", bug, GRPO_MUSEUM_REPORT=str(report))
        assert done.returncode == 1 and said in done.stderr
        with pytest.raises(PlantingError, match=said):
            check_planted("", report.read_text(), "")


PULLED = "error: generator_0 pulled version 3, but computes other logprobs by it than the"
SEEDS = "step  1/6  reward 0.4\nwarning: groups 3 and 9 have samples of the same seed (7)"
TWICE = "broken: prompts: receipts.jsonl line 3: prompt 7 is trained again"


@pytest.mark.parametrize(
    ("name", "outcome", "where"),
    [
        ("weights_not_loaded", Outcome(1, PULLED, "", (0.5,)), "step 3"),
        ("swap_mislabelled", Outcome(1, PULLED, "", (0.5,)), ""),
        ("weights_not_loaded", Outcome(1, "error: it fell over", "", (0.5,)), ""),
        ("seeds_reused", Outcome(0, SEEDS, "", (0.5,)), "step 2"),
        ("cursor_pinned", Outcome(0, TWICE, "", ()), ""),
        ("cursor_pinned", Outcome(0, "", TWICE, (0.5,)), "receipts.jsonl line 3"),
    ],
)
def test_a_bug_is_caught_only_by_the_alarm_that_the_table_names(name, outcome, where):
    assert caught(BY_NAME[name], outcome) == where
