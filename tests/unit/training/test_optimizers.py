"""A learning rate reaches every group, whether the optimizer keeps a number or a tensor."""

import pytest
import torch

from grpo_components.training.trainer import set_learning_rate


@pytest.mark.parametrize("rate", [9.0, torch.tensor(9.0)])
def test_the_next_step_has_the_rate_that_was_set(rate):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=rate, foreach=False)
    kept = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.25)
    for group, before in zip(optimizer.param_groups, kept, strict=True):
        assert group["lr"] is before or not isinstance(before, torch.Tensor)
        group["params"][0].grad = torch.ones(2)
    optimizer.step()
    for group in optimizer.param_groups:
        assert torch.equal(group["params"][0], torch.full((2,), 0.75))
