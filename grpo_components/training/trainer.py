"""One trainer rank: full finetune of the policy with FSDP2, and its weights for the generators."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grpo_components.exchange.weights import (
    Manifest,
    StateDict,
    hf_converter,
    layer_groups,
    pack_bucket,
)
from grpo_components.objective.losses import TokenMetrics, k3
from grpo_components.training.checkpoint import save_hf_checkpoint
from grpo_components.training.logprobs import ResponseLogprobs, TokenBatch, token_batch
from grpo_components.training.micro_batches import plan_micro_batches
from grpo_components.training.model import DTYPES, load_sharded_model
from grpo_components.trajectory import PackedTrajectories, Trajectory, unpack

Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, TokenMetrics]]


class Trainer:
    """One rank of the trainer group; every rank gets the same calls in the same order.

    Only the trainer counts `policy_version`: the number of batches trained.

    Args:
        rank: of this process in the group.
        num_ranks: size of the group.
        rendezvous: file through which the ranks find each other, on a path that all share.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16; master weights are fp32.
        seed: the same on every rank.
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer of the base model.
        build_optimizer: makes the optimizer from the parameters.
        build_lr_scheduler: makes the scheduler from the optimizer; None keeps the rate constant.
        loss: the policy objective, per token.
        model_type: torchtune's name of the family, for the conversion to Hugging Face names.
        base_model_path: folder of the base model.
        temperature: of sampling; logits are divided by it.
        ppo_epochs: passes over each batch.
        updates_per_batch: optimizer updates in one pass.
        tokens_per_micro_batch: padded tokens in one forward pass.
        logprob_chunk_tokens: positions projected at a time.
        clip_grad_norm: largest norm of the gradient; None does not clip.
        enable_activation_checkpointing: recompute layers in backward.
        compile_model: compile each layer with torch.compile.
        log_peak_memory_stats: measure this process's largest memory so far, in GiB.
        collective_timeout_s: a collective that waits longer raises.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        rendezvous: str,
        device: str,
        dtype: str,
        seed: int,
        build_model: Callable[[], nn.Module],
        build_checkpointer: Callable[[], Any],
        build_optimizer: Callable[[Any], Optimizer],
        build_lr_scheduler: Callable[[Optimizer], LRScheduler] | None,
        loss: Loss,
        model_type: str,
        base_model_path: str,
        temperature: float,
        ppo_epochs: int,
        updates_per_batch: int,
        tokens_per_micro_batch: int,
        logprob_chunk_tokens: int,
        clip_grad_norm: float | None,
        enable_activation_checkpointing: bool,
        compile_model: bool,
        log_peak_memory_stats: bool,
        collective_timeout_s: float,
    ) -> None:
        self.policy_version = 0
        self._rank, self._num_ranks = rank, num_ranks
        self._device = torch.device(device)
        torch.manual_seed(seed)
        dist.init_process_group(
            {"cpu": "gloo", "cuda": "nccl"}[device],
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=collective_timeout_s),
        )
        mesh = init_device_mesh(device, (num_ranks,))
        self._model = load_sharded_model(
            build_model, build_checkpointer, mesh, dtype, enable_activation_checkpointing
        )
        if compile_model:
            for layer in self._model.layers:
                layer.compile()
        self._logprobs = ResponseLogprobs(
            self._model, temperature=temperature, chunk_tokens=logprob_chunk_tokens
        )
        self._optimizer = build_optimizer(self._model.parameters())
        self._lr_scheduler = build_lr_scheduler(self._optimizer) if build_lr_scheduler else None
        self._loss = loss
        self._base_model_path = Path(base_model_path)
        self._to_hf = hf_converter(model_type, self._base_model_path)
        self._weights_dtype = DTYPES[dtype]
        self._gathered: dict[int, list[tuple[str, Tensor]]] = {}
        self._log_peak_memory_stats = log_peak_memory_stats
        self._ppo_epochs, self._updates_per_batch = ppo_epochs, updates_per_batch
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._max_grad_norm = math.inf if clip_grad_norm is None else clip_grad_norm

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32]
    ) -> dict[str, float]:
        """Train on one global batch; each rank works on its part.

        Args:
            batch: the S = B * G trajectories of the step, in the order of group ids.
            advantages: [S] float32, one per trajectory.

        Returns:
            The step's metrics over the global batch (the same on every rank) and the new
            `policy_version`; it stays where no update had a finite gradient.
        """
        started = time.perf_counter()
        trajectories = unpack(batch)
        for trajectory, advantage in zip(trajectories, advantages.tolist(), strict=True):
            trajectory.advantage = advantage
        updates = np.array_split(np.arange(len(trajectories)), self._updates_per_batch)
        updates_measured: list[dict[str, float]] = []
        applied = 0
        for epoch in range(self._ppo_epochs):
            for number, indices in enumerate(updates):
                part = [trajectories[i] for i in indices]
                measured = self._update(part, with_mismatch=epoch == number == 0)
                applied += math.isfinite(measured.get("grad_norm", math.nan))
                updates_measured.append(measured)
        if applied:  # a batch whose gradients were all unusable trained nothing
            self.policy_version += 1
            if self._lr_scheduler is not None:
                self._lr_scheduler.step()
        metrics = _over_updates(updates_measured)
        if self._log_peak_memory_stats:
            metrics["memory/trainer_peak_gib"] = peak_memory_gib(self._device)
        return {
            **metrics,
            "policy_version": self.policy_version,
            "trained_tokens": float(
                sum(t.response_mask.sum() for t in trajectories if not t.failed)
            ),
            "time/train": time.perf_counter() - started,
        }

    def _update(self, trajectories: list[Trajectory], with_mismatch: bool) -> dict[str, float]:
        """One optimizer update on the mean loss per sampled token of the given global part."""
        usable = [t for t in trajectories if not t.failed]
        total_tokens = int(sum(t.response_mask.sum() for t in usable))
        if not total_tokens:  # the same on every rank
            return {}
        lengths = [len(t.prompt_ids) + len(t.response_ids) for t in usable]
        plan = plan_micro_batches(lengths, self._num_ranks, self._tokens_per_micro_batch)
        sums = _TokenSums()
        learning_rate = self._optimizer.param_groups[0]["lr"]
        self._optimizer.zero_grad(set_to_none=True)
        for indices in plan[self._rank]:
            if not indices:  # another rank has one more: take part in its collectives
                empty = token_batch(usable[:1], sampled_only=True).to(self._device)
                (self._logprobs(empty).sum() * 0.0).backward()
                continue
            members = [usable[i] for i in indices]
            batch = token_batch(members, sampled_only=True).to(self._device)
            loss = self._micro_batch_loss(members, batch, sums, with_mismatch)
            # FSDP averages over ranks; the mean is over all tokens of all ranks.
            (loss * (self._num_ranks / total_tokens)).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        if torch.isfinite(grad_norm):  # the same number on every rank
            self._optimizer.step()
        return {
            **sums.over_ranks(self._device, total_tokens),
            "grad_norm": float(grad_norm),
            "lr": float(learning_rate),
        }

    def _micro_batch_loss(
        self, members: list[Trajectory], batch: TokenBatch, sums: _TokenSums, with_mismatch: bool
    ) -> Tensor:
        """Sum of the token losses of one micro-batch; its metrics go into `sums`."""
        counts = torch.tensor([int(t.response_mask.sum()) for t in members])
        advantages = torch.tensor([t.advantage for t in members], dtype=torch.float32)
        trainer_logprobs = self._logprobs(batch)
        generator_logprobs = self._sampled(members, "generator_logprobs")
        reference_logprobs = (
            None
            if members[0].reference_logprobs is None
            else self._sampled(members, "reference_logprobs")
        )
        token_losses, token_metrics = self._loss(
            trainer_logprobs,
            generator_logprobs,
            advantages.repeat_interleave(counts).to(self._device),
            reference_logprobs,
        )
        ratio = (trainer_logprobs.detach() - generator_logprobs).exp()
        own = {"loss/total": token_losses.detach(), "ratio/mean": ratio, "ratio/max": ratio}
        sums.add({**own, **token_metrics})
        if with_mismatch:
            mismatch = k3(generator_logprobs, trainer_logprobs.detach())
            sums.add({"mismatch/generator_kl": mismatch})
        return token_losses.sum()

    def _sampled(self, members: list[Trajectory], field: str) -> Tensor:
        values = [getattr(t, field)[t.response_mask] for t in members]
        return torch.from_numpy(np.concatenate(values)).to(self._device)

    def gather_weights(self) -> int:
        """Gather the current weights layer by layer; each rank keeps the layers assigned to it.

        In line with the step: a gather from another thread would interleave with FSDP's
        collectives.

        Returns:
            The policy version of the gathered weights.
        """
        kept: list[tuple[str, Tensor]] = []
        for number, tensors in enumerate(self._gather_layers()):
            if number % self._num_ranks == self._rank:
                kept += [(name, tensor.to("cpu", copy=True)) for name, tensor in tensors.items()]
        self._gathered[self.policy_version] = kept
        return self.policy_version

    def export_weights(self, version: int) -> tuple[Manifest, NDArray[np.uint8]]:
        """Convert and pack what `gather_weights` kept; safe beside the next train step.

        Args:
            version: what `gather_weights` returned.

        Returns:
            The manifest and the bytes of this rank's bucket.
        """
        return pack_bucket(self._gathered.pop(version))

    def _gather_layers(self) -> Iterator[StateDict]:
        state_dict = self._model.state_dict()
        for names in layer_groups(state_dict):
            full: StateDict = {}
            for name in names:
                value = state_dict[name]
                assert isinstance(value, DTensor)
                full[name] = cast(DTensor, value.to(self._weights_dtype)).full_tensor()
            yield self._to_hf(full)

    def save_checkpoint(self, checkpoints: str, step: int) -> str | None:
        """Write the policy as a Hugging Face folder; collective, rank 0 writes.

        Args:
            checkpoints: folder of the run's checkpoints.
            step: training steps done.

        Returns:
            The new folder on rank 0, None elsewhere.
        """
        state_dict: StateDict = {}
        for tensors in self._gather_layers():
            if self._rank == 0:
                state_dict |= {name: tensor.cpu() for name, tensor in tensors.items()}
        if self._rank != 0:
            return None
        return str(save_hf_checkpoint(state_dict, self._base_model_path, Path(checkpoints), step))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


