"""Computes and checks the policy's loss: distillation, off-policy correction and penalties."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

import torch
from torch import Tensor

from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.composition import Loss, Penalties, objective_losses
from grpo_components.objective.contracts import check_first_weights, checked_weights
from grpo_components.objective.losses import LossInputs, TokenMetrics
from grpo_components.objective.off_policy import NoCorrection, correction_weights
from grpo_components.objective.token_advantages import with_teacher


class PolicyLoss:
    """Computes token losses: policy loss times off-policy weight, plus penalties.

    Every call checks the shapes and dtypes of the losses and weights. Only the first call checks
    the values of the weights, because that waits for the device.
    """

    def __init__(
        self,
        loss: Loss,
        penalties: Penalties,
        off_policy: Callable[..., Tensor],
        *,
        teacher_coeff: float = 0.0,
        compile_loss: bool,
    ) -> None:
        self._loss = _compiled(loss) if compile_loss else loss
        self._penalties, self._off_policy = penalties, off_policy
        self._teacher_coeff = teacher_coeff
        self.name, self._correction_name = name_of(loss), name_of(off_policy)
        self._is_first = True
        self.corrects = not isinstance(off_policy, NoCorrection)
        self.from_proximal = bool(
            getattr(loss, "needs_proximal", False)
            or getattr(off_policy, "anchors_at_proximal", False)
        )
        """Whether the ratio's denominator is the policy at the step's start, not the generator."""

    def __call__(
        self, inputs: LossInputs, start: Tensor
    ) -> tuple[Tensor, TokenMetrics, Tensor | None]:
        """Return losses [N], metrics [N] by name, and off-policy weights [N] or None.

        `start` [N] are the logprobs under the policy at the step's start.
        """
        inputs, distilled = with_teacher(inputs, self._teacher_coeff)
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
        return losses, {**distilled, **metrics}, weights


def _compiled(loss: Loss) -> Loss:
    """Compile a loss with torch.compile, also one pickled by value, as a recipe's own loss is.

    torch.compile looks up a function's globals in the module that their `__name__` names. After
    pickling by value, that is the recipe's `__main__`; but in this process, `__main__` is another
    module. So this function puts the globals into a new module.
    """
    function = inspect.unwrap(loss)
    if not isinstance(function, FunctionType):
        function = type(function).__call__
    if isinstance(function, FunctionType):
        values = function.__globals__
        home = sys.modules.get(values["__name__"])
        if home is None or vars(home) is not values:
            values["__name__"] = f"{values['__name__']}_by_value_{id(values):x}"
            module = ModuleType(values["__name__"])
            vars(module).update(values)
            sys.modules[module.__name__] = module
    return torch.compile(loss, dynamic=True)
