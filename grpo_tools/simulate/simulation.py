"""Runs the recipe's own loops in virtual time, with stand-ins for generators and trainers."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from numpy.typing import NDArray

from grpo_components._plugin import recipes_folder
from grpo_components._tune_run import RECIPE
from grpo_components.cluster.batch import Batch, Group
from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    ReferencesHandle,
    ReplayBufferHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.exchange.event_order import Event, EventOrder
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.training.step_result import StepResult
from grpo_tools.simulate.engine import VirtualEngine
from grpo_tools.simulate.roles import (
    VirtualGenerator,
    VirtualReference,
    VirtualRole,
    VirtualTrainer,
)
from grpo_tools.simulate.settings import Setup
from grpo_tools.simulate.times import Lengths, Times
from grpo_tools.simulate.virtual_time import run_in_virtual_time

WARM_UP_STEPS = 5
"""Steps that no mean counts, of a recorded run and of a simulation: the pipeline fills."""
_PATIENCE_S = 1e9
"""Time-outs of the virtual run, in virtual seconds."""


@dataclass
class Prediction:
    """What a run did in virtual time; means are over the steps after `WARM_UP_STEPS`."""

    step_s: float = 0.0
    """Mean seconds from the end of one step to the end of the next."""
    staleness_mean: float = 0.0
    staleness_max: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Dropped groups by reason, of the whole run."""
    idle: dict[str, float] = field(default_factory=dict)
    """Share of the time in which a role does nothing, mean over the roles of a family."""
    samples_per_s: float = 0.0
    """Trained responses per second."""
    events: list[tuple[float, Event]] = field(default_factory=list)
    """All events of the run, each with its virtual time."""


