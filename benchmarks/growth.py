"""Measure how CPU time grows: the driver's with the generators, that of tools with the steps.

    python benchmarks/growth.py --plot docs/results/growth.svg
        # --steps 100 1000 10000 --generators 1 8 64 256

The recipe's own loops run in this process, with a real ledger and receipts, and with roles that
answer at once: what is left is the driver's own work. Then the tools read these receipts and 60
metrics a step, each tool in a process of its own. Times are CPU seconds, of all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import machine_line, markdown_table

from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.records.receipts import Receipts
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary, pack
from grpo_tools.simulate.roles import VirtualRole
from grpo_tools.simulate.simulation import connected

GROUP_SIZE, STALENESS, TOKENS = 8, 2, 40
TOOLS = ("audit", "report", "diagnose")
CONFIG = "max_staleness: {}\ngroups_per_step: {}\ngroup_size: {}\nnum_steps: {}\n"


class Generator:
    """Stand-in that answers without delay, has room for two groups, and records their versions."""

    def __init__(self, versions: dict[int, int]) -> None:
        self.version, self._versions = 0, versions
        self._room = asyncio.Semaphore(2)

    async def reserve(self, patience_s: float) -> int:
        """Wait until another group may be sampled."""
        await self._room.acquire()
        return 1

    async def generate_group(
        self, prompt: Mapping[str, Any], epoch: int, group_id: int, *_: Any
    ) -> tuple[Any, GroupSummary, dict[str, Any]]:
        """Return a group without tokens."""
        await asyncio.sleep(0)
        self._room.release()
        self._versions[group_id] = self.version
        summary = GroupSummary(
            group_id=group_id,
            prompt_index=prompt["prompt_index"],
            rewards=[0.5] * GROUP_SIZE,
            successes=[True] * GROUP_SIZE,
            response_tokens=[TOKENS] * GROUP_SIZE,
            response_lengths=[TOKENS] * GROUP_SIZE,
            oldest_version=self.version,
            newest_version=self.version,
            finish_reasons=["stop"] * GROUP_SIZE,
            errors=[],
            reward_terms=[{}] * GROUP_SIZE,
            turns=[1] * GROUP_SIZE,
        )
        return pack([]), summary, {}

    async def load_weights(self, version: int, *buckets: Any) -> tuple[int, str, None]:
        """Set this generator's policy version to that of a push, which has no weights here."""
        self.version = version
        return version, snapshot_checksum(() for _ in buckets), None


class Trainer:
    """Stand-in that trains nothing, and only counts policy versions."""

    def __init__(self) -> None:
        self.version = 0

    async def train_step(self, *_: Any) -> StepResult:
        """Count one version more."""
        self.version += 1
        facts: dict[str, Any] = {"token_versions": {}, "token_logprobs": {}, "metrics": {}}
        facts |= {"trained_tokens": TOKENS, "skipped_because": ""}
        return StepResult(policy_version=self.version, **facts)

    async def gather_weights(self) -> int:
        """Return the version."""
        return self.version

    async def export_weights(self, version: int) -> tuple[None, tuple[()]]:
        """Export nothing."""
        return None, ()


