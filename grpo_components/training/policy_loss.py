"""The policy's loss as the trainer takes it: corrected, and with what it returns checked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.contracts import check_first_weights, checked_weights
from grpo_components.objective.correction import Loss, corrected_losses
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.objective.off_policy import NoCorrection, correction_weights


class PolicyLoss:
    """A loss, whichever it is, with the weights of an off-policy correction on what it returns.

    Shapes and dtypes are checked at every call, which costs nothing; weights, for which one waits
    for the device, at the first one only.

    Args:
        loss: the policy objective, per token.
        off_policy: log ratios [N] of trainer to generator, response of each token [N] -> weights.
        compile_loss: with torch.compile.
    """

    def __init__(
        self, loss: Loss, off_policy: Callable[..., Tensor], *, compile_loss: bool
    ) -> None:
        self._loss = torch.compile(loss, dynamic=True) if compile_loss else loss
        self._off_policy = off_policy
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
        losses, metrics = corrected_losses(self._loss, inputs, weights, self.name)
        self._is_first = False
        return losses, metrics, weights
