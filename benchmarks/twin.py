"""Compare the calibrated twin with real runs of the demo that it was not fitted from.

    python benchmarks/twin.py FOLDER

One run with the demo's settings is the fit. The others change one or two keys each; between them
the first is repeated, to show how the machine's speed drifts. FOLDER keeps the runs: a second
call makes only those that are missing, and prints the table again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from async_speedup import RECIPE, TUNE
from measuring import machine_line, markdown_table

from grpo_components.twin.fit import Recorded, Run, fit
from grpo_components.twin.setup import Setup
from grpo_components.twin.simulation import Prediction, simulate

COMMON = (
    *("tokens_per_micro_batch=512", "eval_dataset.num_rows=8"),
    *("eval_every_n_steps=1000", "save_every_n_steps=1000"),
)
"""Keys of all runs: several micro-batches in a step, and nothing beside the steps."""
FIT, AGAIN = "fit", "fit again"
SYNCHRONOUS = ("max_staleness=0", "pull_every_m_rollouts=1")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    FIT: (50, ()),
    "synchronous": (25, SYNCHRONOUS),
    "max_staleness=1": (25, ("max_staleness=1",)),
    "max_staleness=4": (25, ("max_staleness=4",)),
    "groups_per_step=4": (30, ("groups_per_step=4",)),
    f"{AGAIN} 1": (25, ()),
    "groups_per_step=16": (20, ("groups_per_step=16",)),
    "group_size=4": (30, ("group_size=4",)),
    "group_size=16": (20, ("group_size=16",)),
    "num_generators=2": (25, ("num_generators=2",)),
    f"{AGAIN} 2": (25, ()),
    "num_generators=2, synchronous": (25, ("num_generators=2", *SYNCHRONOUS)),
    "rollouts_in_flight=2": (25, ("rollouts_in_flight=2",)),
    "rollouts_in_flight=16": (25, ("rollouts_in_flight=16",)),
    "push_every_n_steps=2": (25, ("push_every_n_steps=2",)),
    f"{AGAIN} 3": (25, ()),
    "pull_every_m_rollouts=1": (25, ("pull_every_m_rollouts=1",)),
    "groups_per_step=16 group_size=4, synchronous": (
        25,
        ("groups_per_step=16", "group_size=4", *SYNCHRONOUS),
    ),
    "num_trainers=2": (25, ("num_trainers=2",)),
}
"""For each run: its steps, and the keys that it changes."""
SEEDS = 4
WATCH_S = 0.5


@dataclass(frozen=True)
class Compared:
    """A real run beside its prediction."""

    run: Run
    twin: list[Prediction]
    """One prediction for each seed."""
    others: float
    """Cores that other programs used during the run's steps; the twin gets the others."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return statistics.fmean(each.step_s for each in self.twin)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.step_s / self.run.step_s() - 1


def folder_of(root: Path, case: str) -> Path:
    """Return the folder of a case's run."""
    return root / "".join(letter if letter.isalnum() else "_" for letter in case)


