"""Combines token metrics over the micro-batches and ranks of an update, and over updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_components.objective.off_policy import mismatch_summary, mismatch_sums

# Each step logs all of these keys; NaN if not measured (no reference, clipping, trained token).
ALWAYS_LOGGED = (
    "loss/total",
    "loss/policy",
    "loss/penalty",
    "loss/kl_reference",
    "ratio/mean",
    "ratio/max",
    "ratio/clip_fraction",
    "ratio/clip_fraction_low",
    "ratio/clip_fraction_high",
    "entropy",
    "grad_norm",
    "lr",
    "time/update",
    *(f"mismatch/{name}" for name in ("generator_kl", "ratio_p01", "ratio_p50", "ratio_p99")),
    *(f"mismatch/{name}" for name in ("ratio_max", "effective_sample_size")),
    *(f"mismatch/{name}" for name in ("fresh_kl", "fresh_tokens")),
    "off_policy/masked_fraction",
    "off_policy/correction_mass",
)


class UpdateMetrics:
    """Collects the token metrics of one optimizer update on one rank."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # on the device: micro-batches need not wait for it

    def add(self, token_metrics: Mapping[str, Tensor]) -> None:
        """Add per-token values [N]. Keys that end in `max` keep the maximum, others the sum."""
        for key, values in token_metrics.items():
            values = values.detach().double()
            _add(self._totals, {key: values.max() if key.endswith("max") else values.sum()})

    def add_mismatch(self, log_ratios: Tensor, weights: Tensor | None, fresh: Tensor) -> None:
        """Add a micro-batch's mismatch between trainer and generator, from log ratios [N].

        `fresh` [N]: whether the trainer's version sampled the whole response.
        """
        weights = torch.ones_like(log_ratios) if weights is None else weights
        sums, ratio_max = mismatch_sums(log_ratios, weights, fresh)
        _add(self._totals, {"mismatch": sums, "mismatch/ratio_max": ratio_max})

    def over_ranks(self, total_tokens: int, ranks_per_sample: int) -> dict[str, float]:
        """Return token means, maxima and mismatch over all ranks, equal on each; collective.

        A sample counts once, although `ranks_per_sample` ranks compute it.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        sizes = {key: value.numel() for key, value in self._totals.items()}
        # One transfer; a rank without data contributes nothing.
        flat = torch.cat([*map(torch.ravel, self._totals.values())] or [torch.empty(0)]).cpu()
        dist.all_gather_object(gathered, (sizes, flat))
        totals: dict[str, Tensor] = {}
        for sizes, flat in gathered[::ranks_per_sample]:
            _add(totals, dict(zip(sizes, flat.split([*sizes.values()]), strict=True)))
        sums = totals.pop("mismatch", None)
        metrics = {
            key: value.item() if key.endswith("max") else value.item() / total_tokens
            for key, value in totals.items()
        }
        if sums is not None:
            metrics |= mismatch_summary(sums, totals["mismatch/ratio_max"], total_tokens)
        return metrics


def _add(totals: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for key, value in more.items():
        combine = torch.maximum if key.endswith("max") else torch.add
        totals[key] = combine(totals[key], value) if key in totals else value


def over_updates(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average metrics over a step's optimizer updates; keys that end in `max` keep the largest.

    `mismatch/fresh_kl` is the mean over all fresh tokens, and `mismatch/fresh_tokens` their number.
    """
    metrics: dict[str, float] = dict.fromkeys(ALWAYS_LOGGED, math.nan)
    for key in dict.fromkeys(key for update in measured for key in update):
        values = [update[key] for update in measured if key in update]
        metrics[key] = max(values) if key.endswith("max") else sum(values) / len(values)
    found = [update for update in measured if "mismatch/fresh_kl" in update]
    pairs = [(update["mismatch/fresh_kl"], update["mismatch/fresh_tokens"]) for update in found]
    if pairs:  # the mean is over tokens, not over updates
        tokens = sum(count for _, count in pairs)
        metrics["mismatch/fresh_kl"] = sum(kl * count for kl, count in pairs) / tokens
        metrics["mismatch/fresh_tokens"] = tokens
    return metrics


def is_usable(update: Mapping[str, float]) -> bool:
    """Whether the loss and the gradient of an update are finite; False if it had no tokens."""
    return all(math.isfinite(update.get(key, math.nan)) for key in ("loss/total", "grad_norm"))
