"""A folder with files of two runs, or of two processes of one run at once, is detected."""

import json

import pytest

from grpo_components.records.run_folder import RunIdentity
from grpo_components.state_files import write_state
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.one_run import check_one_run

RUN, OTHER = "a" * 32, "b" * 32
FIRST, SECOND, THIRD = "1" * 32, "2" * 32, "3" * 32


def start(attempt, steps_done, incarnation, run=RUN):
    record = {"event": "start", "attempt": attempt, "steps_done": steps_done}
    return record | {"run": run, "incarnation": incarnation}


def steps(attempt, *numbers):
    return [{"event": "step", "attempt": attempt, "step": n, "policy_version": n} for n in numbers]


def write_receipts(folder, *records):
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "receipts.jsonl").write_text(text)


def write_config(folder, run, incarnation, name="config.yaml"):
    (folder / name).write_text(f"# run: {run}\n# incarnation: {incarnation}\nseed: 1\n")


def save(folder, step, incarnation, run=RUN, version=None, latest=True):
    path = folder / "checkpoints" / f"step_{step}"
    version = step if version is None else version
    state = {"ledger": {"steps_done": step, "policy_version": version}, "prompts": {}}
    state["identity"] = RunIdentity(run, incarnation)._asdict()
    write_state(path / "state", "driver", state)
    if latest:
        (path.parent / "latest").unlink(missing_ok=True)
        (path.parent / "latest").symlink_to(path.name)


def problem(folder):
    """The violation that the audit would name, if any."""
    findings = Findings()
    check_one_run(folder / "receipts.jsonl", findings.check)
    assert findings.checked.keys() == {"one_run"}
    return findings.broken.get("one_run", "")


@pytest.fixture
def folder(tmp_path):
    """A run that was killed after step 5 and resumed from step 4 to step 6."""
    first = [start(0, 0, FIRST), *steps(0, 1, 2, 3, 4, 5)]
    write_receipts(tmp_path, *first, start(1, 4, SECOND), *steps(1, 5, 6))
    write_config(tmp_path, RUN, FIRST, "config_attempt_0.yaml")
    write_config(tmp_path, RUN, SECOND)
    for step, process in ((2, FIRST), (4, FIRST), (6, SECOND)):
        save(tmp_path, step, process)
    return tmp_path


def test_a_resumed_run_is_one_run(folder):
    assert not problem(folder)


def test_receipts_alone_are_enough(tmp_path):
    write_receipts(tmp_path, start(0, 0, FIRST), *steps(0, 1))
    assert not problem(tmp_path)


def another_run_saved_here(folder):
    save(folder, 7, THIRD, run=OTHER, latest=False)
    return "step_7"


def another_runs_checkpoint_replaced_ours(folder):
    save(folder, 4, THIRD, run=OTHER, latest=False)
    return "step_4"


def another_process_saved_here(folder):
    save(folder, 5, THIRD, latest=False)
    return THIRD


def the_first_process_went_on_and_saved(folder):
    save(folder, 6, FIRST)
    return FIRST


def latest_is_of_a_superseded_step(folder):
    write_receipts(folder, start(0, 0, FIRST), *steps(0, 1, 2, 3, 4, 5), start(1, 4, SECOND))
    save(folder, 5, FIRST)
    return "step_5"


def latest_has_another_version_than_its_step(folder):
    save(folder, 6, SECOND, version=5)
    return "(5, "


def receipts_are_of_two_runs(folder):
    write_receipts(folder, start(0, 0, FIRST), start(1, 0, SECOND, run=OTHER), *steps(1, 1, 6))
    return OTHER


def the_config_is_another_runs(folder):
    write_config(folder, OTHER, SECOND)
    return OTHER


def the_config_is_of_another_process(folder):
    write_config(folder, RUN, THIRD)
    return THIRD


def the_config_names_no_run(folder):
    (folder / "config.yaml").write_text("seed: 1\n")
    return "config.yaml"


def an_earlier_config_is_another_runs(folder):
    write_config(folder, OTHER, FIRST, "config_attempt_0.yaml")
    return "config_attempt_0.yaml"


@pytest.mark.parametrize(
    "mix",
    [
        another_run_saved_here,
        another_runs_checkpoint_replaced_ours,
        another_process_saved_here,
        the_first_process_went_on_and_saved,
        latest_is_of_a_superseded_step,
        latest_has_another_version_than_its_step,
        receipts_are_of_two_runs,
        the_config_is_another_runs,
        the_config_is_of_another_process,
        the_config_names_no_run,
        an_earlier_config_is_another_runs,
    ],
)
def test_mixed_files_are_detected_and_named(folder, mix):
    named = mix(folder)
    assert named in problem(folder)