def run_case(root: Path, case: str) -> None:
    """Make one real run, and note what other programs used meanwhile.

    Of two runs of a case, the one beside which they used less is kept.
    """
    kept, (steps, keys) = folder_of(root, case), CASES[case]
    folder = kept.with_name("present")
    shutil.rmtree(folder, ignore_errors=True)
    command = [TUNE, "run", RECIPE, "--config", "tiny_async_grpo", f"output_dir={folder}"]
    process = subprocess.Popen(
        [*map(str, command), *COMMON, f"num_steps={steps}", *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    use: list[tuple[float, float, float]] = []
    watching = threading.Thread(target=_watch, args=(process, use), daemon=True)
    watching.start()
    output, _ = process.communicate()
    watching.join()
    if process.returncode:
        raise SystemExit(output)
    events = [json.loads(line) for line in (folder / "logs" / "events.jsonl").open()]
    ends = [event["time"] for event in events if event["event"] == "step"]
    inside = [each for each in use if ends[5] <= each[0] <= ends[-1]]
    (began, all_before, own_before), (ended, all_after, own_after) = inside[0], inside[-1]
    others = (all_after - all_before - own_after + own_before) / (ended - began)
    (folder / "others.json").write_text(json.dumps(max(0.0, others)))
    if not (kept / "others.json").exists() or others < others_of(root, case):
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)


def _watch(process: subprocess.Popen[str], use: list[tuple[float, float, float]]) -> None:
    """Note the time, the CPU seconds of the machine and those of a process's family."""
    of_process: dict[int, float] = {}
    while process.poll() is None:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        try:
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            for each in family:
                spent = each.cpu_times()
                of_process[each.pid] = spent.user + spent.system
        except psutil.Error:  # one of them has just ended
            pass
        use.append((time.time(), busy, sum(of_process.values())))
        time.sleep(WATCH_S)


def compare(root: Path, fitted: Recorded, case: str) -> Compared:
    """Predict a case's run."""
    run = Run(folder_of(root, case))
    setup = replace(run.setup, cores=cores_of(root, case, run))
    twin = [predict(fitted, setup, seed) for seed in range(SEEDS)]
    return Compared(run, twin, others_of(root, case))


def others_of(root: Path, case: str) -> float:
    """Return the cores that other programs used during a case's run."""
    return json.loads((folder_of(root, case) / "others.json").read_text())


def cores_of(root: Path, case: str, run: Run) -> float:
    """Return the cores that other programs left to a case's run."""
    return max(0.1, run.setup.cores - others_of(root, case))


def predict(fitted: Recorded, setup: Setup, seed: int) -> Prediction:
    """Run the twin of the fitted run with other settings."""
    return simulate(setup, fitted.times, fitted.lengths(setup, seed), seed=seed)


def table(compared: dict[str, Compared]) -> str:
    """Table of all runs, and the mean error of those that were not used to fit."""
    rows = []
    for case, each in compared.items():
        run, twin = each.run, each.twin
        rows.append(
            [
                case,
                f"{run.step_s():.3f}",
                f"{each.step_s:.3f}",
                f"{each.error:+.1%}",
                f"{run.staleness_mean:.2f} / {twin[0].staleness_mean:.2f}",
                f"{run.staleness_max} / {max(p.staleness_max for p in twin)}",
                f"{run.dropped('stale')} / {max(p.dropped['stale'] for p in twin)}",
                f"{each.others:.2f}",
            ]
        )
    head = ["run", "measured, s", "twin, s", "error", "staleness, mean", "max", "dropped", "others"]
    errors = [abs(each.error) for case, each in compared.items() if not case.startswith(FIT)]
    return (
        f"{markdown_table(head, rows)}\n\nMean error of the {len(errors)} runs that were not "
        f"fitted: {statistics.fmean(errors):.1%}, largest {max(errors):.1%}."
    )


def main() -> None:
    """Make the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the runs, kept")
    parser.add_argument(
        "--quiet",
        type=float,
        default=99.0,
        help="repeat a run beside which other programs used more cores than this",
    )
    parser.add_argument("--tries", type=int, default=3)
    given = parser.parse_args()
    for case in CASES:
        mark = folder_of(given.folder, case) / "others.json"
        for _ in range(given.tries):
            if mark.exists() and json.loads(mark.read_text()) <= given.quiet:
                break
            run_case(given.folder, case)
            sys.stderr.write(f"{case}: others used {mark.read_text()} cores\n")
    first = folder_of(given.folder, FIT)
    fitted = fit(first, cores_of(given.folder, FIT, Run(first)))
    compared = {case: compare(given.folder, fitted, case) for case in CASES}
    sys.stdout.write(f"{machine_line()}\n\n{table(compared)}\n")


if __name__ == "__main__":
    main()
