"""The receipts are compared with the run's config and metrics, attempt by attempt."""

import json

import pytest
from lib.receipts import of
from lib.rows import write_rows

from grpo_tools.audit.__main__ import audit

CONFIG = "max_staleness: 2\ngroups_per_step: 2\ngroup_size: 2\nnum_steps: 6\n"


@pytest.fixture
def run(tmp_path, write_run, write_receipts):
    """A folder, its records, and a function that writes them with a valid chain and audits them."""
    records = write_run(tmp_path / "receipts.jsonl")

    def broken():
        write_receipts(tmp_path, records)
        return audit(tmp_path / "receipts.jsonl")[0].broken

    assert not broken()
    return tmp_path, records, broken


@pytest.mark.parametrize("key", ["max_staleness", "groups_per_step", "group_size", "num_steps"])
def test_each_setting_of_the_start_record_must_be_that_of_the_config(run, key):
    _, records, broken = run
    records[0][key] += 1
    found = broken()
    assert f"{key} is {records[0][key]}, but {records[0][key] - 1}" in found["config"]
    assert "receipts.jsonl line 1" in found["config"]


@pytest.mark.parametrize("eval_only", ["true", "/a/model"])
def test_a_run_with_eval_only_has_no_steps_whatever_num_steps_is(run, eval_only):
    folder, records, broken = run
    (folder / "config.yaml").write_text(f"{CONFIG}eval_only: {eval_only}\n")
    assert "config" in broken()
    (folder / "logs/metrics.jsonl").unlink()
    records[0]["num_steps"] = 0
    records[1:] = []
    assert "config" not in broken()


def test_each_attempt_is_compared_with_the_config_of_its_process(run):
    """Attempt 1 is a rollback in the first process; attempt 2 was resumed with other settings."""
    folder, records, broken = run
    starts = [dict(records[0], attempt=attempt) for attempt in range(3)]
    records[:] = starts
    (folder / "logs/metrics.jsonl").unlink()
    (folder / "config_attempt_1.yaml").write_text(CONFIG)
    (folder / "config.yaml").write_text(
        CONFIG.replace("max_staleness: 2", "max_staleness: 3") + "resume_from_checkpoint: true\n"
    )
    assert "max_staleness is 2" in broken()["config"]
    starts[2]["max_staleness"] = 3
    assert "config" not in broken()
    starts[1]["max_staleness"] = 3
    assert "line 2" in broken()["config"]
    (folder / "config_attempt_1.yaml").unlink()
    assert "config" not in broken(), (
        "without the earlier config only the last attempt can be compared"
    )
    starts[2]["group_size"] = 3
    assert "line 3" in broken()["config"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy_version", 7),
        ("rollout/trained_tokens", 15),
        ("staleness/max", 1),
        ("staleness/mean", None),
        ("off_policy/correction_mass", 99),
    ],
)
def test_each_number_must_be_that_of_the_metrics(run, key, value):
    folder, _, broken = run
    path = folder / "logs" / "metrics.jsonl"
    metrics = [json.loads(line) for line in path.open()]
    metrics[4][key] = value
    write_rows(path, *metrics)
    found = broken()
    assert list(found) == ["metrics"]
    assert key in found["metrics"] and "(attempt 0, step 5)" in found["metrics"]


def test_only_the_last_step_may_be_missing_from_the_metrics(run):
    folder, records, broken = run
    path = folder / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert not broken(), "killed between the two writes"
    path.write_text("".join(lines[:2] + lines[3:]))
    assert list(broken()) == ["metrics"]
    path.write_text("".join(lines))
    del records[records.index(of(records, "step", step=6)[0]) :]
    assert "step 6 of attempt 0" in broken()["metrics"]