class Run:
    """Stand-in for the product's `Run`: only records the outcome and the metrics of each step."""

    def __init__(self, folder: Path, ledger: Ledger, versions: dict[int, int]) -> None:
        self._ledger, self._versions, self._random = ledger, versions, random.Random(0)
        (folder / "logs").mkdir(parents=True)
        self._metrics = (folder / "logs" / "metrics.jsonl").open("w")

    async def restore(self) -> None:
        """Do nothing: there is nothing to restore."""

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Do nothing: there is nothing to begin."""

    def has_trainable(self, group: Any) -> bool:
        """Return True: every group can be trained."""
        return True

    async def finish_step(self, batch: Any, advantages: Any, result: StepResult) -> None:
        """Tell the ledger what became of the step's tokens, and write the step's metrics."""
        ledger, of_group = self._ledger, GROUP_SIZE * TOKENS
        groups = [entry.group_id for entry in batch.entries]
        counts: Counter[str] = Counter()
        for group in groups:
            counts[str(self._versions.pop(group))] += of_group
        outcome = {
            "token_versions": dict(counts),
            "batch_hash": f"hash {ledger.steps_done}",
            "correction_mass": 1.0,
        }
        outcome |= {"tokens": {str(group): {"trained": of_group} for group in groups}}
        ledger.finish_step(result.policy_version, outcome)
        found = {f"own/metric_{n}": self._random.random() for n in range(60)}
        found |= {"rollout/reward_mean": 0.5, "rollout/trained_tokens": counts.total()}
        step = {"step": ledger.steps_done, "attempt": 0, "policy_version": result.policy_version}
        self._metrics.write(json.dumps({**step, **found}) + "\n")

    async def finish(self) -> None:
        """Close the metrics."""
        self._metrics.close()


def drive(folder: Path, generators: int, groups_per_step: int, steps: int) -> tuple[float, int]:
    """Run the recipe's loops with stand-ins; return CPU seconds, and the ledger's event count."""
    contract = StalenessContract(STALENESS, groups_per_step)
    prompts = (({"prompt_index": number}, 0) for number in itertools.count())
    ledger = Ledger(contract, steps, prompts)
    ledger.events, events = EventOrder(), list[Any]()
    ledger.events.listen(events.append)
    versions: dict[int, int] = {}
    run = Run(folder, ledger, versions)
    settings = {"max_staleness": STALENESS, "groups_per_step": groups_per_step}
    settings |= {"group_size": GROUP_SIZE, "cpus": 2, "libraries": {}}
    receipts = Receipts(folder / "receipts.jsonl", ledger, settings)
    (folder / "config.yaml").write_text(
        CONFIG.format(STALENESS, groups_per_step, GROUP_SIZE, steps)
    )
    targets = {
        "generator": [Generator(versions) for _ in range(generators)],
        "trainer": [Trainer()],
        "reference": [],
        "replay_buffer": [ReplayBuffer(contract=contract, timeout_s=60)],
        "parameter_server": [VLLMParameterServer()],
    }
    roles = {
        name: [VirtualRole(f"{name}_{n}", each) for n, each in enumerate(family)]
        for name, family in targets.items()
    }
    recipe = connected(ledger, roles, run, groups_per_step, "wait", 1, 1)
    began = time.process_time()
    asyncio.run(recipe.loops())
    spent = time.process_time() - began
    receipts.close()
    return spent, len(events)


def read(tool: str, folder: Path) -> float:
    """Run one of the tools on a run's folder; return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "grpo_tools", tool, str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def plot(panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Draw panels side by side as an SVG, each with named curves and both axes logarithmic."""
    style = "text{font:12px sans-serif;fill:#656d76}path{fill:none;stroke:#1f6feb}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 250"><style>{style}</style>'
    ]
    for number, (title, curves) in enumerate(panels.items()):
        values = [(math.log(x), math.log(y)) for curve in curves.values() for x, y in curve]
        (x0, x1), (y0, y1) = ((min(of), max(of)) for of in zip(*values, strict=True))
        y0 = min(y0, y1 - math.log(100))  # two decades at least
        left, width, bottom, height = 50 + 410 * number, 240, 210, 160

        def at(x: float, y: float) -> tuple[float, float]:
            right = (math.log(x) - x0) / (x1 - x0) * width  # noqa: B023 -- called in this turn
            up = (math.log(y) - y0) / (y1 - y0) * height  # noqa: B023
            return round(left + right, 1), round(bottom - up, 1)  # noqa: B023

        parts.append(f'<text x="{left - 40}" y="24">{title}</text>')
        for name, curve in curves.items():
            points = [at(x, y) for x, y in curve]
            parts.append(f'<path d="M{" L".join(f"{x} {y}" for x, y in points)}"/>')
            parts += [
                f'<text x="{x - 8}" y="{y - 6}">{value:g}</text>'
                for (x, y), (_, value) in zip(points, curve, strict=True)
            ]
            parts.append(f'<text x="{points[-1][0] + 20}" y="{points[-1][1] + 4}">{name}</text>')
        parts += [
            f'<text x="{at(x, curve[0][1])[0] - 8}" y="{bottom + 24}">{x:,}</text>'
            for x, _ in curve
        ]
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Measure, print the tables, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generators", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--plot", type=Path, help="SVG file to write")
    args = parser.parse_args()
    driver, tools = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for number in args.generators:
            per_step = max(8, 2 * number)
            steps = 4096 // per_step
            spent, events = drive(Path(scratch, f"driver {number}"), number, per_step, steps)
            groups = per_step * steps
            row = f"{spent / groups * 1e3:.2f}", f"{spent / events * 1e6:.0f}"
            driver.append([number, per_step, groups, *row])
        for steps in args.steps:
            folder = Path(scratch, f"tools {steps}")
            drive(folder, 2, 4, steps)
            tools.append([steps, *(f"{read(tool, folder):.2f}" for tool in TOOLS)])
    head = ["generators", "groups per step", "groups", "CPU ms per group", "CPU us per event"]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, driver)}\n\n")
    head = ["steps", *(f"CPU s of `grpo {tool}`" for tool in TOOLS)]
    sys.stdout.write(f"{markdown_table(head, tools)}\n")
    if args.plot is not None:
        per_group = [(row[0], float(row[3])) for row in driver]
        by_tool = {
            f"grpo {tool}": [(row[0], float(row[number])) for row in tools]
            for number, tool in enumerate(TOOLS, start=1)
        }
        panels = {
            "CPU ms of the driver per group, by number of generators": {"driver": per_group},
            "CPU s of a tool, by steps of the run": by_tool,
        }
        args.plot.write_text(plot(panels))


if __name__ == "__main__":
    main()
