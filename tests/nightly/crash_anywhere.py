"""Kills and freezes roles of a run at random moments, run after run: `make nightly`.

    PYTHONPATH=tests python tests/nightly/crash_anywhere.py --runs 5 --faults 10 --seed 0

Every run has to complete, with receipts that the audit passes and a reward that is not worse than
an undisturbed run's within noise. Synchronous runs (every other one, and colocated ones) must
moreover train the very batches of an undisturbed one that is not colocated, bit for bit.
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

from lib.chaos import TUNE, Fault, forked_recipe

METHODS = {
    "generator_0": ("generate_group", "load_weights", "evaluate", "sleep"),
    "generator_1": ("generate_group", "load_weights", "evaluate", "sleep"),
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
KINDS = {
    "asynchronous": (),
    "synchronous": SYNCHRONOUS,
    "colocated": (*SYNCHRONOUS, "colocate=true"),
}


def random_faults(chance, count, kind):
    """Faults that are due at some call of a role, or up to half a second later."""
    faults = []
    for _ in range(count):
        role = chance.choice(sorted(METHODS))
        method = chance.choice([m for m in METHODS[role] if m != "sleep" or kind == "colocated"])
        rare = method in ("evaluate", "hold_state", "write_state")
        number = chance.randint(1, 3 if rare else NUM_STEPS)
        delay_s, stop = chance.choice((0.0, chance.uniform(0, 0.5))), chance.random() < 0.2
        faults.append(Fault(role, method, number, delay_s, stop))
    return faults


def run(folder, faults, kind):
    """One run with its audit; returns its output, its batches and its mean rewards by step."""
    folder.mkdir()
    recipe, environment = forked_recipe(folder, faults)
    output_dir = folder / "run"
    command = [TUNE, "run", recipe, "--config", "tiny_async_grpo", f"output_dir={output_dir}"]
    done = subprocess.run(
        [*map(str, command), *RUN, *KINDS[kind]],
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
    lines = [json.loads(line) for line in (output_dir / "logs" / "metrics.jsonl").open()]
    rewards = {line["step"]: line["rollout/reward_mean"] for line in lines if line["step"]}
    return done.stdout, batches, rewards


def late(rewards):
    """Mean reward of the last third of the steps, and its standard error."""
    last = [rewards[step] for step in sorted(rewards)[-NUM_STEPS // 3 :]]
    return statistics.mean(last), statistics.stdev(last) / len(last) ** 0.5


def recoveries(output):
    """(role, what befell it, seconds until it was back), from a run's output."""
    befallen, found = {}, []
    for line in output.splitlines():
        if told := re.match(r"(\w+) (died|sent no heartbeat|did not answer|failed)", line):
            whose = "trainers" if "restarting all trainers" in line else told[1]
            befallen.setdefault(whose, told[2])
        elif back := re.match(r"(?:the )?(\w+) (?:is|are) back after (\d+) s", line):
            role = back[1].partition("_")[0] if back[1][-1].isdigit() else back[1]
            found.append((role, befallen.pop(back[1]), int(back[2])))
    return found


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--faults", type=int, default=10, help="in each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="all runs; default: the first two")
    options = parser.parse_args()
    chance, recovered = random.Random(options.seed), defaultdict(list)
    struck, undisturbed = 0, {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(options.runs):
            kind = options.kind or list(KINDS)[number % 2]
            synchronous = kind != "asynchronous"
            compared = "synchronous" if synchronous else kind
            if compared not in undisturbed:
                undisturbed[compared] = run(Path(scratch) / compared, [], compared)[1:]
            faults = random_faults(chance, options.faults, kind)
            output, batches, rewards = run(Path(scratch) / f"{number}", faults, kind)
            expected_batches, expected_rewards = undisturbed[compared]
            if synchronous and batches != expected_batches:
                raise SystemExit(f"{faults}\n{output}\nother batches than an undisturbed run's")
            (reward, error), (expected, its_error) = late(rewards), late(expected_rewards)
            if reward < expected - 3 * (error**2 + its_error**2) ** 0.5:
                raise SystemExit(f"{faults}\n{output}\nreward {reward:.3f}, not {expected:.3f}")
            happened = output.count("chaos: ")
            struck += happened
            for role, what, seconds in recoveries(output):
                recovered[role, what].append(seconds)
            sys.stdout.write(
                f"run {number}, {kind}: {happened} faults, complete, audit passed, reward "
                f"{reward:.3f} (undisturbed {expected:.3f} +- {its_error:.3f})"
                f"{', the very batches' if synchronous else ''}\n"
            )
            sys.stdout.flush()
    for (role, what), seconds in sorted(recovered.items()):
        middle = statistics.median(seconds)
        sys.stdout.write(
            f"{role} {what}: back {len(seconds)} times, after {middle:g} s ({min(seconds)} to "
            f"{max(seconds)} s)\n"
        )
    sys.stdout.write(f"{struck} faults in {options.runs} runs; nothing was lost\n")


if __name__ == "__main__":
    main()
