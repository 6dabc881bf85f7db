"""Auxiliary loss of a mixture of experts, which spreads the trained tokens over the experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_components.models.logprobs import token_batch
from grpo_components.models.meshes import Sharding
from grpo_components.models.routers import RouterRecorder
from grpo_components.training.sample import TrainSample
from grpo_components.training.token_metrics import TokenMetrics


class LoadBalancing:
    """Adds coeff x E x (sum over experts e of f_e P_e) to the loss of each optimizer update.

    f_e is the share of (trained token, layer) pairs that are routed to e, counted once for each of
    a token's experts, and P_e is the mean of the routers' probability of e over these pairs. A
    token's pair is that of the position that predicts it. This is transformers'
    `load_balancing_loss_func` over all trained tokens of the update, whatever its micro-batches and
    ranks; Switch Transformer, arXiv 2101.03961, eq. 4 to 6. f_e has no gradient, but the gradient
    of each micro-batch needs that of the whole batch: a forward pass of its own counts it.
    """

    def __init__(
        self,
        model: nn.Module,
        coeff: float,
        plan: Callable[[list[TrainSample]], Sequence[Sequence[int]]],
        sharding: Sharding,
    ) -> None:
        self._routers = RouterRecorder(model) if coeff > 0 else None
        self.recorder = self._routers or nullcontext()
        """Context of every forward pass of the trainer."""
        self._coeff, self._plan, self._copies = coeff, plan, sharding.tensor
        self._shares = torch.zeros(0)
        self._tokens = self._pairs = 1

    @torch.no_grad()
    def count(
        self,
        samples: list[TrainSample],
        forward: Callable[[list[TrainSample]], Any],
        measured: TokenMetrics,
    ) -> None:
        """Count how many tokens of an update go to each expert; collective."""
        if self._routers is None:
            return
        counts = torch.zeros(0)
        for indices in self._plan(samples):
            members = [samples[i] for i in indices]
            forward(members or samples[:1])  # idle ranks join collectives
            for logits in _of_trained_tokens(self._routers, members or samples[:1]):
                chosen = logits.topk(self._routers.experts_per_token, dim=-1).indices
                found = torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).double()
                counts = torch.zeros_like(found) if not len(counts) else counts
                counts += found * bool(members)
        dist.all_reduce(counts)
        self._tokens = sum(sample.num_tokens for sample in samples)
        self._pairs = self._tokens * len(self._routers.logits)
        self._shares = (counts / self._copies / self._pairs).float()
        measured.add({"experts/load_max": counts / counts.mean()})

    def loss(self, members: list[TrainSample], measured: TokenMetrics) -> Tensor | float:
        """Return a micro-batch's part of the loss, from its forward pass, which ran last."""
        if self._routers is None:
            return 0.0
        total = torch.zeros_like(self._shares)
        for logits in _of_trained_tokens(self._routers, members):
            total = total + torch.softmax(logits, dim=-1, dtype=torch.float32).sum(dim=0)
        part = len(self._shares) * (self._shares * total).sum() / self._pairs
        shown = part.detach() * self._tokens  # the metrics' sums are divided by their number
        measured.add({"loss/load_balancing": shown, "loss/total": self._coeff * shown})
        return self._coeff * part


def _of_trained_tokens(routers: RouterRecorder, members: list[TrainSample]) -> list[Tensor]:
    """Return the logits [M, E] of each layer at the positions that predict trained tokens."""
    trajectories, masks = [s.trajectory for s in members], [s.mask for s in members]
    device = routers.logits[0].device
    positions = token_batch(trajectories, masks, device=device).positions
    return [logits.flatten(0, -2)[positions] for logits in routers.logits]
