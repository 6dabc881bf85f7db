"""Combines token metrics over the micro-batches and ranks of an update, and over updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_components.objective.off_policy import mismatch_summary

# Each step logs all of these; one not measured (no reference, clipping, trained token) is NaN.
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


class TokenMetrics:
    """Collects the token metrics of one optimizer update on one rank."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # on the device: micro-batches need not wait for it
        self._maxima: dict[str, Tensor] = {}
        self._mismatch: list[Tensor] = []

    def add(self, token_metrics: Mapping[str, Tensor]) -> None:
        """Add per-token values [N]. Keys that end in `max` keep the maximum, others the sum."""
        for key, values in token_metrics.items():
            values = values.detach().double()
            if key.endswith("max"):
                best = values.max()
                self._maxima[key] = torch.maximum(self._maxima.get(key, best), best)
            else:
                self._sums[key] = self._sums.get(key, values.new_zeros(())) + values.sum()

    def add_mismatch(self, log_ratios: Tensor, weights: Tensor | None, fresh: Tensor) -> None:
        """Keep a micro-batch's mismatch between trainer and generator, on the device."""
        weights = torch.ones_like(log_ratios) if weights is None else weights
        self._mismatch.append(torch.stack([log_ratios.detach(), weights, fresh.to(weights.dtype)]))

    def over_ranks(self, total_tokens: int, ranks_per_sample: int) -> dict[str, float]:
        """Return token means, maxima and mismatch over all ranks, the same on each; collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        # A rank without data contributes empty arrays.
        mismatch = torch.cat(self._mismatch or [torch.empty(3, 0)], dim=1)
        log_ratios, weights, is_fresh = mismatch.cpu().numpy()
        fresh = log_ratios[is_fresh != 0]
        sums = {key: value.item() for key, value in self._sums.items()}
        largest = {key: value.item() for key, value in self._maxima.items()}
        dist.all_gather_object(gathered, (sums, largest, log_ratios, weights, fresh))
        gathered = gathered[::ranks_per_sample]
        means: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for rank_sums, rank_maxima, *_ in gathered:
            for key, value in rank_sums.items():
                means[key] = means.get(key, 0.0) + value / total_tokens
            for key, value in rank_maxima.items():
                maxima[key] = max(maxima.get(key, -math.inf), value)
        ratios, weights, fresh = (np.concatenate([g[i] for g in gathered]) for i in (2, 3, 4))
        summary = mismatch_summary(ratios, weights) if len(ratios) else {}
        return {**means, **maxima, **summary, **_fresh_mismatch(fresh)}


def _fresh_mismatch(log_ratios: np.ndarray) -> dict[str, float]:
    """Return the mismatch on fresh tokens [M], which training after sampling cannot cause."""
    if not len(log_ratios):
        return {}
    summary = mismatch_summary(log_ratios, np.ones_like(log_ratios))
    kl, tokens = summary["mismatch/generator_kl"], float(len(log_ratios))
    return {"mismatch/fresh_kl": kl, "mismatch/fresh_tokens": tokens}


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
