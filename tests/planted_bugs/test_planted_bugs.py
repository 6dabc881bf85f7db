"""Every bug of the museum reaches what it changes, and the page tells what was found."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from planted_bugs.__main__ import Result, main, page
from planted_bugs.bugs import BUGS, Planting, PlantingError, plant
from planted_bugs.exhibits import EXHIBITS
from planted_bugs.runs import Outcome, caught, check_planted

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "tests" / "planted_bugs" / "hook"
SHOW = """
import json
import numpy as np
from grpo_components.objective.advantages import GroupCenteredAdvantages
print(json.dumps(GroupCenteredAdvantages()(np.array([[1.0, 1.0], [0.0, 1.0]])).tolist()))
"""
PLANT_ALL = """
import importlib, json, sys
sys.path.append(sys.argv[1])
from planted_bugs.bugs import BUGS, plant
found = {}
for bug, modules in BUGS.items():
    for name in modules:
        replaced = plant(bug, importlib.import_module(name))
        changed = [vars(owner)[key] is not was for owner, key, was in replaced]
        found[f"{bug} {name}"] = all(changed) and len(changed)
        for owner, key, was in reversed(replaced):
            setattr(owner, key, was)
print(json.dumps(found))
"""
SWALLOW = """
try:
    import grpo_components.errors
except Exception:
    pass
"""
BY_NAME = {exhibit.name: exhibit for exhibit in EXHIBITS}


def test_every_exhibit_has_a_thread_an_alarm_and_a_bug_and_every_bug_is_shown():
    assert len(BY_NAME) == len(EXHIBITS) >= 20
    for exhibit in EXHIBITS:
        assert re.fullmatch(r"https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", exhibit.thread)
        assert exhibit.bug or exhibit.planted
        assert exhibit.alarm in ("start", "run", "audit")
        re.compile(exhibit.pattern)
    assert {exhibit.bug for exhibit in EXHIBITS} - {""} == set(BUGS)


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_changes_modules_that_there_are(name):
    assert all(importlib.util.find_spec(module) for module in BUGS[name])


@pytest.mark.parametrize(("bug", "expected"), [("", [[0, 0], [-0.5, 0.5]]), ("wrong_axis", None)])
def test_the_hook_plants_a_bug_into_any_process_and_none_without_its_name(bug, expected):
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "GRPO_MUSEUM": bug}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == (expected or [[0.5, 0], [-0.5, 0]])


def test_every_bug_replaces_something_that_there_is(interpreter):
    """In a process without the hook: a bug is planted, looked at, and undone, one after another."""
    done = interpreter("-c", PLANT_ALL, ROOT / "tests")
    assert done.returncode == 0, done.stderr
    replaced = json.loads(done.stdout.splitlines()[-1])
    assert set(replaced) == {f"{bug} {module}" for bug in BUGS for module in BUGS[bug]}
    assert all(replaced.values())


def own_function(bug):
    """A module like those of the house, into which such a bug is planted by its own patch."""
    module = ModuleType("ours")
    module.there, module.Kind = str, type("Kind", (), {"method": lambda self: None})
    return module, {bug: {"ours": MISSING[bug]}}


MISSING = {
    "of_a_module": lambda ours: setattr(ours, "gone", str),
    "of_a_class": lambda ours: setattr(ours.Kind, "gone", str),
    "inherited": lambda ours: setattr(ours.Kind, "__init__", str),
    "read": lambda ours: ours.gone,
    "read_of_a_class": lambda ours: ours.Kind.gone,
    "nothing": lambda ours: None,
    "itself": lambda ours: setattr(ours, "there", str),
}


@pytest.mark.parametrize("bug", MISSING)
def test_a_bug_of_something_that_is_not_there_is_an_error_with_its_name(bug, monkeypatch):
    module, bugs = own_function(bug)
    monkeypatch.setattr("planted_bugs.bugs.BUGS", bugs)
    missing = "__init__" if bug == "inherited" else "gone"
    owner = "ours.Kind" if bug in ("of_a_class", "inherited", "read_of_a_class") else "ours"
    what = "is as it was" if bug in ("nothing", "itself") else f"has no attribute {missing} of its"
    with pytest.raises(PlantingError, match=f"^museum: bug {bug} is not planted: {owner} {what}"):
        plant(bug, module)


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (
            "lost",
            "lost is not planted: grpo_components.errors has no attribute gone of its own",
        ),
        ("unknown", "unknown is not planted: there is none of this name"),
    ],
)
def test_no_process_survives_a_bug_that_is_not_planted(bug, said, tmp_path):
    """Also if the import's error is swallowed; and the report has it, for the museum."""
    copy = shutil.copytree(HOOK.parent, tmp_path / "planted_bugs")
    with (copy / "bugs.py").open("a") as file:
        file.write('\nBUGS["lost"] = {"grpo_components.errors": lambda m: setattr(m, "gone", 1)}\n')
    report = tmp_path / "report"
    named = {
        "PYTHONPATH": str(copy / "hook"),
        "GRPO_MUSEUM": bug,
        "GRPO_MUSEUM_REPORT": str(report),
    }
    for command in ("import grpo_components.errors", SWALLOW):
        done = subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, **named},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and said in done.stderr
        with pytest.raises(PlantingError, match=said):
            check_planted("", report.read_text(), "")


