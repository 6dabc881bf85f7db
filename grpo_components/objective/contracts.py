"""Checks what the parts of an objective (loss, off-policy correction, ...) return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.losses import LossInputs, TokenMetrics


def checked_losses(name: str, returned: Any, inputs: LossInputs) -> tuple[Tensor, TokenMetrics]:
    """Check that a loss returned losses [N] with a gradient and metrics [N] by name; return them.

    The check does not read values, so it does not wait for the device.
    """
    like, refused = inputs.trainer_logprobs, partial(_refused, "loss", name)
    if not isinstance(returned, tuple | list) or len(cast("Sequence[Any]", returned)) != 2:
        raise refused(_shown(returned), "a pair, losses [N] and metrics by name")
    losses, metrics = cast("Sequence[Any]", returned)
    allowed = "[N] floating-point losses, one for each token, that depend on trainer_logprobs"
    if not _is_column(losses, like) or not losses.is_floating_point():
        raise refused(f"losses of {_shown(losses)} for [{len(like)}] tokens", allowed)
    if like.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
        raise refused("losses without a gradient", allowed)
    if not isinstance(metrics, Mapping):
        raise refused(f"metrics of {_shown(metrics)}", "tensors [N] by name")
    named = dict(cast("Mapping[str, Any]", metrics))
    for key, values in named.items():
        if key == "loss/total":
            raise refused(f"a metric under the name {key}", "other names: the trainer measures it")
        if not _is_column(values, like):
            problem = f"the metric {key} of {_shown(values)} for [{len(like)}] tokens"
            raise refused(problem, "tensors [N] by name, one value for each token")
    return losses, named


def check_entropy(name: str, losses: Tensor, inputs: LossInputs) -> None:
    """Refuse losses that need a gradient through the entropy, which a run gives only on request."""
    assert inputs.entropy is not None
    found = torch.autograd.grad(losses.sum(), inputs.entropy, retain_graph=True, allow_unused=True)
    gradient = cast("Tensor | None", found[0])
    if gradient is not None and gradient.any():
        allowed = "an attribute `needs_entropy = True` of the loss, or `tokens.entropy.detach()`"
        raise _refused("loss", name, "losses with a gradient through tokens.entropy", allowed)


def check_numbers(name: str, losses: Tensor, inputs: LossInputs) -> None:
    """Refuse losses unless they and their gradient with respect to trainer_logprobs are finite."""
    allowed = "finite losses that depend on trainer_logprobs with a finite gradient"
    found = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs, allow_unused=True)
    gradient = cast("Tensor | None", found[0])
    if gradient is None:
        raise _refused("loss", name, "losses whose gradient misses trainer_logprobs", allowed)
    for what, values in (("losses with", losses), ("losses with the gradient", gradient)):
        wrong = ~values.isfinite()
        if wrong.any():
            advantage = inputs.advantages[wrong][0].item()
            problem = f"{what} {values[wrong][0].item()} at the advantage {advantage:g}"
            raise _refused("loss", name, problem, allowed)


def checked_weights(name: str, returned: Any, log_ratios: Tensor) -> Tensor:
    """Check that an off-policy correction returned one number per token; return the weights.

    The check does not read values, so it does not wait for the device.
    """
    if not _is_column(returned, log_ratios) or not returned.is_floating_point():
        problem = f"{_shown(returned)} for [{len(log_ratios)}] tokens"
        allowed = "[N] floating-point weights >= 0, one for each token"
        raise _refused("off_policy", name, problem, allowed)
    return returned.detach().to(log_ratios.dtype)


def check_first_weights(name: str, weights: Tensor, log_ratios: Tensor) -> None:
    """Refuse negative or non-finite off-policy weights of tokens whose log ratio is finite."""
    wrong = weights[log_ratios.isfinite() & ~((weights >= 0) & weights.isfinite())]
    if len(wrong):
        allowed = "finite weights >= 0, one for each token"
        raise _refused("off_policy", name, f"the weight {wrong[0].item()}", allowed)


def checked_aggregation(
    aggregation: Callable[[NDArray[np.int64]], Any], token_counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Call the aggregation; check that each response with tokens gets a finite loss weight."""
    name = name_of(aggregation)
    with named_failure("aggregation", name):
        returned = aggregation(token_counts)
    allowed = "[S] finite floating-point weights, one for each response"
    if not _are_floats(returned, token_counts):
        problem = f"{_shown(returned)} for the token counts of [{len(token_counts)}] responses"
        raise _refused("aggregation", name, problem, allowed)
    if not np.isfinite(returned[token_counts > 0]).all():
        raise _refused("aggregation", name, "a weight that is no finite number", allowed)
    return returned


def advantages_of(
    advantages: Callable[[NDArray[np.float64]], Any], rewards: NDArray[np.float64]
) -> NDArray[np.floating]:
    """Call the `advantages` component and check that it gives each response a finite number.

    If any sample has failed, advantages that are not finite are accepted.
    """
    name = name_of(advantages)
    with named_failure("advantages", name):
        values: Any = advantages(rewards)
        if isinstance(values, Tensor):
            values = values.detach().cpu().float().numpy()
    if not _are_floats(values, rewards):
        problem = f"{_shown(values)} for {list(rewards.shape)} rewards"
        allowed = "[B, G] floating-point numbers, one for each reward"
        raise _refused("advantages", name, problem, allowed)
    wrong = np.argwhere(~np.isfinite(values))
    # With a failed sample (reward NaN), it is accepted: the trainer skips the step and says so.
    if len(wrong) and np.isfinite(rewards).all():
        row, column = wrong[0].tolist()
        group = ", ".join(f"{reward:.4g}" for reward in rewards[row, :8])
        group += ", ..." if rewards.shape[1] > 8 else ""
        problem = f"{values[row, column]} for response {column} of a group with rewards {group}"
        raise _refused("advantages", name, problem, "finite numbers")
    return values


def _is_column(values: Any, like: Tensor) -> bool:
    """Whether values are a tensor with one number for each token, on the device of `like`."""
    is_like = isinstance(values, Tensor) and values.shape == like.shape
    return is_like and values.device == like.device


def _are_floats(values: Any, like: NDArray[Any]) -> bool:
    array = cast("NDArray[Any]", values)
    is_array = isinstance(values, np.ndarray) and array.shape == like.shape
    return is_array and array.dtype.kind == "f"


def _shown(value: Any) -> str:
    """Describe a value for a message: by shape and dtype if it is an array, else by type."""
    if isinstance(value, Tensor | np.ndarray):
        array = cast("Tensor | NDArray[Any]", value)
        return f"shape {list(array.shape)}, {str(array.dtype).removeprefix('torch.')}"
    return "None" if value is None else f"type {type(value).__name__}"


def _refused(key: str, name: str, problem: str, allowed: str) -> ConfigError:
    return ConfigError(key, f"{name} returned {problem}", allowed)
