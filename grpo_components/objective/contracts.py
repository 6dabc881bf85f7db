"""Checks of what the parts of an objective (loss, correction, ...) return when they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.losses import LossInputs, TokenMetrics


def checked_losses(name: str, returned: Any, inputs: LossInputs) -> tuple[Tensor, TokenMetrics]:
    """Return what a loss returned, if it is losses [N] with a gradient and metrics [N] by name.

    The check does not read values, so it does not wait for the device.
    """
    like = inputs.trainer_logprobs
    wanted = f"[{len(like)}]"
    pair = cast("tuple[Any, ...]", returned if isinstance(returned, tuple | list) else ())
    if len(pair) != 2:
        raise _refused("loss", name, _shown(returned), "a pair, losses [N] and metrics by name")
    losses, metrics = pair
    allowed = "[N] floating-point losses, one for each token, that depend on trainer_logprobs"
    if not isinstance(losses, Tensor) or losses.shape != like.shape:
        problem = f"losses of {_shown(losses)} for {wanted} tokens"
        raise _refused("loss", name, problem, allowed)
    if not losses.is_floating_point() or losses.device != like.device:
        raise _refused("loss", name, f"losses of {_shown(losses)}, {losses.device}", allowed)
    if like.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
        raise _refused("loss", name, "losses without a gradient", allowed)
    allowed = "tensors [N] by name, one value for each token"
    if not isinstance(metrics, Mapping):
        raise _refused("loss", name, f"metrics of {_shown(metrics)}", allowed)
    named = dict(cast("Mapping[Any, Any]", metrics))
    for key, values in named.items():
        if not isinstance(key, str) or key == "loss/total":
            taken = "metrics under names of their own; the trainer measures loss/total"
            raise _refused("loss", name, f"a metric under the name {key!r:.50}", taken)
        right = isinstance(values, Tensor) and values.shape == like.shape
        if not right or values.is_complex() or values.device != like.device:
            problem = f"the metric {key} of {_shown(values)} for {wanted} tokens"
            raise _refused("loss", name, problem, allowed)
    return losses, named


def check_numbers(name: str, losses: Tensor, inputs: LossInputs) -> None:
    """Refuse losses unless they and their gradient with respect to trainer_logprobs are finite."""
    allowed = "finite losses that depend on trainer_logprobs with a finite gradient"
    found = torch.autograd.grad(losses.sum(), inputs.trainer_logprobs, allow_unused=True)
    gradient = cast("Tensor | None", found[0])
    if gradient is None:
        raise _refused("loss", name, "losses whose gradient misses trainer_logprobs", allowed)
    for what, values in (("losses with", losses), ("losses with the gradient", gradient)):
        wrong = values[~values.isfinite()]
        if len(wrong):
            raise _refused("loss", name, f"{what} {wrong[0].item()}", allowed)


def checked_weights(name: str, returned: Any, log_ratios: Tensor) -> Tensor:
    """Return what an off-policy correction returned, if it is one number per token.

    The check does not read values, so it does not wait for the device.
    """
    allowed = "[N] floating-point weights >= 0, one for each token"
    if not isinstance(returned, Tensor) or returned.shape != log_ratios.shape:
        problem = f"{_shown(returned)} for [{len(log_ratios)}] tokens"
        raise _refused("off_policy", name, problem, allowed)
    if not returned.is_floating_point() or returned.device != log_ratios.device:
        raise _refused("off_policy", name, f"{_shown(returned)}, {returned.device}", allowed)
    return returned.detach().to(log_ratios.dtype)


def check_first_weights(name: str, weights: Tensor, log_ratios: Tensor) -> None:
    """Refuse weights that are negative or not finite, but where the log ratio is not finite."""
    wrong = weights[log_ratios.isfinite() & ~((weights >= 0) & weights.isfinite())]
    if len(wrong):
        allowed = "finite weights >= 0, one for each token"
        raise _refused("off_policy", name, f"the weight {wrong[0].item()}", allowed)


def checked_aggregation(
    aggregation: Callable[[NDArray[np.int64]], Any], token_counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Call the aggregation and check that it gives each response with tokens a finite weight."""
    name = name_of(aggregation)
    with named_failure("aggregation", name):
        returned = aggregation(token_counts)
    allowed = "[S] finite weights, one for each response"
    weights = _as_floats(returned)
    if weights is None or weights.shape != token_counts.shape:
        problem = f"{_shown(returned)} for the token counts of [{len(token_counts)}] responses"
        raise _refused("aggregation", name, problem, allowed)
    if not np.isfinite(weights[token_counts > 0]).all():
        raise _refused("aggregation", name, "a weight that is no finite number", allowed)
    return weights


def advantages_of(
    advantages: Callable[[NDArray[np.float64]], Any], rewards: NDArray[np.float64]
) -> NDArray[np.floating]:
    """Call the `advantages` component and check that it gives each response a number.

    Where any sample has failed, advantages that are not finite are accepted.
    """
    name = name_of(advantages)
    with named_failure("advantages", name):
        returned = advantages(rewards)
    allowed = "[B, G] floating-point numbers, one for each reward"
    given = f"{list(rewards.shape)} rewards"
    values = _as_floats(returned, exactly=True)
    if values is None or values.shape != rewards.shape:
        raise _refused("advantages", name, f"{_shown(returned)} for {given}", allowed)
    wrong = np.argwhere(~np.isfinite(values))
    # With a failed sample (reward NaN), it is accepted: the trainer skips the step and says so.
    if len(wrong) and np.isfinite(rewards).all():
        row, column = wrong[0].tolist()
        group = ", ".join(f"{reward:.4g}" for reward in rewards[row, :8])
        group += ", ..." if rewards.shape[1] > 8 else ""
        problem = f"{values[row, column]} for response {column} of a group with rewards {group}"
        raise _refused("advantages", name, problem, "finite numbers")
    return values


def _as_floats(values: Any, *, exactly: bool = False) -> NDArray[Any] | None:
    """Return an array of floating-point numbers; None if the values are something else."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().float().numpy() if values.is_floating_point() else None
    if exactly and not isinstance(values, np.ndarray):
        return None
    try:
        array: NDArray[Any] = np.asarray(cast(Any, values))
    except ValueError:  # rows of different lengths
        return None
    if array.dtype.kind not in ("f" if exactly else "fiu"):
        return None
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _shown(value: Any) -> str:
    """Describe a value for a message: by shape and dtype if it is an array, else by type."""
    if isinstance(value, Tensor | np.ndarray):
        array = cast("Tensor | NDArray[Any]", value)
        dtype = str(array.dtype).removeprefix("torch.")
        return f"shape {_shape(array.shape)}, {dtype}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}"
    return "None" if value is None else f"type {type(value).__name__}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]" if shape else "()"


def _refused(key: str, name: str, problem: str, allowed: str) -> ConfigError:
    return ConfigError(key, f"{name} returned {problem}", allowed)
