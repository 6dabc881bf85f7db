"""Says whether one run is better than another, by the 95 % interval of held-out success."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_components.files import EVALUATIONS, records_of
from grpo_components.records.run_folder import CODE
from grpo_tools.report.run_files import DAMAGED, History

_T_QUANTILES = (12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""97.5 % quantile of Student's t for 1 to 10 degrees of freedom."""
_EVALUATED = ("eval_dataset.", "eval.", "timeouts.reward_s")
"""Prefixes of config keys that decide what is evaluated, as do the keys of `is_success` rewards."""
_OF_A_SEED = ("seed", "output_dir", "metric_logger.", "checkpointer.", "resume_")
"""Prefixes of config keys that may differ between runs of one job with different seeds."""


class _Job(NamedTuple):
    """Runs of the same config that differ only in their seeds."""

    names: list[str]
    seeds: set[str]
    steps: list[int]
    success: list[dict[int, float]]
    """For each run, the success on each held-out prompt in its last evaluation."""

    def on(self, prompts: Sequence[int]) -> NDArray[np.float64]:
        """Return the success of each run on these prompts [runs, prompts]."""
        return np.array([[each[prompt] for prompt in prompts] for each in self.success])


def verdicts(
    runs: Sequence[History], names: Sequence[str], configs: Sequence[Mapping[str, str]]
) -> list[str]:
    """Say whether each job beats the first; a job is all runs whose configs differ only in seed."""
    jobs: dict[tuple[tuple[str, str], ...], _Job] = {}
    lines: list[str] = []
    for run, name, config in zip(runs, names, configs, strict=True):
        if not config:
            lines.append(f"{name}: not comparable: it has no config.yaml")
            continue
        own = {key: value for key, value in config.items() if not key.startswith(_OF_A_SEED)}
        job = jobs.setdefault(tuple(sorted(own.items())), _Job([], set(), [], []))
        job.names.append(name)
        for record in _last_evaluation(run):
            job.seeds.add(config.get("seed", ""))
            job.steps.append(record[0])
            job.success.append(record[1])
    if not jobs:
        return lines
    (key, first), *others = jobs.items()
    if not others and len(first.names) > 1:
        lines.append(f"{_named(first)}: runs of one job, which differ in their seeds at most")
    for other_key, other in others:
        lines.append(_verdict(first, other, _measured_otherwise(dict(key), dict(other_key))))
    return lines


def _measured_otherwise(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the keys that decide what is evaluated and differ between two configs."""
    differ = {key for key in first.keys() | other.keys() if first.get(key) != other.get(key)}
    judges = [key for key in first if key.endswith(".is_success") and first[key] == "True"]
    decisive = *_EVALUATED, *(key.removesuffix("is_success") for key in judges)
    paths = [first[k] for k in first if k.startswith(decisive) and k.endswith("_component_")]
    decisive = *decisive, *(f"{CODE}/{path.partition('.')[0]}.py" for path in paths)
    return sorted(k for k in differ if k.startswith(decisive) and not k.endswith(".weight"))


def _last_evaluation(run: History) -> list[tuple[int, dict[int, float]]]:
    """Return (step, prompt -> success) of the last evaluation that no attempt replaced, if any."""
    found: list[tuple[int, dict[int, float]]] = []
    for record in records_of(run.folder / "logs" / EVALUATIONS, b'"success"'):
        with contextlib.suppress(*DAMAGED):
            if run.attempts.counts(record):
                pairs = zip(record["prompt_index"], record["success"], strict=True)
                found = [(record["step"], {index: float(value) for index, value in pairs})]
    return found


def _verdict(first: _Job, other: _Job, differ: Sequence[str]) -> str:
    what = f"{_named(other)} against {_named(first)}: "
    if missing := [_named(job) for job in (first, other) if not job.success]:
        return f"{what}not enough to tell: no evaluation of {missing[0]}"
    shared = set.intersection(*(set(each) for each in (*first.success, *other.success)))
    if differ or len(shared) < 2:
        of = ", ".join(differ) or "prompts"
        return f"{what}not comparable: they were evaluated with different {of}"
    a, b = (job.on(sorted(shared)) for job in (first, other))
    differences = b.mean(0) - a.mean(0)  # of the same prompts: their difficulty cancels
    squared, runs = differences.var(ddof=1) / len(differences), (len(a), len(b))
    several, quantile = min(len(first.seeds), len(other.seeds)) > 1, 1.96
    if several:
        of_prompts = squared**2 / (len(differences) - 1)
        of_seeds = sum(means.var(ddof=1) / len(means) for means in (a.mean(1), b.mean(1)))
        squared += of_seeds
        # Welch and Satterthwaite: degrees of freedom of a sum of variances of prompts and of seeds
        free = squared**2 / max(of_prompts + of_seeds**2 / (sum(runs) - 2), 1e-300)
        quantile = 1.96 + 2.4 / free if free >= 11 else _T_QUANTILES[max(int(free), 1) - 1]
    change, half = float(differences.mean()), quantile * math.sqrt(squared)
    word = "better" if change > half else "worse" if change < -half else "not enough to tell"
    line = f"{what}{word}: held-out success {a.mean():.3f} to {b.mean():.3f}, {change:+.3f} "
    interval = f"{change - half:+.3f} to {change + half:+.3f} with 95 %"
    line += f"({interval if differences.any() else 'no difference on any prompt'}); "
    line += f"{len(shared)} prompts, {runs[0]} and {runs[1]} runs, steps {_steps(first)} and "
    line += _steps(other) if _steps(first) == _steps(other) else f"{_steps(other)}: not the same"
    return line if several else f"{line}. Another seed may differ by more: give several of each"


def _named(job: _Job) -> str:
    return ", ".join(job.names)


def _steps(job: _Job) -> str:
    low, high = min(job.steps), max(job.steps)
    return f"{low}" if low == high else f"{low} to {high}"
