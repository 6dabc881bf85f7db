"""Fits the twin's times from the files that one finished run has left."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from grpo_components.replay.recorded_run import read_json_lines
from grpo_components.rollout.engine_use import NO_REWARD
from grpo_components.time_use import STARTING
from grpo_components.twin.setup import Setup, setup_of
from grpo_components.twin.simulation import WARM_UP_STEPS, simulate
from grpo_components.twin.times import Lengths, Times
from grpo_components.twin.virtual_engine import StepTime

Record = dict[str, Any]
_WALL, _CPU = 4, 5
"""Columns of `EngineUse.steps`."""
_EXPECTILE, _ROUNDS = 0.1, 50
_SEEDS = 3
"""Runs of the twin whose mean is compared with the recorded run."""


class UnfitError(ValueError):
    """A run's files lack what the twin needs; the message says what."""


@dataclass(frozen=True)
class Recorded:
    """What the twin knows of a recorded run."""

    setup: Setup
    times: Times
    groups: tuple[tuple[int, ...], ...]
    """Tokens of each response, by group."""
    filtered: float
    """Share of the generated groups that dynamic sampling discarded."""
    step_s: float
    """Mean seconds of a step, from the end of the one before; without evaluations and saves."""
    staleness_mean: float
    staleness_max: int
    dropped_stale: int
    uncalibrated_s: float
    """Step time that the twin found with the times as fitted; they were scaled to `step_s`."""

    def lengths(self, setup: Setup, seed: int) -> Lengths:
        """Return the lengths of responses for a changed setup."""
        return Lengths(
            self.groups,
            seed=seed,
            scale=setup.length_scale,
            tail=setup.length_tail,
            longest=setup.max_response_tokens,
        )


def fit(folder: Path, cores: float | None = None) -> Recorded:
    """Fit the times of a run from its config, event log, metrics and heartbeats."""
    run = Run(folder)
    times = run.times()
    setup = run.setup if cores is None else replace(run.setup, cores=cores)
    groups = tuple(tuple(event["response_tokens"]) for event in run.of("finish"))
    raw = Recorded(
        setup=setup,
        times=times,
        groups=groups,
        filtered=run.dropped("filtered") / len(groups),
        step_s=run.step_s(),
        staleness_mean=run.staleness_mean,
        staleness_max=run.staleness_max,
        dropped_stale=run.dropped("stale"),
        uncalibrated_s=0.0,
    )
    found = statistics.fmean(_own_step_s(raw, seed) for seed in range(_SEEDS))
    return replace(raw, times=times.scaled(raw.step_s / found), uncalibrated_s=found)


def _own_step_s(run: Recorded, seed: int) -> float:
    lengths = run.lengths(run.setup, seed)
    return simulate(run.setup, run.times, lengths, seed=seed, filtered=run.filtered).step_s


