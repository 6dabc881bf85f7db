"""Runs the recipe's own loops in virtual time, with stand-ins for generators and trainers."""

from __future__ import annotations

import asyncio
import itertools
import random
import runpy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from grpo_components._plugin import recipes_folder
from grpo_components._tune_run import RECIPE
from grpo_components.cluster.batch import Batch
from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    ReferencesHandle,
    ReplayBufferHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import Settings, Timeouts
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary
from grpo_tools.simulate.fit import WARM_UP_STEPS, Lengths, Times
from grpo_tools.simulate.roles import (
    VirtualGenerator,
    VirtualReference,
    VirtualRole,
    VirtualTrainer,
)
from grpo_tools.simulate.virtual_time import now, run_in_virtual_time

_PATIENCE_S = 1e9
"""Time-outs of the virtual run, in virtual seconds."""


@dataclass
class Prediction:
    """What a run did in virtual time; means are over the steps after `WARM_UP_STEPS`."""

    step_s: float
    """Mean seconds from the end of one step to the end of the next."""
    samples_per_s: float
    """Trained responses per second."""
    staleness_mean: float
    staleness_max: int
    dropped: Counter[str]
    """Dropped groups by reason, of the whole run."""
    idle: dict[str, float]
    """Kind of role -> share of the time in which it does nothing, averaged over its processes."""


@cache
def _recipe_class() -> Any:
    path = recipes_folder() / f"{RECIPE}.py"
    return runpy.run_path(str(path))["AsyncGRPOFullFinetuneRecipeDistributed"]


def connected(
    ledger: Ledger,
    roles: Mapping[str, Sequence[Any]],
    run: Any,
    groups_per_step: int,
    stale_groups: str,
    push_every_n_steps: int,
    pull_every_m_rollouts: int,
) -> Any:
    """Build the recipe on given roles (kind -> roles); `run` replaces `Run`, which logs and saves.

    Trainers get the response lengths in place of advantages: step times depend on lengths.
    """
    recipe = _recipe_class()()
    limits = Timeouts.model_construct(None, **dict.fromkeys(Timeouts.model_fields, _PATIENCE_S))
    recipe.ledger, recipe.run, recipe.groups_per_step = ledger, run, groups_per_step
    recipe.timeouts, recipe.publish_s = limits, _PATIENCE_S
    recipe.temperature = lambda step: 1.0
    recipe.reward_shaping = lambda batch, step: batch.response_lengths
    recipe.advantages = lambda lengths: lengths
    recipe.dynamic_sampling = None
    buffer, references = roles["replay_buffer"][0], roles["reference"]
    waits = stale_groups == "wait"
    trainers = TrainersHandle(roles["trainer"], ledger, limits)
    recipe.roles = Roles(
        generators=[GeneratorHandle(role, ledger, limits) for role in roles["generator"]],
        buffer=ReplayBufferHandle(buffer, ledger, limits, wait_for_stale=waits),
        trainers=trainers,
        server=ParameterServerHandle(roles["parameter_server"][0], trainers, limits),
        references=ReferencesHandle(references, limits) if references else None,
        reward_model=None,
    )
    recipe.weights = WeightSync(
        ledger,
        recipe.roles,
        push_every_n_steps=push_every_n_steps,
        pull_every_m_rollouts=pull_every_m_rollouts,
        push_early=lambda step: False,
    )
    return recipe


def simulate(
    setup: Settings, times: Times, lengths: Lengths, *, seed: int = 0, filtered: float = 0.0
) -> Prediction:
    """Simulate a run in virtual time; dynamic sampling discards the share `filtered` of groups."""
    return run_in_virtual_time(_Simulation(setup, times, lengths, seed, filtered).run())


class _Simulation:
    """Sets up and runs a virtual run; stands in for the recipe's `Run`, which its loops call."""

    def __init__(
        self, setup: Settings, times: Times, lengths: Lengths, seed: int, filtered: float
    ) -> None:
        self._setup = setup
        contract = StalenessContract(setup.max_staleness, setup.groups_per_step)
        prompts = (({"prompt_index": number}, 0) for number in itertools.count())
        self._ledger = Ledger(contract, setup.num_steps, prompts)
        self._versions: dict[int, Counter[int]] = {}
        self._oldest = 0
        self._staleness: Counter[int] = Counter()
        self._marks: list[tuple[float, dict[str, float]]] = []
        """Time, and busy seconds of each kind of role, at the end of the warm-up and of the run."""
        generators = [
            VirtualGenerator(setup, times, lengths, self._versions)
            for _ in range(setup.num_generators)
        ]
        trainers = [VirtualTrainer(setup, times, seed) for _ in range(setup.num_trainers)]
        references = [VirtualReference(setup, times, lengths) for _ in range(setup.num_references)]
        self._engines = [generator.engine for generator in generators]
        self._workers = {
            "generators": self._engines,
            "trainers": trainers,
            "references": references,
        }
        families = {
            "generator": generators,
            "trainer": trainers,
            "reference": references,
            "replay_buffer": [ReplayBuffer(contract=contract, timeout_s=_PATIENCE_S)],
            "parameter_server": [VLLMParameterServer()],
        }
        roles = {
            family: [VirtualRole(f"{family}_{n}", target) for n, target in enumerate(targets)]
            for family, targets in families.items()
        }
        every = setup.push_every_n_steps, setup.pull_every_m_rollouts
        knobs = setup.groups_per_step, setup.stale_groups, *every
        self._recipe = connected(self._ledger, roles, self, *knobs)
        if filtered:
            draw = random.Random(f"{seed} filter")
            keeps = SimpleNamespace(keeps=lambda *group: draw.random() >= filtered)
            self._recipe.dynamic_sampling = keeps

    async def run(self) -> Prediction:
        """Run the recipe's loops to their end; return what happened."""
        engines = [asyncio.create_task(engine.run()) for engine in self._engines]
        await self._recipe.loops()
        for engine in engines:
            engine.cancel()
        setup, ages = self._setup, self._staleness
        (begin, before), (end, after) = self._marks
        step_s = (end - begin) / (setup.num_steps - WARM_UP_STEPS)
        return Prediction(
            step_s=step_s,
            samples_per_s=setup.groups_per_step * setup.group_size / step_s,
            staleness_mean=sum(age * tokens for age, tokens in ages.items()) / ages.total(),
            staleness_max=self._oldest,
            dropped=self._ledger.dropped_groups,
            idle={name: 1 - (after[name] - before[name]) / (end - begin) for name in after},
        )

    async def restore(self) -> None:
        """Do nothing: there is nothing to restore."""

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Do nothing: no evaluation comes before the first step."""

    def has_trainable(self, entry: LedgerEntry, summary: GroupSummary) -> bool:
        """Return True: every group can be trained."""
        return True

    async def finish_step(self, batch: Batch, advantages: NDArray[Any], result: StepResult) -> None:
        """Commit a step, and note the staleness of its tokens."""
        trained_from = self._ledger.policy_version
        self._ledger.finish_step(result.policy_version)
        done = self._ledger.steps_done
        for entry in batch.entries:
            versions = self._versions.pop(entry.group_id)
            self._oldest = max(self._oldest, trained_from - min(versions))
            if done > WARM_UP_STEPS:
                for version, tokens in versions.items():
                    self._staleness[trained_from - version] += tokens
        if done in (WARM_UP_STEPS, self._setup.num_steps):
            busy = {
                family: fmean(each.busy.seconds() for each in workers)
                for family, workers in self._workers.items()
                if workers
            }
            self._marks.append((now(), busy))

    async def finish(self) -> None:
        """Do nothing: nothing is left to write."""
