"""Advantages of single tokens, computed by the trainer, which has the logprobs they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from grpo_components.errors import ConfigError
from grpo_components.objective.advantages import checked_eps
from grpo_components.objective.kl import k1, k3
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.schedules import Scheduled, as_schedule
from grpo_components.trajectory import Trajectory

TokenAdvantages = Callable[
    [Sequence[Trajectory], Sequence[NDArray[np.bool_]], int], list[NDArray[np.float32]]
]
"""Function: a batch's responses, masks of their trained tokens ([R] bool each), steps done ->
advantages of each response's trained tokens."""


class TokenNormalizedAdvantages:
    """Normalizes over all trained tokens of the batch: A_t = (a_t - mean(a)) / (std(a) + eps).

    REINFORCE++, arXiv 2501.03262: a_t = r - kl_coeff sum over i >= t of KL_i, so the KL of a token
    and of all later tokens is subtracted from their response's reward r. KL_i = log pi_generator -
    log pi_reference at sampled token i (k1); tokens of the environment have KL 0.

    A call with a batch's rewards returns them unchanged (0 where the sample failed), for the
    rollout log. `per_token` computes the advantages, in the trainer.

    Args:
        kl_coeff: penalty per nat of KL, in units of reward; a number, or a mapping that gives a
            schedule; 0 disables it.
        eps: added to the standard deviation, in units of reward.
    """

    def __init__(self, kl_coeff: Scheduled = 0.0, eps: float = 1e-4) -> None:
        self.kl_coeff = as_schedule("advantages.kl_coeff", kl_coeff)
        if self.kl_coeff.lowest < 0:
            problem = f"{self.kl_coeff.lowest} given"
            raise ConfigError("advantages.kl_coeff", problem, "numbers >= 0")
        self.needs_reference = self.kl_coeff.highest > 0
        """Whether the KL coefficient is above 0 at any step."""
        self.eps = checked_eps(eps)

    def __call__(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the rewards (0 where failed), which `per_token` later turns into advantages."""
        return np.where(np.isfinite(rewards), rewards, 0.0).astype(np.float32)

    def per_token(
        self, batch: Sequence[Trajectory], trained: Sequence[NDArray[np.bool_]], step: int
    ) -> list[NDArray[np.float32]]:
        """Return the advantage of each trained token; see `TokenAdvantages`."""
        coefficient = self.kl_coeff(step)
        raw = [
            t.advantage - coefficient * _kl_to_go(t)[mask]
            if coefficient > 0
            else np.full(int(mask.sum()), t.advantage)
            for t, mask in zip(batch, trained, strict=True)
        ]
        values = np.concatenate([np.empty(0), *raw])
        centred = values - values.sum() / max(len(values), 1)
        deviation = np.sqrt((centred**2).sum() / max(len(values) - 1, 1))
        normalized = (centred / (deviation + self.eps)).astype(np.float32)
        return np.split(normalized, np.cumsum([len(part) for part in raw])[:-1]) if raw else []


def _kl_to_go(trajectory: Trajectory) -> NDArray[np.float64]:
    """Return [R] KL to the reference, in nats, of each token plus all later ones."""
    assert trajectory.reference_logprobs is not None, "kl_coeff > 0 without reference logprobs"
    difference = trajectory.generator_logprobs.astype(np.float64) - trajectory.reference_logprobs
    kl = np.where(trajectory.response_mask, difference, 0.0)
    return np.cumsum(kl[::-1])[::-1]


def with_teacher(inputs: LossInputs, coeff: float) -> tuple[LossInputs, TokenMetrics]:
    """Subtract a teacher's reverse KL from a micro-batch's advantages: on-policy distillation.

    The policy samples, and a teacher grades every token: A_t is lowered by coeff times

        log pi(a_t | s_t) - log pi_teacher(a_t | s_t),

    the k1 estimate of KL(pi || pi_teacher) at that token (Lu and Thinking Machines Lab 2025,
    "On-Policy Distillation"; on the student's own samples: Agarwal et al. 2023, arXiv 2306.13649).
    As in "On-Policy Distillation", a token is graded for itself alone, not for later tokens.

    log pi is the trainer's at the update, without gradient; the article takes the generator's. On
    fresh tokens both are equal. On older tokens, with the ratio pi / generator, the trainer's give
    the gradient of KL(pi || pi_teacher) at the current weights; the generator's give that of
    KL(pi || pi_teacher) - KL(pi || generator), and so also push the policy off the generator.
    """
    teacher = inputs.teacher_logprobs
    if teacher is None:
        return inputs, {}
    policy = inputs.trainer_logprobs.detach()
    kl = k1(policy, teacher)
    metrics = {"teacher/kl": kl, "teacher/kl_k3": k3(policy, teacher)}
    return replace(inputs, advantages=inputs.advantages - coeff * kl), metrics
