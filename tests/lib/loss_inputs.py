"""Builds the tokens of a micro-batch as losses read them."""

import runpy
from pathlib import Path
from typing import Any

import torch

from grpo_components.objective.losses import LossInputs

RECIPE = Path(__file__).parents[2] / "recipes/async_grpo_full_finetune_distributed.py"


def recipe_loss() -> Any:
    return runpy.run_path(str(RECIPE))["grpo_loss"]


def loss_inputs(trainer: Any, generator: Any, advantages: Any, **given: Any) -> LossInputs:
    """Return the tokens of these numbers or tensors, each fresh and the only one of its response.

    `ids` and `dtype` may be given, and any field of `LossInputs`; None leaves a field out.
    """
    dtype, size = given.pop("dtype", torch.float64), len(advantages)
    ids, staleness = given.pop("ids", range(size)), given.pop("staleness", [0] * size)

    def made(value: Any) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)

    own = made(trainer)
    return LossInputs(
        trainer_logprobs=own if own.requires_grad else own.detach().requires_grad_(),
        generator_logprobs=made(generator),
        advantages=made(advantages),
        sequence_ids=torch.as_tensor(list(ids)),
        staleness=torch.as_tensor(list(staleness)),
        step=given.pop("step", 0),
        **{name: made(value) for name, value in given.items() if value is not None},
    )


def evaluated(loss: Any, inputs: LossInputs) -> tuple[Any, Any, Any]:
    losses, metrics = loss(inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs)
    return losses.detach(), gradient, metrics
