"""Penalties subtracted from rewards before advantages are computed: KL to the reference, length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.objective.kl import ESTIMATORS
from grpo_components.schedules import Scheduled, as_schedule


class RewardShaping:
    """Subtracts penalties from a reward: r' = r - kl_coeff(step) KL - overlong_penalty overlong.

    overlong = clip((T - (L_max - L_cache)) / L_cache, 0, 1).

    KL is the sum over a response's tokens of an estimate of KL(policy || reference) (KL in the
    reward: Ouyang et al. 2022, arXiv 2203.02155, eq. 2). T is the response's length: all of its
    turns and the environment's tokens between them. The limit L_max = max_response_tokens counts
    the same tokens. L_cache = overlong_tokens (soft overlong punishment: DAPO, arXiv 2503.14476,
    eq. 13, there with penalty 1).

    Args:
        kl_coeff: penalty per nat of KL, in units of reward; a number, or a mapping that gives a
            schedule; 0 disables it.
        max_response_tokens: the length at which the generator stops a response.
        overlong_tokens: tokens before the limit over which the length penalty grows; 0 disables it.
        overlong_penalty: penalty of a response of full length, in units of reward.
    """

    def __init__(
        self,
        kl_coeff: Scheduled,
        max_response_tokens: int,
        overlong_tokens: int = 0,
        overlong_penalty: float = 1.0,
    ) -> None:
        self.kl_coeff = as_schedule("reward_shaping.kl_coeff", kl_coeff)
        self.needs_reference = self.kl_coeff.highest > 0
        """Whether the KL coefficient is above 0 at any step."""
        self.max_response_tokens = max_response_tokens
        self.overlong_tokens, self.overlong_penalty = overlong_tokens, overlong_penalty

    def __call__(self, batch: Any, step: int) -> NDArray[np.float64]:
        """Return the shaped rewards of a batch.

        The batch has `rewards`, `response_lengths`, `cut_off` and `reference_kl`. A response that
        the limit ended counts as one of full length, even if it is shorter because the
        environment's next text did not fit.
        """
        shaped = batch.rewards.astype(np.float64)
        coefficient = self.kl_coeff(step)
        if coefficient > 0:
            assert batch.reference_kl is not None, "kl_coeff > 0 without KL to the reference"
            shaped -= coefficient * batch.reference_kl
        if self.overlong_tokens > 0:
            longest = self.max_response_tokens
            lengths = np.where(batch.cut_off, longest, batch.response_lengths)
            excess = lengths - (longest - self.overlong_tokens)
            shaped -= self.overlong_penalty * np.clip(excess / self.overlong_tokens, 0.0, 1.0)
        return shaped


def sequence_kl(
    logprobs: Tensor, reference: Tensor, lengths: list[int], estimator: str
) -> list[float]:
    """Estimate KL(policy || reference) of each response, as a sum over its tokens."""
    per_token = ESTIMATORS[estimator](logprobs.detach().double(), reference.detach().double())
    return [float(response.sum()) for response in torch.split(per_token, lengths)]
