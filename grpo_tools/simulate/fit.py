"""Fits the times of a simulation to the files of one finished run."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from grpo_components.config.reading import merge_overrides, read_settings
from grpo_components.errors import fail
from grpo_components.files import Record, records_of
from grpo_components.rollout.engine_use import NO_REWARD
from grpo_components.settings import Settings


@dataclass(frozen=True)
class Times:
    """Durations of the parts of a run, in seconds, fitted to one recorded run."""

    step_s: float
    """Fixed part of every engine step."""
    step_s_per_sequence: float
    step_s_per_prompt: float
    """Part of an engine step for each prompt that it reads."""
    update_s: float
    """Fixed part of a training step: the optimizer."""
    train_s_per_token: float
    """Part of a training step for each token of prompts and responses."""
    train_scatter: tuple[float, ...]
    """Ratio of recorded to fitted seconds for each training step, scaled to a mean of 1."""
    collect_s: float
    """A generator's work for each response outside the engine: environment, packing."""
    reward_s: float
    """From a group's last token to its last reward, without the work that `collect_s` counts."""
    load_s: float
    """Swap of an engine's weights."""
    prompt_tokens: float
    """Mean tokens of a prompt; trainer and reference compute a group's prompt once."""
    gather_s: float
    """Gather of the weights for a push."""
    export_s: float
    """Packing of the weights for a push, while the next training step runs."""
    reference_s_per_token: float
    """A reference's seconds for each token of prompts and responses."""

    def engine_step(self, sequences: int, prompts: float = 0) -> float:
        """Return the seconds of an engine step with these numbers of sequences and new prompts."""
        per_sequence = self.step_s_per_sequence * sequences
        return self.step_s + per_sequence + self.step_s_per_prompt * prompts

    def train(self, response_tokens: int, groups: float, ranks: int) -> float:
        """Return the seconds of a training step whose tokens are divided among `ranks` trainers."""
        tokens = response_tokens + groups * self.prompt_tokens
        return self.update_s + self.train_s_per_token * tokens / ranks

    def reference(self, response_tokens: float) -> float:
        """Return the seconds that a reference takes for the logprobs of a group."""
        return self.reference_s_per_token * (response_tokens + self.prompt_tokens)


class Lengths:
    """Draws a group's response lengths (tokens) from a random recorded group, cut at `longest`.

    A group id gives the same lengths in every simulation, so that simulations can be compared.
    """

    def __init__(self, groups: Sequence[Sequence[int]], longest: int, seed: int) -> None:
        self._seed = seed
        self._groups = [[max(1, min(tokens, longest)) for tokens in group] for group in groups]
        self.mean = statistics.fmean(tokens for group in self._groups for tokens in group)

    def of_group(self, group_id: int, size: int) -> list[int]:
        """Return the lengths of the `size` responses of a group, in tokens."""
        draw = random.Random(f"{self._seed} {group_id}")
        recorded = draw.choice(self._groups)
        if size <= len(recorded):
            return draw.sample(recorded, size)
        return draw.choices(recorded, k=size)


WARM_UP_STEPS = 5
"""Number of first steps that are left out of means, because the pipeline is still filling."""
SIMULATED = (
    *("num_generators", "num_trainers", "num_references", "rollouts_in_flight"),
    *("push_every_n_steps", "pull_every_m_rollouts", "max_staleness", "stale_groups"),
    *("groups_per_step", "group_size", "num_steps"),
    *("generator.max_response_tokens", "generator.max_num_seqs"),
)
"""Keys of a config that a simulation can change: they decide how the roles work together."""
_NOT_SIMULATED = ("colocate", "teacher", "replay_generation", "train_from", "rollout_only")


@dataclass(frozen=True)
class Recorded:
    """What a simulation needs of a recorded run: settings, fitted times, figures to compare."""

    setup: Settings
    times: Times
    groups: tuple[tuple[int, ...], ...]
    """Tokens of each response, by group."""
    filtered: float
    """Share of the generated groups that dynamic sampling discarded."""
    step_s: float
    """Mean seconds from a step's end to the next; includes saves, leaves out evaluations."""
    staleness_mean: float
    staleness_max: int
    dropped: Counter[str]
    """Dropped groups by reason."""


def read_setup(config: Record, has_references: bool) -> Settings:
    """Read a recorded run's settings; refuse a run with features that are not simulated."""
    setup = read_settings(config)
    for key in _NOT_SIMULATED:
        if getattr(setup, key):
            fail(key, "used by the recorded run, and not simulated", "a run without it")
    return setup if has_references else setup.model_copy(update={"num_references": 0})


def changed(setup: Settings, overrides: Sequence[str]) -> Settings:
    """Return the settings changed by `key=value` overrides; refuse keys that are not simulated."""
    for override in overrides:
        key = override.partition("=")[0]
        if key not in SIMULATED:
            fail(key, "no key of a simulation", ", ".join(SIMULATED))
    return read_settings(merge_overrides(setup.model_dump(), overrides))


