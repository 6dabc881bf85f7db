"""Clipping equals torch's where that works; over several meshes, see test_meshes.py."""

import math

import pytest
import torch

from grpo_components.training.grad_norm import clip_grad_norm


def parameters():
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 2))]
    for parameter in made[:2]:
        parameter.grad = torch.randn_like(parameter)
    return made  # the last has no gradient


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
def test_it_is_torchs_clipping(max_norm):
    ours, theirs = parameters(), parameters()
    assert torch.equal(
        clip_grad_norm(ours, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    )
    for parameter, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(parameter.grad, other.grad)
    assert ours[2].grad is None
