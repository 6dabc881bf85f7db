"""Every bug of the museum reaches what it changes, and the page tells what was found."""

import json
import os
import re
from pathlib import Path

import pytest

from planted_bugs.bugs import BUGS
from planted_bugs.exhibits import EXHIBITS

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
