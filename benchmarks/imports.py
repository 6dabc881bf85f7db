"""Measure what each process of a run imports, and how long that takes.

    python benchmarks/imports.py

Each process is started alone, three times, with files that the operating system has in its cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

from measuring import machine_line, markdown_table

HEAVY = ("torch", "ray", "vllm", "transformers", "torchtune", "torchrl", "tensordict", "datasets")
ROLE = "ray, grpo_components.cluster.role_host"  # what each role's process has before its class
GENERATOR = "grpo_components.rollout"
PROCESSES = {
    "`tune ls`, `tune cp`": "grpo_components._plugin",
    "driver": "async_grpo_full_finetune_distributed",
    "parameter server": f"{ROLE}, grpo_components.exchange.parameter_server",
    "replay buffer": f"{ROLE}, grpo_components.exchange.replay_buffer",
    "trainer": f"{ROLE}, grpo_components.training.trainer",
    "reference": f"{ROLE}, grpo_components.training.reference",
    "generator, vllm": f"{ROLE}, {GENERATOR}.generator, {GENERATOR}.vllm_backend",
    "generator, transformers": f"{ROLE}, {GENERATOR}.generator, {GENERATOR}.transformers_backend",
    "process of rewards": "grpo_components.rewards.scoring",
    "live page": "grpo_tools.report.live",
}


def imported(modules: str) -> tuple[float, int, Counter[str]]:
    """Import modules in a new Python; return seconds, number of modules, microseconds a package."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {modules}"]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "recipes")}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=path)
    lines = [line.split("|") for line in run.stderr.splitlines() if line.startswith("import time:")]
    spent: Counter[str] = Counter()
    for own, _, name in lines[1:]:
        spent[name.strip().partition(".")[0]] += int(own.removeprefix("import time:"))
    return spent.total() / 1e6, len(lines) - 1, spent


def main() -> None:
    """Print a table with a row for each process."""
    rows = []
    for process, modules in PROCESSES.items():
        runs = [imported(modules) for _ in range(3)]
        _, number, spent = runs[0]
        heavy = ", ".join(f"{name} {spent[name] / 1e6:.1f}" for name in HEAVY if spent[name] > 0)
        rows.append([process, f"{median(run[0] for run in runs):.2f}", number, heavy])
    head = ["process", "seconds", "modules", "seconds in"]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, rows)}\n")


if __name__ == "__main__":
    main()
