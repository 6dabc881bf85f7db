"""Measure how much faster the demo trains asynchronously than synchronously on two cores.

    python benchmarks/async_speedup.py

Same code, policy and data. The generator with its reward processes is pinned to one core, the
trainer to another. Synchronous is `max_staleness=0 push_every_n_steps=1 pull_every_m_rollouts=1`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from measuring import TRAIN_DEMO, briefly_evaluated, machine_line, markdown_table

SCHEDULES = {
    "synchronous": ("max_staleness=0", "push_every_n_steps=1", "pull_every_m_rollouts=1"),
    "asynchronous": (),
}
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Measured:
    """Means over the steps of one run, without the first `WARM_UP_STEPS`."""

    step_s: float
    """Wall time of a step, from the wait for a batch to the publishing of the new weights."""
    wait_s: float
    """Part of `step_s` in which the trainer waits for a batch."""
    train_s: float
    """Part of `step_s` for training and publishing."""
    ms_per_sample: float
    staleness: float


def cores() -> tuple[int, int]:
    """Return two CPU cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("needs two cores: one for the generator, one for the trainer")
    return usable[0], usable[1]


def pin(pid: int, core: int) -> None:
    """Pin a process, all its threads and all its children to one core."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def run(schedule: str, num_steps: int, folder: Path) -> Measured:
    """Run the demo with one schedule and measure it."""
    process = subprocess.Popen(
        [
            *TRAIN_DEMO,
            *briefly_evaluated(num_steps),
            f"output_dir={folder}",
            "generator.backend=vllm",
            f"save_every_n_steps={num_steps}",
            *SCHEDULES[schedule],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.match(r"step +1/", line):
            split_cores(folder)
    if process.wait() != 0:
        raise SystemExit("".join(seen))
    return measured_of(folder)


def measured_of(folder: Path) -> Measured:
    """Return means of a run's metrics over its steps, without the first `WARM_UP_STEPS`."""
    steps = list(steps_of(folder))[WARM_UP_STEPS:]

    def mean(key: str) -> float:
        return statistics.fmean(step[key] for step in steps)

    samples = 64  # per step of the demo: groups_per_step x group_size
    return Measured(
        step_s=mean("time/step"),
        wait_s=mean("time/wait_for_batch"),
        train_s=mean("time/train") + mean("time/push"),
        ms_per_sample=1000 * mean("time/step") / samples,
        staleness=mean("staleness/mean"),
    )


def split_cores(folder: Path) -> None:
    """Pin the generator to one core and the trainer to the other; leave other processes alone."""
    first, second = cores()
    roles = [json.loads(line) for line in (folder / "logs" / "roles.jsonl").open()]
    pids = {role["role"]: role["pid"] for role in roles}
    pin(pids["generator_0"], first)
    pin(pids["trainer_0"], second)


def steps_of(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the metrics of each training step of a run."""
    for line in (folder / "logs" / "metrics.jsonl").open():
        record = json.loads(line)
        if record["step"] > 0:
            yield record


def table(measured: dict[str, list[Measured]]) -> str:
    """Return a table of both schedules' times, and the speedup beside its theoretical limit."""

    def median(schedule: str, value: str) -> float:
        return statistics.median(getattr(run, value) for run in measured[schedule])

    rows = [
        [
            schedule,
            f"{median(schedule, 'ms_per_sample'):.1f}",
            f"{min(r.ms_per_sample for r in runs):.1f} to {max(r.ms_per_sample for r in runs):.1f}",
            f"{median(schedule, 'train_s'):.3f}",
            f"{median(schedule, 'wait_s'):.3f}",
            f"{median(schedule, 'wait_s') / median(schedule, 'step_s'):.0%}",
            f"{median(schedule, 'staleness'):.2f}",
        ]
        for schedule, runs in measured.items()
    ]
    generate, train = median("synchronous", "wait_s"), median("synchronous", "train_s")
    limit = (generate + train) / max(generate, train)
    pairs = zip(measured["synchronous"], measured["asynchronous"], strict=True)
    ratios = sorted(sync.ms_per_sample / asynchronous.ms_per_sample for sync, asynchronous in pairs)
    head = [
        *("schedule", "ms per trained sample", "range over runs", "train + push, s per step"),
        *("trainer waits, s per step", "share of waiting", "mean staleness"),
    ]
    return (
        f"{markdown_table(head, rows)}\n\n"
        f"Speedup {statistics.median(ratios):.2f} (pairs of runs: {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}); the limit (Tg + Tt) / max(Tg, Tt) is {limit:.2f}, with "
        f"Tg = {generate:.3f} s and Tt = {train:.3f} s per step in the synchronous runs."
    )


def main() -> None:
    """Run the schedules in alternation and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each schedule")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS or arguments.repeats < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, --repeats at least 1")
    measured: dict[str, list[Measured]] = {schedule: [] for schedule in SCHEDULES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for schedule, runs in measured.items():
                runs.append(run(schedule, arguments.steps, Path(folder) / f"{schedule}{repeat}"))
    sys.stdout.write(f"{machine_line()}\n\n{table(measured)}\n")


if __name__ == "__main__":
    main()
