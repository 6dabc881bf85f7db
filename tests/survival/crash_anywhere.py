"""Kills and freezes roles of a run at random moments, run after run: `make crash-anywhere`.

    python tests/survival/crash_anywhere.py --runs 5 --faults 10 --seed 0

Every run has to complete, with receipts that the audit passes. Synchronous runs (every other one)
must moreover train the very batches of an undisturbed run, bit for bit.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from chaos import TUNE, Fault, forked_recipe

METHODS = {
    "generator_0": ("generate_group", "load_weights", "evaluate"),
    "generator_1": ("generate_group", "load_weights", "evaluate"),
    "reference_0": ("add_logprobs",),
    "replay_buffer": ("add", "take", "write_state"),
    "parameter_server": ("push", "newest", "acknowledge"),
    "trainer_0": ("train_step", "gather_weights", "export_weights", "hold_state", "write_state"),
    "trainer_1": ("train_step", "gather_weights", "export_weights", "hold_state", "write_state"),
}
NUM_STEPS = 30
RUN = (
    *("groups_per_step=4", "group_size=4", "eval_dataset.num_rows=16", "loss.kl_coeff=0.001"),
    *(f"num_steps={NUM_STEPS}", "num_generators=2", "num_trainers=2", "rollouts_in_flight=4"),
    *("save_every_n_steps=4", "eval_every_n_steps=10", "max_restarts=1000"),
    "timeouts.heartbeat_s=10",
)
SYNCHRONOUS = ("max_staleness=0", "pull_every_m_rollouts=1")


def random_faults(chance, count):
    """Faults that are due at some call of a role, or up to half a second later."""
    faults = []
    for _ in range(count):
        role = chance.choice(sorted(METHODS))
        method = chance.choice(METHODS[role])
        rare = method in ("evaluate", "hold_state", "write_state")
        number = chance.randint(1, 3 if rare else NUM_STEPS)
        delay_s, stop = chance.choice((0.0, chance.uniform(0, 0.5))), chance.random() < 0.2
        faults.append(Fault(role, method, number, delay_s, stop))
    return faults


def run(folder, faults, synchronous):
    """One run with its audit; returns its output and its batches by step."""
    folder.mkdir()
    recipe, environment = forked_recipe(folder, faults)
    output_dir = folder / "run"
    command = [TUNE, "run", recipe, "--config", "tiny_async_grpo", f"output_dir={output_dir}"]
    done = subprocess.run(
        [*map(str, command), *RUN, *(SYNCHRONOUS if synchronous else ())],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{faults}\n{done.stdout}\nthe run ended with {done.returncode}")
    audit = [sys.executable, "-m", "grpo_components.audit", str(output_dir)]
    table = subprocess.run(audit, capture_output=True, text=True, check=False)
    if table.returncode != 0:
        raise SystemExit(f"{faults}\n{done.stdout}\n{table.stdout}")
    receipts = [json.loads(line) for line in (output_dir / "receipts.jsonl").open()]
    batches = {r["step"]: r["batch_hash"] for r in receipts if r["record"] == "step"}
    assert sorted(batches) == list(range(1, NUM_STEPS + 1))
    return done.stdout, batches


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--faults", type=int, default=10, help="in each run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, recovered = random.Random(options.seed), defaultdict(list)
    struck, undisturbed = 0, None
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.runs):
            synchronous = number % 2 == 1
            if synchronous and undisturbed is None:
                undisturbed = run(Path(scratch) / "undisturbed", [], synchronous=True)[1]
            faults = random_faults(chance, options.faults)
            output, batches = run(Path(scratch) / f"{number}", faults, synchronous)
            if synchronous and batches != undisturbed:
                raise SystemExit(f"{faults}\n{output}\nother batches than an undisturbed run's")
            happened = output.count("chaos: ")
            struck += happened
            for role, seconds in re.findall(r"(\w+) (?:is|are) back after (\d+) s", output, re.M):
                recovered[role].append(int(seconds))
            kind = "synchronous" if synchronous else "asynchronous"
            sys.stdout.write(f"run {number}, {kind}: {happened} faults, complete, audit passed\n")
            sys.stdout.flush()
    for role, seconds in sorted(recovered.items()):
        middle = statistics.median(seconds)
        sys.stdout.write(
            f"{role}: back {len(seconds)} times, after {middle:g} s ({min(seconds)} to "
            f"{max(seconds)} s)\n"
        )
    sys.stdout.write(f"{struck} faults in {options.runs} runs; nothing was lost\n")


if __name__ == "__main__":
    main()
