"""The benchmark of schedules computes its table correctly from the metrics of runs."""

import json
import os
import subprocess
import sys

import pytest
from async_speedup import WARM_UP_STEPS, Measured, measured_of, pin, table


def test_a_run_is_measured_without_its_first_steps(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    records = [{"step": 0, "eval/success_rate": 0.5}]
    for step in range(1, WARM_UP_STEPS + 3):
        late = step > WARM_UP_STEPS
        seconds = {"step": 2.0, "wait_for_batch": 0.5, "train": 1.2, "push": 0.1}
        times = {f"time/{key}": value if late else 99.0 for key, value in seconds.items()}
        records.append({"step": step, "staleness/mean": 1.0 if late else 9.0, **times})
    (logs / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    measured = measured_of(tmp_path)
    assert (measured.step_s, measured.wait_s, measured.staleness) == (2.0, 0.5, 1.0)
    assert measured.train_s == pytest.approx(1.3)
    assert measured.ms_per_sample == 2000 / 64


def test_the_limit_is_that_of_perfect_overlap():
    sync = Measured(step_s=4.0, wait_s=1.0, train_s=3.0, ms_per_sample=62.5, staleness=0.0)
    both = Measured(step_s=3.2, wait_s=0.2, train_s=3.0, ms_per_sample=50.0, staleness=1.9)
    text = table({"synchronous": [sync], "asynchronous": [both]})
    assert "Speedup 1.25" in text and "is 1.33" in text
    assert text.count("\n| ") == 3


def test_a_process_is_pinned_to_its_core():
    core = min(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pin(child.pid, core)
        assert os.sched_getaffinity(child.pid) == {core}
    finally:
        child.communicate(b"\n")
