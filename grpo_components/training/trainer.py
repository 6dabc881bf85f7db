"""One trainer rank: trains the policy with FSDP2 and exports its weights for the generators."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torchtune.training import OffloadActivations

from grpo_components.exchange.weight_deltas import DeltaBucket
from grpo_components.exchange.weights import Manifest
from grpo_components.malloc import keep_freed
from grpo_components.models.flops import ResourceUse
from grpo_components.models.logprobs import ResponseLogprobs, parts_of, token_batch
from grpo_components.models.lora import trained_parameters, without_dropout
from grpo_components.models.meshes import join_ranks
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.shared_prompts import Part
from grpo_components.objective.composition import has_entropy_gradient
from grpo_components.objective.losses import LossInputs
from grpo_components.objective.objective import TrainedObjective
from grpo_components.rendezvous import Rendezvous
from grpo_components.training.checkpoint import TrainerState, set_learning_rate
from grpo_components.training.optimizer_offload import state_on_device
from grpo_components.training.policy_loss import PolicyLoss
from grpo_components.training.sample import (
    TrainSample,
    make_samples,
    set_loss_weights,
    split_responses,
    spread_advantages,
    token_columns,
)
from grpo_components.training.sharded_policy import load_policy
from grpo_components.training.step_result import StepResult
from grpo_components.training.token_logprobs import (
    add_reference_logprobs,
    gather_logprobs,
    keep_logprobs,
    probe_logprobs,
)
from grpo_components.training.token_metrics import UpdateMetrics, is_usable, over_updates
from grpo_components.training.token_use import TokenUse, keep_weighted
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.training.weight_export import weight_exports
from grpo_components.trajectory import PackedTrajectories


def _parts(samples: list[TrainSample]) -> list[Part]:
    return parts_of([s.trajectory for s in samples], [s.mask for s in samples])


class Trainer:
    """Trains the policy as one of several ranks, which all get the same calls in the same order.

    The trainer alone counts `policy_version`, the number of batches trained.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: str,
        seed: int,
        rendezvous: Rendezvous,
        options: TrainerOptions,
        objective: TrainedObjective,
    ) -> None:
        self.policy_version = 0
        num_ranks, self._sharding = options.num_ranks, options.sharding
        self._rank, self._device = rank, torch.device(device)
        self._num_data_ranks = num_ranks // self._sharding.tensor  # a batch is split into so many
        self._options, self._objective = options, objective
        if device == "cpu":
            keep_freed()
        torch.manual_seed(seed)
        timeout_s = options.collective_timeout_s
        meshes = join_ranks(rank, num_ranks, rendezvous, device, self._sharding, timeout_s)
        self._model = load_policy(options, meshes)
        offloads = self._sharding.offload_activations
        self._activations = OffloadActivations() if offloads else nullcontext()
        self._logprobs = ResponseLogprobs(
            self._model,
            chunk_tokens=options.logprob_chunk_tokens,
            num_ids=options.num_ids,
            entropy_gradient=has_entropy_gradient(objective.loss, objective.penalties),
            compile_softmax=options.compile,
        )
        self._optimizer = options.build_optimizer(trained_parameters(self._model))
        schedule = options.build_lr_scheduler
        self._lr_scheduler = schedule and schedule(self._optimizer)
        self._on_device = partial(
            state_on_device, self._optimizer, self._device, active=options.colocate
        )
        self._step, self._skipped_because = 0, ""
        terms = (objective.loss, objective.penalties, objective.off_policy)
        teacher, is_compiled = objective.teacher_coeff, options.compile
        self._policy_loss = PolicyLoss(*terms, teacher_coeff=teacher, compile_loss=is_compiled)
        trained = (self._model, self._optimizer, self._lr_scheduler)
        place = (Path(options.base_model_path), rank, num_ranks, self._device, options.lora)
        self._state = TrainerState(*trained, *place)
        self._exports = weight_exports(self._model, options, self._device, rank)
        log_memory = options.log_peak_memory_stats
        self._use = ResourceUse(self._model, self._device, options.dtype, num_ranks, log_memory)
        build_profiler = options.build_profiler
        self._profiler = None if build_profiler is None else build_profiler()[0]
        if self._profiler is not None:
            self._profiler.start()
        if options.open_sender is not None and rank == 0:  # its methods run beside the training
            sender = options.open_sender(host=rendezvous.host)
            self.transfer_group, self.send_weights = sender.transfer_group, sender.send_weights
            self.abandon_send = sender.abandon_send

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> StepResult:
        """Train on one global batch, of which each rank computes its part.

        `advantages` has one value per response; `step` is the number of steps done before.
        """
        started, cpu_started = time.perf_counter(), time.process_time()
        self._step, self._skipped_because = step, ""
        if (rate := self._options.learning_rate) is not None:
            for group in self._optimizer.param_groups:
                set_learning_rate(group, rate(step))
        samples, use = self._samples(batch, advantages, step)
        with self._on_device() as moves:
            updates, start_known = self._updates(samples, step)
        if trained := any(is_usable(update) for update in updates):
            self.policy_version += 1
            if self._lr_scheduler is not None:
                self._lr_scheduler.step()
        seconds = time.perf_counter() - started - moves.get("time/offload", 0.0)
        versions = np.concatenate([s.trajectory.token_versions[s.mask] for s in samples])
        parts, epochs = _parts([s for s in samples if s.num_tokens]), self._options.ppo_epochs
        metrics: dict[str, Any] = {
            **over_updates(updates),
            **moves,
            **self._use.metrics(parts, len(versions), epochs, start_known, seconds),
            "policy_version": self.policy_version,
            "skipped_steps": step + 1 - self.policy_version,  # each trained step made a version
            "time/train": seconds,
            "time/train_cpu": time.process_time() - cpu_started,
        }
        with without_dropout(self._model):
            probe = probe_logprobs(self._logprobs, self._device)
        why = "" if trained else self._skipped_because or _nothing_to_train(samples)
        if self._profiler is not None:
            self._profiler.step()  # the last one of a cycle writes the traces; collective
        return StepResult(
            policy_version=self.policy_version,
            token_versions=dict(Counter(versions.tolist())),
            token_logprobs=gather_logprobs(samples),
            trained_tokens=len(versions),
            skipped_because=why,
            metrics=metrics,
            probe_logprobs=probe,
            group_tokens=use.count(samples, self._device, self._sharding.tensor),
        )

    def _samples(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> tuple[list[TrainSample], TokenUse]:
        options, corrects = self._options, self._policy_loss.corrects
        oldest = options.contract.oldest_trainable(self.policy_version)
        use = TokenUse(oldest, options.mask_overlong, corrects)
        samples = make_samples(batch, advantages, use.trained_tokens, options.logged_responses)
        trajectories = [sample.trajectory for sample in samples]
        is_reference = options.lora is not None and self._objective.needs_reference
        if is_reference and trajectories[0].reference_logprobs is None:
            parts = (self._logprobs, self._plan_parts, self._device)
            add_reference_logprobs(trajectories, self._model, *parts)
        spread_advantages(samples, self._objective.token_advantages, step)
        return samples, use

    def _updates(
        self, samples: list[TrainSample], step: int
    ) -> tuple[list[dict[str, float]], bool]:
        """Do a step's updates; return metrics, and whether proximal logprobs took an extra pass."""
        epochs = self._options.ppo_epochs
        parts = split_responses(samples, self._options.updates_per_batch)
        needs_start = self._policy_loss.corrects or self._policy_loss.from_proximal
        start_known = needs_start and epochs * len(parts) > 1
        if start_known:
            for part in parts:
                self._fill_proximal_logprobs([s for s in part if s.num_tokens])
        updates: list[dict[str, float]] = []
        for epoch in range(epochs):
            for number, part in enumerate(parts):
                first = epoch == 0 and (number == 0 or start_known)
                index = (step * epochs + epoch) * len(parts) + number
                updates.append(self._update(part, index, with_mismatch=first))
        return updates, start_known

    def _plan(self, samples: list[TrainSample]) -> list[list[int]]:
        return self._plan_parts(_parts(samples))

    def _plan_parts(self, parts: list[Part]) -> list[list[int]]:
        budget = self._options.tokens_per_micro_batch
        plan = plan_micro_batches(parts, self._use.flops.layers, self._num_data_ranks, budget)
        return plan[self._rank // self._sharding.tensor]

    def _forward(self, members: list[TrainSample]) -> tuple[Tensor, Tensor]:
        trajectories, masks = zip(*((s.trajectory, s.mask) for s in members), strict=True)
        batch = token_batch(trajectories, masks, device=self._device)
        with self._activations:
            return self._logprobs(batch)

    @torch.no_grad()
    def _fill_proximal_logprobs(self, samples: list[TrainSample]) -> None:
        """Store in each sample its logprobs at the step's start, which the step's updates need."""
        for indices in self._plan(samples):
            # A rank without a micro-batch of its own still has to join the others' collectives.
            members = [samples[i] for i in indices] or samples[:1]
            with without_dropout(self._model):
                logprobs = self._forward(members)[0].split([s.num_tokens for s in members])
            for sample, values in zip(members, logprobs, strict=True):
                sample.proximal_logprobs = values

    def _update(self, part: list[TrainSample], index: int, with_mismatch: bool) -> dict[str, float]:
        """Make one optimizer update from the aggregated loss of a part of the global batch."""
        if not (samples := [s for s in part if s.num_tokens]):  # the same on every rank
            return {}
        num_tokens, measured = sum(s.num_tokens for s in part), UpdateMetrics()
        set_loss_weights(part, self._objective.aggregation)
        self._optimizer.zero_grad(set_to_none=True)
        for indices in self._plan(samples):
            if not indices:  # another rank has one more micro-batch: join its collectives
                (self._forward(samples[:1])[0].sum() * 0.0).backward()
                continue
            members = [samples[i] for i in indices]
            losses = self._weighted_losses(members, measured, first=with_mismatch)
            measured.add({"loss/total": losses * num_tokens})
            # Undo FSDP's average over ranks, because the weights already count all ranks' tokens.
            (losses.sum() * self._num_data_ranks).backward()
        self._add_supervised_loss(index, measured, num_tokens)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # else the time of the update would include the backward pass
        began = time.perf_counter()
        max_norm = self._options.clip_grad_norm or math.inf
        grad_norm = clip_grad_norm(self._model.parameters(), max_norm)
        metrics = measured.over_ranks(num_tokens, self._sharding.tensor)
        metrics["grad_norm"] = float(grad_norm)
        if is_usable(metrics):  # the same on every rank
            self._optimizer.step()
            for sample in samples:
                sample.updated = True
        elif not self._skipped_because:
            names = "loss/total", "loss/ptx", "grad_norm"
            bad = [name for name in names if not math.isfinite(metrics.get(name, 0.0))]
            self._skipped_because = ", ".join(f"{name} is {metrics[name]}" for name in bad)
        metrics["time/update"] = time.perf_counter() - began
        return {**metrics, "lr": float(self._optimizer.param_groups[0]["lr"])}

    def _add_supervised_loss(self, update: int, measured: UpdateMetrics, num_tokens: int) -> None:
        """Add the gradient of coeff x mean negative log-likelihood of the examples; collective.

        This is the pretraining mix of InstructGPT, arXiv 2203.02155, eq. 2 (gamma is `coeff`). The
        mean is over the examples' tokens on all ranks. `num_tokens` is the number of tokens of the
        policy loss, by which `measured` later divides its sums.
        """
        ptx = self._objective.ptx
        if ptx is None or ptx.coeff == 0:
            return
        samples = ptx.batch(update)
        total = sum(sample.num_tokens for sample in samples)
        for indices in self._plan(samples):
            members = [samples[i] for i in indices]
            logprobs = self._forward(members or samples[:1])[0]  # idle ranks join collectives
            losses = -logprobs / total * (1.0 if members else 0.0)
            (losses.sum() * (ptx.coeff * self._num_data_ranks)).backward()
            shares = losses.detach() * num_tokens
            measured.add({"loss/ptx": shares, "loss/total": ptx.coeff * shares})

    def _weighted_losses(
        self, members: list[TrainSample], measured: UpdateMetrics, first: bool
    ) -> Tensor:
        """Return a micro-batch's losses [N] times loss weights; add its metrics to `measured`."""
        trainer_logprobs, entropy = self._forward(members)
        columns = token_columns(members, self.policy_version, self._device)
        generator_logprobs = columns["generator_logprobs"]
        start = trainer_logprobs.detach()  # right if the step has no other update
        if members[0].proximal_logprobs is not None:
            start = torch.cat([cast(Tensor, sample.proximal_logprobs) for sample in members])
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=generator_logprobs,
            advantages=columns["advantages"],
            sequence_ids=columns["sequence_ids"],
            staleness=self._options.contract.staleness(
                columns["token_versions"].long(), self.policy_version
            ),
            step=self._step,
            reference_logprobs=columns.get("reference_logprobs"),
            teacher_logprobs=columns.get("teacher_logprobs"),
            proximal_logprobs=start if self._policy_loss.from_proximal else None,
            entropy=entropy,
        )
        losses, token_metrics, correction = self._policy_loss(inputs, start)
        keep_weighted(members, correction)
        ratio = (trainer_logprobs.detach() - generator_logprobs).exp()
        measured.add({"ratio/mean": ratio, "ratio/max": ratio, "entropy": entropy, **token_metrics})
        if first:  # update of the step, or first update in which these samples are trained
            log_ratios = start - generator_logprobs
            measured.add_mismatch(log_ratios, correction, columns["is_fresh"])
            keep_logprobs(members, start)
        return losses * columns["weights"]

    def gather_weights(self) -> int:
        """Gather the current weights layer by layer; each rank copies the layers assigned to it.

        Call it between steps: a gather in another thread would interleave with FSDP's collectives.
        """
        self._exports[0].copy(self.policy_version)
        return self.policy_version

    def export_weights(
        self, version: int, base: int | None = None
    ) -> tuple[tuple[Manifest, NDArray[np.uint8]] | DeltaBucket, Manifest]:
        """Return this rank's share of `version`, or a delta to `base`; may run during a step."""
        return self._exports[0].bucket(version, base)

    def hold_state(self, copy: bool) -> None:
        """Keep the current state for a checkpoint; see `TrainerState.hold`."""
        layers = chain.from_iterable(export.layers() for export in self._exports)
        self._state.hold(self.policy_version, layers, copy=copy)

    def write_state(self, folder: str) -> str | None:
        """Write the state kept by `hold_state`; safe during a step. See `TrainerState.write`."""
        return self._state.write(Path(folder))

    def load_state(self, folder: str) -> None:
        """Restore a checkpoint written by any number of ranks; see `TrainerState.load`."""
        with self._on_device():
            self.policy_version = self._state.load(Path(folder))

    def close(self) -> None:
        """Write the traces of an unfinished profile and leave the process group."""
        if self._profiler is not None:
            self._profiler.stop()
        dist.destroy_process_group()


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; collective.

    `torch.nn.utils.clip_grad_norm_` rejects tensors on several meshes, which tensor parallelism
    produces. So this function computes one norm per mesh and combines the norms.
    """
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh[mesh].append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if total.isfinite():
        for group in by_mesh.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _nothing_to_train(samples: list[TrainSample]) -> str:
    failed = sum(sample.trajectory.failed for sample in samples)
    cut_off = sum(sample.trajectory.finish_reason == "length" for sample in samples)
    counts = f"{failed} failed, {cut_off} were cut off"
    return f"no token of its {len(samples)} responses can be trained: {counts}"
