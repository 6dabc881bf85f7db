"""Sets learning rates in optimizers of any package."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters.

    Args:
        optimizer: of torch or torchao; torchao's keep the rate in a tensor and reject a float.
        rate: for the next step.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