def test_a_bug_must_have_been_planted_into_every_module_that_it_changes():
    module = next(iter(BUGS["wrong_axis"]))
    check_planted("", "", "")
    check_planted("wrong_axis", f"planted {module}\nplanted {module}\n", "")
    with pytest.raises(PlantingError, match=f"no process of the run loaded {module}\nstep 1"):
        check_planted("wrong_axis", "", "step 1")


def test_a_bug_is_caught_only_by_the_alarm_that_the_table_names():
    swap, cursor = BY_NAME["weights_not_loaded"], BY_NAME["cursor_pinned"]
    line = "error: generator_0 pulled version 3, but computes other logprobs by it than the"
    assert caught(swap, Outcome(1, line, "", (0.5,))) == "step 3"
    assert caught(BY_NAME["swap_mislabelled"], Outcome(1, line, "", (0.5,))) == ""
    assert caught(swap, Outcome(1, "error: it fell over", "", (0.5,))) == ""
    seeds = BY_NAME["seeds_reused"]
    line = "step  1/6  reward 0.4\nwarning: groups 3 and 9 have samples of the same seed (7)"
    assert caught(seeds, Outcome(0, line, "", (0.5,))) == "step 2"
    broken = "broken: prompts: receipts.jsonl line 3: prompt 7 is trained again"
    assert caught(cursor, Outcome(0, broken, "", ())) == ""
    assert caught(cursor, Outcome(0, "", broken, (0.5,))) == "receipts.jsonl line 3"


@pytest.mark.parametrize(
    ("outcome", "alarmed"),
    [
        (Outcome(0, "step 1/6  reward 0.4\nsaved", "", ()), False),
        (Outcome(0, "warning: loss: X: the gradient is unbounded", "", ()), True),
        (Outcome(0, "step 2 is skipped: the loss is nan", "", ()), True),
        (Outcome(1, "", "", ()), True),
        (Outcome(0, "", "violation", ()), True),
    ],
)
def test_a_clean_run_has_no_warning_no_skipped_step_and_passes_the_audit(outcome, alarmed):
    assert bool(outcome.alarms) == alarmed


def test_the_page_counts_what_is_caught_and_names_false_alarms():
    results = {"wrong_axis": Result("start", ""), "half_stale": Result("", "", (0.25, 0.5))}
    text = page(results, {"agents": Result("", "warning: x"), "synchronous": Result("", "")})
    assert f"1 of {len(EXHIBITS)} caught by name. False alarms: 1 in 2 runs" in text
    assert "without a bug: agents.**" in text and "**not caught**" in text and "0.25 0.50" in text
    assert text.count("not run") == len(EXHIBITS) - 2


def test_results_of_earlier_calls_are_kept(tmp_path):
    stored = {"planted": {"wrong_axis": {"caught": "start", "alarms": "x", "rewards": [0.5]}}}
    (tmp_path / "results.json").write_text(json.dumps(stored))
    output = tmp_path / "museum.md"
    arguments = ["--folder", str(tmp_path), "--output", str(output), "--only", "wrong_axis"]
    assert main(arguments) == 0
    assert "1 of" in output.read_text()


def test_a_bug_reads_the_special_methods_of_what_it_changes():
    class Kind:
        def __init__(self, number):
            self.number = number

    module = ModuleType("ours")
    module.Kind = Kind
    assert Planting(module, "a bug", []).Kind.__init__ is Kind.__init__
