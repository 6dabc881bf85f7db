"""Compare degrees of asynchrony at the same wall time on the same cores, over several seeds.

    python benchmarks/equal_budget.py

The demo's job with `max_staleness` 0, 1, 2, 4 and 8; 0 is synchronous (push and pull at each step).
Each run gets the same seconds of training, evaluations included; its last evaluation counts.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_speedup import RECIPE, TUNE
from measuring import machine_line, markdown_table

STALENESS = 0, 1, 2, 4, 8


@dataclass(frozen=True)
class Measured:
    """One run, as far as its budget went."""

    steps: int
    success: float
    """Share of held-out prompts that were answered correctly, in the last evaluation."""
    staleness: float
    """Mean staleness of the trained tokens, in policy versions."""


def run(folder: Path, staleness: int, seed: int, budget_s: float, every: int) -> Measured:
    """Run the demo until its budget is used up."""
    command = [TUNE, "run", RECIPE, "--config", "tiny_async_grpo", f"output_dir={folder}"]
    keys = [f"max_staleness={staleness}", f"seed={seed}", f"eval_every_n_steps={every}"]
    keys += ["num_steps=100000", "save_every_n_steps=100000", "rollouts_in_flight=8"]
    keys += [] if staleness else ["push_every_n_steps=1", "pull_every_m_rollouts=1"]
    process = subprocess.Popen(
        [*map(str, command), *keys], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 0: held-out"):
            break
    try:
        rest, _ = process.communicate(timeout=budget_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.communicate()
    else:
        raise SystemExit("".join([*seen, rest]))
    records = [json.loads(line) for line in (folder / "logs/metrics.jsonl").open()]
    return measured_of(records, budget_s)


def measured_of(records: list[dict[str, Any]], budget_s: float) -> Measured:
    """Summarize the metrics of a run up to its budget."""
    end = records[0]["time/wall_clock"] + budget_s
    within = [record for record in records if record["time/wall_clock"] <= end]
    steps = [record for record in within if record["step"] > 0]
    evaluated = [r["eval/success_rate"] for r in within if r.get("eval/success_rate") is not None]
    staleness = statistics.fmean(step["staleness/mean"] for step in steps)
    return Measured(len(steps), evaluated[-1], staleness)


def table(measured: dict[int, list[Measured]]) -> str:
    """Table of all degrees: medians over the seeds, with the range."""

    def spread(values: list[float], digits: int) -> str:
        low, mid, high = min(values), statistics.median(values), max(values)
        return f"{mid:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"

    rows = [
        [
            staleness,
            spread([run.steps for run in runs], 0),
            spread([run.success for run in runs], 3),
            spread([run.staleness for run in runs], 2),
        ]
        for staleness, runs in measured.items()
    ]
    return markdown_table(["max_staleness", "steps", "held-out success", "mean staleness"], rows)


def main() -> None:
    """Run all degrees in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each degree")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each run")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps between evaluations")
    given = parser.parse_args()
    if given.seeds < 1 or given.budget <= 0:
        parser.error("--seeds must be at least 1, --budget above 0")
    measured: dict[int, list[Measured]] = {staleness: [] for staleness in STALENESS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            for staleness, runs in measured.items():
                place = Path(folder, f"{staleness}_{seed}")
                runs.append(run(place, staleness, seed, given.budget, given.evaluate_every))
    sys.stdout.write(f"{machine_line()}\n\n{table(measured)}\n")


if __name__ == "__main__":
    main()
