"""Lists the charts of a run's metrics: their titles, sections and curves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

REWARD_TERMS = "Reward terms"
"""Section with a chart for each reward term of the run."""
_REWARD_TERM = re.compile(r"reward_terms/(.*)_(mean|std)", re.DOTALL)


@dataclass(frozen=True)
class Panel:
    """Says what a chart shows; `curves` maps metric keys to names in the legend.

    `smooth`: the page's slider smooths the curves. `total`: the values add up over the run, so a
    point that combines several steps shows the last value.
    """

    title: str
    about: str
    curves: dict[str, str]
    smooth: bool = True
    total: bool = False
    range: tuple[float, float] | None = None
    log: bool = False
    from_zero: bool = False


def reward_term_panels(keys: Iterable[str]) -> list[Panel]:
    """Return a panel for each reward term that is among the keys of a run's metrics."""
    names = dict.fromkeys(match[1] for key in keys if (match := _REWARD_TERM.fullmatch(key)))
    about = "before its weight; mean and standard deviation over the responses of a step"
    ends = {"mean": "mean", "std": "deviation"}
    return [
        Panel(name, about, {f"reward_terms/{name}_{end}": ends[end] for end in ends})
        for name in names
    ]


_SHARE = (-0.02, 1.02)
# fmt: off
PANELS = {
    "Learning": (
        Panel("Reward", "mean over the responses of a step or an evaluation",
              {"rollout/reward_mean": "training", "eval/reward_mean": "held-out"}),
        Panel("Success", "share of responses with full reward",
              {"rollout/success_rate": "training", "eval/success_rate": "held-out"}, range=_SHARE),
        Panel("Reward deviation", "standard deviation over the responses of a step",
              {"rollout/reward_std": "deviation"}, from_zero=True),
        Panel("Groups without variance",
              "share of groups whose rewards are all equal: they teach nothing",
              {"rollout/zero_variance_fraction": "share"}, range=_SHARE),
        Panel("Response length", "sampled tokens per response",
              {"rollout/response_tokens_mean": "tokens"}, from_zero=True),
        Panel("Cut off by length", "share of responses that a length or turn limit ended",
              {"rollout/cut_off_fraction": "share"}, range=_SHARE),
        Panel("Turns", "turns of the policy per response",
              {"rollout/turns_mean": "mean", "rollout/turns_max": "most"}, from_zero=True),
        Panel("Curriculum",
              "share of tried prompts within the band, and of right responses among the generated",
              {"curriculum/in_band": "in the band", "curriculum/generated_success": "right"},
              range=_SHARE),
        Panel("Agents",
              "share of sampled tokens that was trained, and of prompts' tokens found in the cache",
              {"agents/trained_share": "trained", "agents/cached_share": "cached"}, range=_SHARE),
        Panel("Entropy", "of the trainer's next-token distribution, nats", {"entropy": "entropy"}),
        Panel("Loss", "total, and its policy part",
              {"loss/total": "total", "loss/policy": "policy part"}),
        Panel("Gradient norm", "before clipping", {"grad_norm": "norm"}, from_zero=True),
        Panel("Learning rate", "", {"lr": "learning rate"}, smooth=False, from_zero=True),
    ),
    REWARD_TERMS: (),
    "Off-policyness": (
        Panel("Staleness", "policy versions between a trained token and the trainer",
              {"staleness/mean": "mean", "staleness/max": "oldest token"}, from_zero=True),
        Panel("Reused groups",
              "share of the batch that earlier steps trained, too, and uses of its mean group",
              {"reuse/share": "share", "reuse/uses_mean": "uses", "reuse/age_mean": "age"},
              from_zero=True),
        Panel("Importance ratio", "probability of a token: trainer / generator",
              {"ratio/mean": "mean", "mismatch/ratio_p01": "1 %", "mismatch/ratio_p99": "99 %"}),
        Panel("Largest ratio", "over all tokens of a step", {"ratio/max": "largest"}, log=True),
        Panel("Clipped tokens", "share of tokens whose ratio is outside the clip range",
              {"ratio/clip_fraction_low": "below", "ratio/clip_fraction_high": "above"},
              from_zero=True),
        Panel("KL", "nats per token: "
              "generator to trainer before the update, policy to reference, teacher",
              {"mismatch/generator_kl": "generator", "loss/kl_reference": "reference",
               "teacher/kl": "teacher"}),
        Panel("Effective sample size",
              "share of the tokens that is left when each is weighted by its ratio",
              {"mismatch/effective_sample_size": "share"}),
    ),
    "Speed": (
        Panel("Throughput", "tokens per second of wall time, evaluations included",
              {"throughput/generated_tokens_per_second": "generated",
               "throughput/trained_tokens_per_second": "trained"}, from_zero=True),
        Panel("Time of a step", "seconds: whole step and its parts",
              {"time/step": "step", "time/wait_for_batch": "waiting for a batch",
               "time/train": "training", "time/push": "push"}, from_zero=True),
        Panel("Wall-clock time",
              "seconds that the run has taken, start-up and earlier attempts included",
              {"time/wall_clock": "time"}, smooth=False, total=True, from_zero=True),
        Panel("Restarts", "of roles, and of all trainers together, since the run began",
              {"restarts": "restarts"}, smooth=False, total=True, from_zero=True),
        Panel("Buffer", "groups left after taking a batch",
              {"buffer/size": "groups"}, from_zero=True),
    ),
}
"""Charts by section, in the order of the page."""
# fmt: on
BOOKKEEPING = {
    *("step", "attempt", "policy_version", "eval/step", "eval/policy_version", "eval/prompts"),
}
"""Metric keys that get no chart."""
