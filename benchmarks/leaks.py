"""Measure whether processes of a long run grow: memory, threads, files, objects over 500 steps.

    python benchmarks/leaks.py

Runs the demo for 500 steps and fits a line to the memory of each role, in its heartbeats after the
first fifth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import linear_regression
from typing import Any

from measuring import TRAIN_DEMO, machine_line, markdown_table

HEADER = ("role", "heartbeats", "memory, MiB", "growth, MiB per 100 steps", "threads", "open files")


def rows(heartbeats: list[dict[str, Any]], num_steps: int) -> list[list[str]]:
    """Return a table row for each role: its use of resources at the end, and memory growth."""
    roles = defaultdict(list)
    for beat in heartbeats:
        roles[beat["role"]].append(beat)
    start, end = heartbeats[0]["time"], heartbeats[-1]["time"]
    hundreds = num_steps / 100 / (end - start)
    table = []
    for role, beats in sorted(roles.items()):
        late = beats[len(beats) // 5 :]
        times = [(beat["time"] - start) * hundreds for beat in late]
        growth = linear_regression(times, [beat["rss_mib"] for beat in late]).slope
        last = late[-1]
        row = [role, str(len(beats)), f"{last['rss_mib']:.0f}", f"{growth:+.2f}"]
        for what in ("threads", "open_files"):
            row.append(f"{late[0][what]} to {last[what]}")
        if "objects" in last:
            row[0] += f" ({late[0]['objects']} to {last['objects']} Ray objects)"
        table.append(row)
    return table


def main() -> None:
    """Run the demo and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output_dir = Path(folder) / "run"
        more = (f"num_steps={options.steps}", "generator.backend=vllm")
        subprocess.run([*TRAIN_DEMO, f"output_dir={output_dir}", *more], check=True)
        lines = (output_dir / "logs" / "heartbeats.jsonl").open()
        heartbeats = [json.loads(line) for line in lines]
    table = markdown_table(HEADER, rows(heartbeats, options.steps))
    sys.stdout.write(f"{machine_line()}\n\n{table}\n")


if __name__ == "__main__":
    main()