# What a loss does not measure (no reference, no clipping) is logged as NaN, under the same key.
_ALWAYS_LOGGED = ("loss/policy", "loss/kl_reference", "ratio/clip_fraction")


def _over_updates(measured: list[dict[str, float]]) -> dict[str, float]:
    """Means over a step's optimizer updates, maxima where a key ends in `max`."""
    metrics: dict[str, float] = dict.fromkeys(_ALWAYS_LOGGED, math.nan)
    for key in dict.fromkeys(key for update in measured for key in update):
        values = [update[key] for update in measured if key in update]
        metrics[key] = max(values) if key.endswith("max") else sum(values) / len(values)
    return metrics


def peak_memory_gib(device: torch.device) -> float:
    """The largest memory of this process so far: on a GPU its tensors', on a CPU all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class _TokenSums:
    """Token metrics of one update, added up over micro-batches and then over ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, token_metrics: TokenMetrics) -> None:
        """Add per-token values [N]; keys that end in `max` keep the largest, others the sum."""
        for key, values in token_metrics.items():
            values = values.double()
            if key.endswith("max"):
                best = values.max()
                self._maxima[key] = torch.maximum(self._maxima.get(key, best), best)
            else:
                self._sums[key] = self._sums.get(key, torch.zeros((), dtype=torch.float64)) + (
                    values.sum()
                )

    def over_ranks(self, device: torch.device, total_tokens: int) -> dict[str, float]:
        """Token means and maxima over all ranks; a rank without data takes part with nothing."""
        gathered: list[Any] = [None] * dist.get_world_size()
        own = (
            {key: value.item() for key, value in self._sums.items()},
            {key: value.item() for key, value in self._maxima.items()},
        )
        dist.all_gather_object(gathered, own)
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for rank_sums, rank_maxima in gathered:
            for key, value in rank_sums.items():
                sums[key] = sums.get(key, 0.0) + value
            for key, value in rank_maxima.items():
                maxima[key] = max(maxima.get(key, -math.inf), value)
        return {**{key: value / total_tokens for key, value in sums.items()}, **maxima}