@lru_cache(maxsize=1)
def _recipe_class() -> Any:
    """Return the installed recipe's class."""
    path = recipes_folder() / f"{RECIPE}.py"
    spec = importlib.util.spec_from_file_location("simulated_recipe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AsyncGRPOFullFinetuneRecipeDistributed


def connected(
    ledger: Ledger,
    roles: Mapping[str, Sequence[Any]],
    run: Any,
    groups_per_step: int,
    stale_groups: str,
    push_every_n_steps: int,
    pull_every_m_rollouts: int,
) -> Any:
    """Return the recipe, whose loops call the given roles, by family; `run` stands in for `Run`.

    Its trainers get the lengths of the responses in place of advantages.
    """
    recipe, limit = _recipe_class()(), _PATIENCE_S
    recipe.ledger, recipe.run, recipe.groups_per_step = ledger, run, groups_per_step
    recipe.timeouts = SimpleNamespace(train_step_s=limit)
    recipe.temperature = lambda step: 1.0
    recipe.reward_shaping = lambda batch, step: batch.response_lengths
    recipe.advantages = lambda lengths: lengths
    recipe.dynamic_sampling = None
    buffer, references, waits = (
        roles["replay_buffer"][0],
        roles["reference"],
        stale_groups == "wait",
    )
    recipe.roles = Roles(
        generators=[GeneratorHandle(role, ledger, limit, limit) for role in roles["generator"]],
        buffer=ReplayBufferHandle(buffer, ledger, limit, limit, wait_for_stale=waits),
        trainers=TrainersHandle(roles["trainer"], ledger, limit, limit),
        server=ParameterServerHandle(roles["parameter_server"][0], limit),
        references=ReferencesHandle(references, limit) if references else None,
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
    setup: Setup,
    times: Times,
    lengths: Lengths,
    *,
    seed: int = 0,
    filtered: float = 0.0,
) -> Prediction:
    """Run a job in virtual time."""
    return run_in_virtual_time(_Simulation(setup, times, lengths, seed, filtered).run())


class _Simulation:
    def __init__(
        self, setup: Setup, times: Times, lengths: Lengths, seed: int, filtered: float
    ) -> None:
        self._setup, self._times, self._lengths, self._seed = setup, times, lengths, seed
        self._filtered = filtered
        self._versions: dict[int, Counter[int]] = {}
        self._prediction = Prediction()
        self._staleness: Counter[int] = Counter()
        self._marks: list[tuple[float, dict[str, float]]] = []
        """Time and busy seconds of each role, at the end of the warm-up and of the run."""

    async def run(self) -> Prediction:
        setup, loop = self._setup, asyncio.get_running_loop()
        contract = StalenessContract(setup.max_staleness, setup.groups_per_step)
        prompts = (({"prompt_index": number}, 0) for number in itertools.count())
        self._ledger = Ledger(contract, setup.num_steps, prompts)

        def note(event: Event) -> None:
            self._prediction.events.append((loop.time(), event))

        self._ledger.events = EventOrder(listeners=[note])
        every = setup.push_every_n_steps, setup.pull_every_m_rollouts
        knobs = setup.groups_per_step, setup.stale_groups, *every
        recipe = connected(self._ledger, self._roles(contract), self, *knobs)
        if self._filtered:
            draw = random.Random(f"{self._seed} filter")
            keeps = SimpleNamespace(keeps=lambda *given: draw.random() >= self._filtered)
            recipe.dynamic_sampling = keeps
        engines = [asyncio.create_task(engine.run()) for engine in self._engines]
        await recipe.loops()
        for engine in engines:
            engine.cancel()
        return self._measured()

    def _roles(self, contract: StalenessContract) -> dict[str, list[VirtualRole]]:
        setup, times = self._setup, self._times
        size, ranks = setup.group_size, setup.num_trainers
        self._engines = [
            VirtualEngine(times.engine_step, times.load_s, setup.max_num_seqs)
            for _ in range(setup.num_generators)
        ]
        self._trainers = [VirtualTrainer(times, size, ranks, self._seed) for _ in range(ranks)]
        self._references = [
            VirtualReference(times, size, self._lengths) for _ in range(setup.num_references)
        ]
        families = {
            "generator": [
                VirtualGenerator(
                    engine, times, self._lengths, size, setup.rollouts_in_flight, self._versions
                )
                for engine in self._engines
            ],
            "trainer": self._trainers,
            "reference": self._references,
            "replay_buffer": [ReplayBuffer(contract=contract, timeout_s=_PATIENCE_S)],
            "parameter_server": [VLLMParameterServer()],
        }
        return {
            family: [VirtualRole(f"{family}_{n}", target) for n, target in enumerate(targets)]
            for family, targets in families.items()
        }

    # What the loops call of `Run`.

    async def restore(self) -> None:
        """Nothing to restore."""

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """No evaluation before the first step."""

    def has_trainable(self, group: Group) -> bool:
        """Every group can be trained."""
        return True

    async def finish_step(self, batch: Batch, advantages: NDArray[Any], result: StepResult) -> None:
        """Commit a step, and note the staleness of its tokens."""
        trained_from = self._ledger.policy_version
        self._ledger.finish_step(result.policy_version)
        done = self._ledger.steps_done
        for entry in batch.entries:
            versions = self._versions.pop(entry.group_id)
            oldest = trained_from - min(versions)
            self._prediction.staleness_max = max(self._prediction.staleness_max, oldest)
            if done > WARM_UP_STEPS:
                for version, tokens in versions.items():
                    self._staleness[trained_from - version] += tokens
        if done in (WARM_UP_STEPS, self._setup.num_steps):
            self._marks.append((asyncio.get_running_loop().time(), self._busy()))

    async def finish(self) -> None:
        """Nothing is left to write."""

    def _busy(self) -> dict[str, float]:
        families = {
            "generators": [each.busy.seconds() for each in self._engines],
            "trainers": [each.busy.seconds() for each in self._trainers],
            "references": [each.busy.seconds() for each in self._references],
        }
        return {name: sum(busy) / len(busy) for name, busy in families.items() if busy}

    def _measured(self) -> Prediction:
        found, setup = self._prediction, self._setup
        (begin, before), (end, after) = self._marks
        steps = setup.num_steps - WARM_UP_STEPS
        found.step_s = (end - begin) / steps
        found.idle = {name: 1 - (after[name] - before[name]) / (end - begin) for name in after}
        tokens = sum(self._staleness.values())
        found.staleness_mean = sum(age * n for age, n in self._staleness.items()) / tokens
        found.dropped = self._ledger.dropped_groups
        found.samples_per_s = setup.groups_per_step * setup.group_size / found.step_s
        return found
