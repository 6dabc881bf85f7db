"""Sets the learning rate of an optimizer of torch or torchao."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
