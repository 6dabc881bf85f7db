"""Compare the demo with the same job in TRL's GRPOTrainer: samples per second, time to learn.

    python benchmarks/beside_trl.py

Same policy, data, prompts, reward, group size, batch, learning rate and lengths, no KL. TRL gets an
environment of its own (`--trl-environment`, made at the first use) and both cores. The runs take
turns. Seconds are of training: neither start-up, which has its own column, nor TRL's evaluations
count. Our evaluations count.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import machine_line, markdown_table

REPOSITORY = Path(__file__).parents[1]
TUNE = Path(sys.executable).with_name("tune")
RECIPE = "async_grpo_full_finetune_distributed"
POLICY = Path(tempfile.gettempdir(), "torchtune-async-grpo/tiny_policy")
TRL = ("trl==1.16.0", "math-verify==0.9.0")
SAMPLES_PER_STEP = 64
WARM_UP_STEPS = 5
START = "imports, config and data", "starting Ray", "starting roles", "evaluating the policy"
"""Phases of our runs up to the first step."""
GOALS = 0.8, 0.9
"""Shares of held-out prompts that are answered correctly."""


@dataclass(frozen=True)
class Measured:
    """One run."""

    start_s: float
    """From the command to the first step's begin, evaluation before it included."""
    samples_per_s: float
    """Trained samples per second, without the first `WARM_UP_STEPS`."""
    seconds_to: dict[float, float]
    """Seconds of training to each goal that was reached."""
    success: float
    """Share of right samples in the last ten steps."""


def make_environment(folder: Path) -> Path:
    """Install TRL into a folder unless it is there; return its Python."""
    python, done = folder / "bin/python", folder / ".done"
    if not done.exists() or done.read_text() != " ".join(TRL):
        torch = re.search(r"^torch==.*$", (REPOSITORY / "requirements/cpu.txt").read_text(), re.M)
        assert torch is not None
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, torch[0]], check=True)
        subprocess.run([*install, torch[0], *TRL], check=True)
        done.write_text(" ".join(TRL))
    return python


def run_ours(folder: Path, steps: int, every: int, seed: int, more: list[str]) -> Measured:
    """Run the demo and measure it."""
    command = [TUNE, "run", RECIPE, "--config", "tiny_async_grpo", f"output_dir={folder}"]
    length = [f"num_steps={steps}", f"eval_every_n_steps={every}", f"save_every_n_steps={steps}"]
    _run([*command, *length, f"seed={seed}", *more], os.environ)
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").open()]
    first = records[0]["time/wall_clock"]  # from before the roles start
    phases = [json.loads(line) for line in (folder / "logs/phases.jsonl").open()]
    start_s = sum(phase["seconds"] for phase in phases if phase["phase"] in START)
    lines: list[dict[str, Any]] = []
    for record in records:
        seconds = record["time/wall_clock"] - first
        if record["step"]:
            success = record["rollout/success_rate"]
            lines.append({"step": record["step"], "seconds": seconds, "success": success})
        if "eval/success_rate" in record:
            lines.append({"seconds": seconds, "held_out": record["eval/success_rate"]})
    return measured_of(lines, start_s)


def run_trl(
    python: Path, folder: Path, steps: int, every: int, seed: int, threads: int
) -> Measured:
    """Run TRL's trainer and measure it."""
    began, file = time.time(), folder.with_suffix(".jsonl")
    options = {"steps": steps, "evaluate-every": every, "seed": seed, "threads": threads}
    command = [python, REPOSITORY / "benchmarks/trl_job.py", POLICY, file]
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    _run([*command, *given], {**os.environ, "OMP_NUM_THREADS": str(threads)})
    lines = [json.loads(line) for line in file.open()]
    return measured_of(lines, lines[0]["clock"] - began)


def _run(command: list[Any], env: Any) -> None:
    done = subprocess.run(
        [*map(str, command)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout)


def measured_of(lines: list[dict[str, Any]], start_s: float) -> Measured:
    """Summarize the lines of a run: of steps with `success`, of evaluations with `held_out`."""
    steps = [line for line in lines if "success" in line]
    timed = steps[-1]["seconds"] - steps[WARM_UP_STEPS - 1]["seconds"]
    reached = {
        goal: next((line["seconds"] for line in lines if line.get("held_out", 0) >= goal), None)
        for goal in GOALS
    }
    return Measured(
        start_s=start_s,
        samples_per_s=(len(steps) - WARM_UP_STEPS) * SAMPLES_PER_STEP / timed,
        seconds_to={goal: seconds for goal, seconds in reached.items() if seconds is not None},
        success=statistics.fmean(step["success"] for step in steps[-10:]),
    )


def table(measured: dict[str, list[Measured]]) -> str:
    """Table of both, and the ratios of the runs that took turns."""

    def spread(values: list[float], digits: int) -> str:
        if not values:
            return "not reached"
        low, mid, high = min(values), statistics.median(values), max(values)
        return f"{mid:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"

    rows = []
    for name, runs in measured.items():
        row = [name, spread([run.samples_per_s for run in runs], 0)]
        for goal in GOALS:
            row.append(spread([r.seconds_to[goal] for r in runs if goal in r.seconds_to], 0))
        row += [spread([run.success for run in runs], 3), spread([run.start_s for run in runs], 0)]
        rows.append(row)
    ours, trl = measured.values()
    pairs = list(zip(ours, trl, strict=True))
    ratios = {"samples per second": [a.samples_per_s / b.samples_per_s for a, b in pairs]}
    for goal in GOALS:
        both = [(a.seconds_to, b.seconds_to) for a, b in pairs]
        ratios[f"time to {goal}"] = [b[goal] / a[goal] for a, b in both if goal in a and goal in b]
    head = [
        *("", "samples per second", *(f"seconds to held-out {goal}" for goal in GOALS)),
        *("success, last ten steps", "start, s"),
    ]
    lines = [
        f"- {name}: {spread(values, 2)} times as fast"
        if values
        else f"- {name}: not reached by both"
        for name, values in ratios.items()
    ]
    return "\n".join([markdown_table(head, rows), "", "Ours beside TRL, pair by pair:", *lines])


def main() -> None:
    """Run both in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, a seed for each pair")
    parser.add_argument("--steps", type=int, default=250, help="training steps of each run")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--trl-threads", type=int, default=2, help="threads of TRL's process")
    where = Path(tempfile.gettempdir(), "torchtune-async-grpo/trl")
    parser.add_argument("--trl-environment", type=Path, default=where, help="folder of its own")
    parser.add_argument("more", nargs="*", help="keys of our config, as key=value")
    given = parser.parse_args()
    if given.steps <= WARM_UP_STEPS + 10 or given.repeats < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS + 10}, --repeats at least 1")
    python = make_environment(given.trl_environment)
    measured: dict[str, list[Measured]] = {"ours": [], "TRL 1.16": []}
    length = given.steps, given.evaluate_every
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.repeats):
            place = Path(folder, f"ours_{seed}"), Path(folder, f"trl_{seed}")
            measured["ours"].append(run_ours(place[0], *length, seed, given.more))
            trl = run_trl(python, place[1], *length, seed, given.trl_threads)
            measured["TRL 1.16"].append(trl)
    sys.stdout.write(f"{machine_line()}\n\n{table(measured)}\n")


if __name__ == "__main__":
    main()
