"""A folder with files of two runs, or of two processes of one run at once, is detected."""

import numpy as np
import pytest
from lib.rows import write_rows

from grpo_components.records.run_folder import RunIdentity
from grpo_components.state_files import write_state
from grpo_components.trajectory import batch_hash
from grpo_tools.audit.cross_checks import check_one_run
from grpo_tools.audit.findings import Findings

BATCH = {"response_ids": np.arange(3), "session": [None]}
RUN, OTHER = "a" * 32, "b" * 32
FIRST, SECOND, THIRD = "1" * 32, "2" * 32, "3" * 32


def start(attempt, steps_done, incarnation, run=RUN):
    record = {"event": "start", "attempt": attempt, "steps_done": steps_done}
    return record | {"run": run, "incarnation": incarnation}


def steps(attempt, *numbers):
    same = {"event": "step", "attempt": attempt, "batch_hash": batch_hash(BATCH)}
    return [{**same, "step": n, "policy_version": n} for n in numbers]


def write_receipts(folder, *records):
    write_rows(folder / "receipts.jsonl", *records)


def write_config(folder, run, incarnation, name="config.yaml"):
    (folder / name).write_text(f"# run: {run}\n# incarnation: {incarnation}\nseed: 1\n")


def save(folder, step, incarnation, run=RUN, version=None, latest=True):
    path = folder / "checkpoints" / f"step_{step}"
    version = step if version is None else version
    state = {"ledger": {"steps_done": step, "policy_version": version}, "prompts": {}}
    state["identity"] = RunIdentity(run, incarnation)._asdict()
    write_state(path / "state", "driver", state)
    write_state(path / "state", "batch", BATCH)
    if latest:
        (path.parent / "latest").unlink(missing_ok=True)
        (path.parent / "latest").symlink_to(path.name)


def problem(folder):
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


def test_a_resumed_run_is_one_run_and_receipts_alone_are_enough(folder, tmp_path):
    assert not problem(folder)
    (tmp_path / "alone").mkdir()
    write_receipts(tmp_path / "alone", start(0, 0, FIRST), *steps(0, 1))
    assert not problem(tmp_path / "alone")


def test_a_copy_under_a_name_of_its_own_is_none_of_the_runs_checkpoints(folder):
    (folder / "checkpoints" / "step_2").rename(folder / "checkpoints" / "step_2_keep")
    assert not problem(folder)


def latest_is_of_a_superseded_step(folder):
    write_receipts(folder, start(0, 0, FIRST), *steps(0, 1, 2, 3, 4, 5), start(1, 4, SECOND))
    save(folder, 5, FIRST)


def receipts_are_of_two_runs(folder):
    write_receipts(folder, start(0, 0, FIRST), start(1, 0, SECOND, run=OTHER), *steps(1, 1, 6))


def another_batch(folder):
    other = BATCH | {"response_ids": np.arange(4)}
    write_state(folder / "checkpoints" / "step_2" / "state", "batch", other)


def exchanged(folder):
    names = [folder / "checkpoints" / name for name in ("step_2", "aside", "step_4")]
    for old, new in (names[:2], names[::-2], names[1:]):
        old.rename(new)


MIXED = {
    "a checkpoint has another batch": (another_batch, "step_2"),
    "two checkpoints are exchanged": (exchanged, "step_2"),
    "another run saved here": (lambda f: save(f, 7, THIRD, OTHER, latest=False), "step_7"),
    "its checkpoint replaced ours": (lambda f: save(f, 4, THIRD, OTHER, latest=False), "step_4"),
    "another process saved here": (lambda f: save(f, 5, THIRD, latest=False), THIRD),
    "the first process went on": (lambda f: save(f, 6, FIRST), FIRST),
    "latest is of a superseded step": (latest_is_of_a_superseded_step, "step_5"),
    "latest has another version": (lambda f: save(f, 6, SECOND, version=5), "(5, "),
    "receipts of two runs": (receipts_are_of_two_runs, OTHER),
    "another run's config": (lambda f: write_config(f, OTHER, SECOND), OTHER),
    "another process's config": (lambda f: write_config(f, RUN, THIRD), THIRD),
    "a config without a run": (
        lambda f: (f / "config.yaml").write_text("seed: 1\n"),
        "config.yaml",
    ),
    "another run's earlier config": (
        lambda f: write_config(f, OTHER, FIRST, "config_attempt_0.yaml"),
        "config_attempt_0.yaml",
    ),
}


@pytest.mark.parametrize(("mix", "named"), MIXED.values(), ids=MIXED)
def test_mixed_files_are_detected_and_named(folder, mix, named):
    mix(folder)
    assert named in problem(folder)
