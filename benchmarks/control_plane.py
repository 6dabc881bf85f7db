"""Measure how many groups per second the driver can handle, with roles that answer at once.

    python benchmarks/control_plane.py                 # the whole driver, on Ray
    python benchmarks/control_plane.py --virtual       # 4 to 256 generators, in virtual time

The whole driver is the recipe with its ledger, event log, receipts, metrics and display; only
generators and trainers are stand-ins. `--profile` shows what its process spends its time on.
In virtual time, an assumed job grows with its generators, and each call takes `--call-ms` of the
driver: the table shows from where on the driver makes the step longer.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import importlib.util
import json
import pstats
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from measuring import machine_line, markdown_table
from omegaconf import OmegaConf

import grpo_components.config.start_roles as start_roles
from grpo_components._plugin import recipes_folder
from grpo_tools.simulate.engine import StepTime
from grpo_tools.simulate.settings import Setup
from grpo_tools.simulate.simulation import simulate
from grpo_tools.simulate.times import Lengths, Times

RECIPE = "async_grpo_full_finetune_distributed"
ASSUMED = Times(
    engine_step=StepTime(0.010, 0.00005, 0.0006),
    collect_s=0.0,
    reward_s=0.0,
    load_s=0.2,
    update_s=0.3,
    train_s_per_token=2e-5,
    train_scatter=(1.0,),
    prompt_tokens=200.0,
    gather_s=0.5,
    export_s=0.5,
    reference_s_per_token=0.0,
    call_s=0.0,
)
"""Times of no real job, in seconds: a step of about 6 s, whatever its number of generators."""
LENGTHS = Lengths([[300, 350, 400, 500, 600, 900, 1200, 400]], seed=0)
SIZES = ((4, 1), (16, 4), (64, 16), (256, 64))
"""Generators and trainers; a step has two groups for each generator."""
WARM_UP = 0.2
"""Share of the steps that no figure counts."""


def load_recipe() -> ModuleType:
    """Import the recipe's file."""
    path = recipes_folder() / f"{RECIPE}.py"
    spec = importlib.util.spec_from_file_location(RECIPE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(folder: Path, given: argparse.Namespace) -> Any:
    """Return the demo's config with the benchmark's sizes."""
    config = OmegaConf.load(recipes_folder() / "configs" / "tiny_async_grpo.yaml")
    changes = {
        "output_dir": str(folder),
        "num_steps": given.steps,
        "groups_per_step": given.groups,
        "rollouts_in_flight": given.groups,
        "num_generators": given.generators,
        "num_trainers": given.trainers,
        "eval_dataset": {"num_rows": 1},
        "eval_every_n_steps": given.steps,
        "save_every_n_steps": 10 * given.steps,
        "max_generator_kl": 1.0,
    }
    return OmegaConf.merge(config, changes)


def whole_driver(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Run the recipe with instant roles."""
    start_roles.GENERATOR = "instant_roles.InstantGenerator"
    start_roles.TRAINER = "instant_roles.InstantTrainer"
    recipe = load_recipe().AsyncGRPOFullFinetuneRecipeDistributed()
    profile = cProfile.Profile() if given.profile else None
    marks: list[tuple[float, float, int]] = []

    def mark(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            marks.append((time.perf_counter(), time.process_time(), event["step"]))

    try:
        recipe.setup(config_of(folder, given))
        recipe.ledger.events.listen(mark)
        if profile:
            profile.enable()
        asyncio.run(recipe.train())
        if profile:
            profile.disable()
    finally:
        recipe.cleanup()
    if profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(45)
    first, last = marks[max(1, int(WARM_UP * given.steps)) - 1], marks[-2]
    all_groups = given.steps * given.groups
    groups = (last[2] - first[2]) * given.groups
    wall_s, cpu_s = last[0] - first[0], last[1] - first[1]
    of_roles = role_cpu_s(folder / "logs" / "heartbeats.jsonl")
    return {
        "groups per second": groups / wall_s,
        "driver CPU, ms per group": 1000 * cpu_s / groups,
        "driver CPU, ms per step": 1000 * cpu_s * given.groups / groups,
        "driver, cores": cpu_s / wall_s,
    } | {f"{role} CPU, ms per group": 1000 * spent / all_groups for role, spent in of_roles.items()}


def role_cpu_s(heartbeats: Path) -> dict[str, float]:
    """Return the CPU seconds of each role's process since it was built, by role."""
    spent = {}
    for beat in map(json.loads, heartbeats.open()):
        if "cpu_seconds" in beat:
            of_activities = beat["cpu_seconds"].items()
            spent[beat["role"]] = sum(s for activity, s in of_activities if activity != "starting")
    return spent


def virtual(call_s: float) -> str:
    """Table of the assumed job at all sizes, with calls that take no time, and that take some."""
    rows = []
    for generators, trainers in SIZES:
        setup = Setup(
            num_generators=generators,
            num_trainers=trainers,
            num_references=0,
            rollouts_in_flight=4,
            push_every_n_steps=1,
            pull_every_m_rollouts=4,
            max_staleness=2,
            stale_groups="drop",
            groups_per_step=2 * generators,
            group_size=8,
            num_steps=10,
            max_response_tokens=2000,
            max_num_seqs=1024,
            device="cuda",
        )
        free, real = (
            simulate(setup, replace(ASSUMED, call_s=each), LENGTHS) for each in (0.0, call_s)
        )
        rows.append(
            [
                f"{generators} : {trainers}",
                f"{free.step_s:.2f}",
                f"{real.step_s:.2f}",
                f"{real.samples_per_s / setup.group_size:.1f}",
                f"{1 - real.idle['driver']:.1%}",
            ]
        )
    head = ["generators : trainers", "step, s, free calls", "step, s", "groups/s", "driver busy"]
    return markdown_table(head, rows)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=64, help="groups per step")
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--virtual", action="store_true", help="the assumed job in virtual time")
    parser.add_argument("--call-ms", type=float, default=0.6, help="driver's CPU for each call")
    given = parser.parse_args()
    if given.virtual:
        sys.stdout.write(f"{virtual(given.call_ms / 1000)}\n")
        return
    found = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            found.append(whole_driver(Path(folder) / "run", given))
    rows = [[f"{name}", *(f"{each[name]:.3g}" for each in found)] for name in found[0]]
    head = ["", *(f"run {number}" for number in range(1, len(found) + 1))]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, rows)}\n")
    sys.stdout.write(json.dumps(vars(given)) + "\n")


if __name__ == "__main__":
    main()