class Run:
    """The files of a run, and what they say about its times."""

    def __init__(self, folder: Path) -> None:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        self._events = read_json_lines(folder / "logs" / "events.jsonl")
        self._beats = read_json_lines(folder / "logs" / "heartbeats.jsonl")
        records = read_json_lines(folder / "logs" / "metrics.jsonl")
        self.steps = [each for each in records if each["step"] > WARM_UP_STEPS]
        if any(event["event"] in ("restart", "rollback") for event in self._events):
            raise UnfitError("a role was restarted; the twin needs an undisturbed run")
        if len(self.steps) < WARM_UP_STEPS:
            raise UnfitError(f"{2 * WARM_UP_STEPS} steps or more are needed")
        if "time/train_cpu" not in self.steps[0]:
            raise UnfitError("metrics.jsonl has no time/train_cpu; run it with this version")
        self._last = {beat["role"]: beat for beat in self._beats}
        has_references = "reference_0" in self._last
        self.setup = setup_of(config, self._events[0]["cpus"], has_references)
        self._on_cpu = self.setup.device == "cpu"

    def of(self, name: str) -> list[Record]:
        """Return all events of one name."""
        return [event for event in self._events if event["event"] == name]

    def dropped(self, reason: str) -> int:
        """Return the number of groups dropped for a reason."""
        return sum(len(event["groups"]) for event in self.of("drop") if event["reason"] == reason)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the trained tokens, in policy versions."""
        return statistics.fmean(step["staleness/mean"] for step in self.steps)

    @property
    def staleness_max(self) -> int:
        """Largest staleness of a trained token."""
        return max(step["staleness/max"] for step in self.steps)

    def step_s(self) -> float:
        """Return the mean seconds of a step, without those that an evaluation or a save delayed."""
        ends = {event["step"]: event["time"] for event in self.of("step")}
        evaluated = {event["step"] for event in self.of("evaluate")}
        kept = [
            ends[step["step"]] - ends[step["step"] - 1]
            for step in self.steps
            if step["step"] - 1 not in evaluated
        ]
        return statistics.fmean(kept)

    def times(self) -> Times:
        """Fit all times."""
        generator, buffer = self._sum("generator_"), self._last["replay_buffer"]
        kind = "cpu_seconds" if self._on_cpu else "seconds"
        pushes, loads = max(1, len(self.of("push"))), max(1, len(self.of("load")))
        prompts, prompt_tokens = (
            sum(sums[i] for sums in generator["engine_steps"].values()) for i in (2, 3)
        )
        engine_step, engine_cpu_s = _step_time(
            generator["engine_steps"], _CPU if self._on_cpu else _WALL
        )
        if not self._on_cpu:
            engine_cpu_s = sum(sums[_CPU] for sums in generator["engine_steps"].values())
        wall, cpu = generator["seconds"], generator["cpu_seconds"]
        outside = cpu["sampling"] + cpu[NO_REWARD] - engine_cpu_s
        waited = wall[NO_REWARD] - cpu[NO_REWARD]
        groups = len(self.of("finish"))
        trainer = self._last["trainer_0"]
        update_s, per_token, scatter = self._train(prompt_tokens / prompts)
        call_s, receive_s = self._call_s(buffer)
        return Times(
            engine_step=engine_step,
            collect_s=max(0.0, outside) / prompts,
            reward_s=max(0.0, waited) / groups,
            load_s=generator[kind].get("loading weights", 0.0) / loads,
            fetch_s=0.0,
            update_s=update_s,
            train_s_per_token=per_token,
            train_scatter=scatter,
            prompt_tokens=prompt_tokens / prompts,
            gather_s=trainer[kind].get("gather_weights", 0.0) / pushes,
            export_s=trainer[kind].get("export_weights", 0.0) / pushes,
            reference_s_per_token=self._reference(kind),
            call_s=call_s,
            receive_s=receive_s,
        )

    def _sum(self, family: str) -> Record:
        """Return the sums of what the last heartbeats of a family of roles say."""
        total: Record = {name: defaultdict(float) for name in ("seconds", "cpu_seconds")} | {
            "engine_steps": {}
        }
        for role, beat in self._last.items():
            if not role.startswith(family):
                continue
            for name in ("seconds", "cpu_seconds"):
                for activity, value in beat[name].items():
                    total[name][activity] += value
            for name, sums in beat["engine_steps"].items():
                before = total["engine_steps"].get(name, [0.0] * len(sums))
                total["engine_steps"][name] = [a + b for a, b in zip(before, sums, strict=True)]
        return total

    def _train(self, prompt_tokens: float) -> tuple[float, float, tuple[float, ...]]:
        """Return the fixed seconds of a step, those per token, and the scatter of the steps."""
        ranks, groups = self.setup.num_trainers, self.setup.groups_per_step
        samples = groups * self.setup.group_size
        seconds, updates, tokens = [], [], []
        for step in self.steps:
            if not step["time/update"] > 0:  # a skipped step
                continue
            cpu_share = step["time/train_cpu"] / step["time/train"] if self._on_cpu else 1.0
            seconds.append(step["time/train"] * cpu_share)
            updates.append(step["time/update"] * cpu_share)
            response_tokens = step["rollout/response_tokens_mean"] * samples
            tokens.append((response_tokens + groups * prompt_tokens) / ranks)
        update_s = statistics.median(updates)
        per_token = (statistics.fmean(seconds) - update_s) / statistics.fmean(tokens)
        fitted = [update_s + per_token * each for each in tokens]
        ratios = [a / b for a, b in zip(seconds, fitted, strict=True)]
        mean = statistics.fmean(ratios)
        return update_s, per_token, tuple(ratio / mean for ratio in ratios)

    def _reference(self, kind: str) -> float:
        """Return a reference's seconds for each token."""
        spent = sum(
            beat[kind].get("add_logprobs", 0.0)
            for role, beat in self._last.items()
            if role.startswith("reference_")
        )
        return spent / sum(sum(event["response_tokens"]) for event in self.of("finish"))

    def _call_s(self, buffer: Record) -> tuple[float, float]:
        """Return the CPU seconds of a call, of the driver and of the role that receives it."""
        beats = [beat for beat in self._beats if beat["role"] == "driver"]
        first, last = beats[0], beats[-1]
        if last["time"] == first["time"]:
            raise UnfitError("heartbeats.jsonl has one heartbeat of the driver; two are needed")
        counts = Counter(
            event["event"]
            for event in self._events
            if first["time"] <= event["time"] <= last["time"]
        )
        ranks = self.setup.num_trainers
        calls = 2 * counts["issue"] + counts["buffer"] + (3 + ranks) * counts["load"]
        calls += (2 + ranks) * counts["step"] + (1 + 2 * ranks) * counts["push"]
        calls += counts["finish"] * (self.setup.num_references > 0)
        of_buffer = counts["buffer"] + 2 * counts["step"]
        spent = sum(s for activity, s in buffer["cpu_seconds"].items() if activity != STARTING)
        return (last["cpu_s"] - first["cpu_s"]) / calls, spent / max(1, of_buffer)


