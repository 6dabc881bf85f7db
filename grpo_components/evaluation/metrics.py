"""Computes held-out metrics: success rate, pass@k and reward, each with a 95 % interval."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance, stdev
from typing import Any

_Z = 1.959964
"""Normal quantile of a two-sided 95 % interval."""


def evaluation_metrics(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute held-out success and reward of responses that one policy version sampled."""
    versions = {v for r in results for v in (r["oldest_version"], r["newest_version"])}
    assert len(versions) == 1, f"evaluation: several policy versions: {sorted(versions)}"
    by_prompt: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        by_prompt[result["prompt_index"]].append(result)
    prompts = list(by_prompt.values())
    counts = [(len(p), sum(bool(result["success"]) for result in p)) for p in prompts]
    success = [right / scored for scored, right in counts]
    rewards = [fmean(result["reward"] for result in p) for p in prompts]
    metrics = _with_interval("success_rate", success, share_interval(success, len(results)))
    metrics |= _with_interval("reward_mean", rewards, mean_interval(rewards))
    k, most = 2, max(scored for scored, _ in counts)
    while k <= most:
        passed = [pass_at(k, scored, right) for scored, right in counts if scored >= k]
        metrics |= _with_interval(f"pass_at_{k}", passed, share_interval(passed, len(passed)))
        k *= 2
    return {**metrics, "eval/policy_version": versions.pop(), "eval/prompts": len(prompts)}


def pass_at(k: int, scored: int, right: int) -> float:
    """Estimate pass@k of a prompt: the chance that at least one of k responses is right.

    The estimate from `right` right responses of `scored` is unbiased: Chen et al. 2021, "Evaluating
    Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(scored - right, k) / math.comb(scored, k)


def share_interval(shares: Sequence[float], num_responses: int) -> tuple[float, float]:
    """Compute the 95 % interval of the mean of each prompt's share of right responses.

    Prompts count as drawn at random. This is Wilson's score interval for the effective number of
    responses: the number of responses divided by Kish's design effect, because responses to one
    prompt are alike. With one response per prompt, it is the plain Wilson interval. A prompt counts
    as one response if it is the only one, or if all responses are right or all are wrong.
    """
    mean, between = fmean(shares), pvariance(shares)
    n = float(len(shares))
    if 0.0 < mean < 1.0 and len(shares) > 1:
        alone = n * mean * (1.0 - mean)
        n = min(alone / between, num_responses) if between else float(num_responses)
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    # With a mean of 0 or 1, one end equals the mean; min and max remove its rounding error.
    return min(mean, max(0.0, center - half)), max(mean, min(1.0, center + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the 95 % interval of a mean, by the normal distribution; NaN for a single value."""
    if len(values) < 2:
        return math.nan, math.nan
    half = _Z * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _with_interval(
    name: str, values: Sequence[float], interval: tuple[float, float]
) -> dict[str, float]:
    low, high = interval
    key = f"eval/{name}"
    return {key: fmean(values), f"{key}_low": low, f"{key}_high": high}
