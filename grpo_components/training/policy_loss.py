"""The loss of the policy as the trainer uses it: corrected, with penalties, outputs checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.composition import Loss, objective_losses
from grpo_components.objective.contracts import check_first_weights, checked_weights
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.objective.off_policy import NoCorrection, correction_weights
from grpo_components.objective.penalties import Penalties


class PolicyLoss:
    """Any policy loss, weighted by an off-policy correction, plus the penalties.

    Shapes and dtypes are checked at every call, which costs nothing; weights, for which one waits
    for the device, at the first one only.

    Args:
        loss: the policy loss, per token.
        penalties: added to it.
        off_policy: log ratios [N] of trainer to generator, response of each token [N] -> weights.
        compile_loss: with torch.compile.
    """

    def __init__(
        self,
        loss: Loss,
        penalties: Penalties,
        off_policy: Callable[..., Tensor],
        *,
        compile_loss: bool,
    ) -> None:
        self._loss = torch.compile(loss, dynamic=True) if compile_loss else loss
        self._penalties, self._off_policy = penalties, off_policy
        self.name, self._correction_name = name_of(loss), name_of(off_policy)
        self._is_first = True
        self.corrects = not isinstance(off_policy, NoCorrection)
        self.from_proximal = bool(
            getattr(loss, "needs_proximal", False)
            or getattr(off_policy, "anchors_at_proximal", False)
        )
        """Whether its ratio is to the policy at the start of the step, not to the generator."""

    def __call__(
        self, inputs: LossInputs, start: Tensor
    ) -> tuple[Tensor, TokenMetrics, Tensor | None]:
        """Losses of one micro-batch.

        Args:
            inputs: its N tokens.
            start: [N] logprobs of the policy at the start of the step, without gradient.

        Returns:
            Corrected losses [N], metrics [N] by name, and the weights [N] that were applied; None
            without a correction.

        Raises:
            ComponentError: the loss or the correction breaks its contract.
        """
        weights = None
        if self.corrects:
            log_ratios = start - inputs.generator_logprobs
            with named_failure("off_policy", self._correction_name):
                returned = correction_weights(self._off_policy, inputs, start)
            weights = checked_weights(self._correction_name, returned, log_ratios)
            if self._is_first:
                check_first_weights(self._correction_name, weights, log_ratios)
        losses, metrics = objective_losses(self._loss, self._penalties, inputs, weights, self.name)
        self._is_first = False
        return losses, metrics, weights