def _step_time(by_size: Mapping[str, Sequence[float]], column: int) -> tuple[StepTime, float]:
    """Fit the seconds of an engine's step, by groups of steps of about one size.

    On shared cores, most groups of steps ran beside collectors, whose thread takes the
    interpreter's lock and the caches. So the fit is an expectile below the mean; what it leaves
    counts for the responses.
    """
    sums = np.array([each for each in by_size.values() if each[0]], dtype=np.float64)
    steps, spent = sums[:, 0], sums[:, column]
    means, weights = sums[:, :3] / steps[:, None], np.sqrt(steps) / (spent / steps) ** 2
    below = _EXPECTILE if column == _CPU else 0.5
    found = np.zeros(3)
    for _ in range(_ROUNDS):
        over = means @ found > spent / steps
        scale = np.sqrt(weights * np.where(over, 1 - below, below))
        found = np.array(_non_negative(means * scale[:, None], spent / steps * scale))
    return StepTime(*found.tolist()), float(sums[:, :3].sum(axis=0) @ found)


def _non_negative(rows: NDArray[Any], values: NDArray[Any]) -> list[float]:
    """Return the least-squares coefficients, none of them negative."""
    best, least = [0.0] * rows.shape[1], float(values @ values)
    for count in range(1, rows.shape[1] + 1):
        for columns in itertools.combinations(range(rows.shape[1]), count):
            found = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
            residual = rows[:, columns] @ found - values
            if (found >= 0).all() and residual @ residual < least:
                best, least = [0.0] * rows.shape[1], float(residual @ residual)
                for column, value in zip(columns, found.tolist(), strict=True):
                    best[column] = value
    return best