def fit(folder: Path) -> Recorded:
    """Fit the times of a run from its config, event log, metrics and heartbeats."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    events = defaultdict[str, list[Record]](list)
    for event in records_of(folder / "receipts.jsonl"):
        events[event["event"]].append(event)
    records = records_of(folder / "logs" / "metrics.jsonl")
    steps = [each for each in records if each["step"] > WARM_UP_STEPS]
    # After a second start, the pause would count as a step, and heartbeats lack the time before.
    if events["restart"] or events["rollback"] or len(events["start"]) > 1:
        why = "a role was restarted or the run resumed"
        raise ValueError(f"{why}; a simulation needs an undisturbed run")
    if len(steps) < WARM_UP_STEPS:
        raise ValueError(f"{2 * WARM_UP_STEPS} steps or more are needed")
    beats = records_of(folder / "logs" / "heartbeats.jsonl")
    roles = {beat["role"]: beat for beat in beats}  # the last heartbeat has the sums
    if not {"trainer_0", "generator_0"} <= roles.keys():
        raise ValueError("it has no heartbeats of a trainer and a generator: it did not end well")
    setup = read_setup(config, "reference_0" in roles)
    groups = tuple(tuple(event["response_tokens"]) for event in events["finish"])
    dropped = Counter[str]()
    for event in events["drop"]:
        dropped[event["reason"]] += len(event["groups"])
    return Recorded(
        setup=setup,
        times=_times(setup, events, steps, roles),
        groups=groups,
        filtered=dropped["filtered"] / len(groups),
        step_s=_step_s(steps, events),
        staleness_mean=statistics.fmean(step["staleness/mean"] for step in steps),
        staleness_max=max(step["staleness/max"] for step in steps),
        dropped=dropped,
    )


def _step_s(steps: Sequence[Record], events: Mapping[str, Sequence[Record]]) -> float:
    """Return the mean seconds of a step, with saves; leave out steps that an evaluation delayed."""
    ends = {event["step"]: event["time"] for event in events["step"]}
    evaluated = {event["step"] for event in events["evaluate"]}
    last = [each["step"] - 1 for each in steps]
    return statistics.fmean(ends[n + 1] - ends[n] for n in last if n not in evaluated)


def _times(
    setup: Settings,
    events: Mapping[str, Sequence[Record]],
    steps: Sequence[Record],
    roles: Mapping[str, Record],
) -> Times:
    generators = [beat for name, beat in roles.items() if name.startswith("generator_")]
    references = [beat for name, beat in roles.items() if name.startswith("reference_")]

    def spent(beats: Sequence[Record], activity: str, clock: str = "seconds") -> float:
        return sum(beat[clock].get(activity, 0.0) for beat in beats)

    engine = [sums for beat in generators for sums in beat["engine_steps"].values() if sums[0]]
    prompts, prompt_tokens, engine_cpu_s = (sum(sums[i] for sums in engine) for i in (2, 3, 5))
    outside = spent(generators, "sampling", "cpu_seconds") - engine_cpu_s
    rewards_cpu_s = spent(generators, NO_REWARD, "cpu_seconds")
    responses = sum(sum(event["response_tokens"]) for event in events["finish"])
    groups, pushes = len(events["finish"]), max(1, len(events["push"]))
    trainer = [roles["trainer_0"]]
    return Times(
        *_step_time(engine),
        *_train(setup, steps, prompt_tokens / prompts),
        collect_s=max(0.0, outside + rewards_cpu_s) / prompts,
        reward_s=max(0.0, spent(generators, NO_REWARD) - rewards_cpu_s) / groups,
        load_s=spent(generators, "loading weights") / max(1, len(events["load"])),
        prompt_tokens=prompt_tokens / prompts,
        gather_s=spent(trainer, "gather_weights") / pushes,
        export_s=spent(trainer, "export_weights") / pushes,
        reference_s_per_token=spent(references, "add_logprobs")
        / (responses + groups * prompt_tokens / prompts),
    )


def _step_time(engine: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Fit an engine step's seconds (fixed, per sequence, per prompt) by nonnegative least squares.

    `engine` has sums of steps, sequences, prompts, prompt tokens and seconds, by size of the batch.
    """
    sums = np.array(engine, dtype=np.float64)
    steps, spent = sums[:, 0], sums[:, 4]
    weights = np.sqrt(steps) / (spent / steps)
    rows, values = sums[:, :3] / steps[:, None] * weights[:, None], spent / steps * weights
    best, least = np.zeros(3), float(values @ values)
    for count in (1, 2, 3):
        for columns in map(list, itertools.combinations(range(3), count)):
            found = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
            residual = rows[:, columns] @ found - values
            if (found >= 0).all() and residual @ residual < least:
                best, least = np.zeros(3), float(residual @ residual)
                best[columns] = found
    step, per_sequence, per_prompt = best.tolist()
    return step, per_sequence, per_prompt


def _train(
    setup: Settings, steps: Sequence[Record], prompt_tokens: float
) -> tuple[float, float, tuple[float, ...]]:
    """Fit training steps: return fixed seconds, seconds per token, each step's ratio to the fit."""
    trained = [step for step in steps if step["time/update"] > 0]  # others are skipped
    samples = setup.groups_per_step * setup.group_size
    tokens = [
        (step["rollout/response_tokens_mean"] * samples + setup.groups_per_step * prompt_tokens)
        / setup.num_trainers
        for step in trained
    ]
    seconds = [step["time/train"] for step in trained]
    update_s = statistics.median(step["time/update"] for step in trained)
    per_token = (statistics.fmean(seconds) - update_s) / statistics.fmean(tokens)
    ratios = [a / (update_s + per_token * n) for a, n in zip(seconds, tokens, strict=True)]
    mean = statistics.fmean(ratios)
    return update_s, per_token, tuple(ratio / mean for ratio in ratios)
