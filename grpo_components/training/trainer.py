"""One trainer rank: full finetune of the policy with FSDP2, and its weights for the generators."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchtune.training import OffloadActivations

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import Manifest, StateDict, pack_bucket
from grpo_components.models.hf_weights import hf_converter, layer_groups
from grpo_components.models.loading import DTYPES, load_sharded_model
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.meshes import Sharding, join_ranks
from grpo_components.models.micro_batches import plan_micro_batches
from grpo_components.models.packing import row_width
from grpo_components.objective.contracts import checked_aggregation
from grpo_components.objective.correction import Loss
from grpo_components.objective.losses import LossInputs
from grpo_components.objective.schedules import Schedule
from grpo_components.objective.token_advantages import TokenAdvantages
from grpo_components.training.checkpoint import TrainerState
from grpo_components.training.grad_norm import clip_grad_norm
from grpo_components.training.optimizers import set_learning_rate
from grpo_components.training.policy_loss import PolicyLoss
from grpo_components.training.profiling import StepProfiler
from grpo_components.training.resource_use import ResourceUse
from grpo_components.training.sample import Sample, make_samples, spread_advantages
from grpo_components.training.skip_reasons import UpdateWatch, nothing_to_train
from grpo_components.training.skipped_steps import dump_batch
from grpo_components.training.step_result import StepResult
from grpo_components.training.supervised import SupervisedExamples, SupervisedLoss
from grpo_components.training.token_logprobs import gather_logprobs, keep_logprobs
from grpo_components.training.token_metrics import TokenMetrics, is_usable, over_updates
from grpo_components.trajectory import PackedTrajectories, Trajectory, unpack


class Trainer:
    """One rank of the trainer group; every rank gets the same calls in the same order.

    Only the trainer counts `policy_version`: the number of batches trained.

    Args:
        rank: of this process in the group.
        num_ranks: size of the group.
        rendezvous: file through which the ranks find each other, on a path that all share.
        device: cpu or cuda.
        dtype: compute dtype, fp32 or bf16; master weights are fp32.
        sharding: layout of the ranks, and where shards and activations are kept.
        seed: the same on every rank.
        build_model: makes the torchtune decoder.
        build_checkpointer: makes the torchtune checkpointer of the base model.
        build_optimizer: makes the optimizer from the parameters.
        build_lr_scheduler: makes the scheduler from the optimizer; None keeps the rate constant.
        loss: the policy objective, per token.
        aggregation: trained tokens of each response [S] -> weight of each token's loss [S].
        off_policy: log ratios [N] of trainer to generator, response of each token [N] -> weights.
        learning_rate: by training step; None leaves it to optimizer and scheduler.
        contract: tokens older than it allows are masked.
        mask_overlong: responses that were cut off are not trained.
        model_type: torchtune's name of the family, for the conversion to Hugging Face names.
        base_model_path: folder of the base model.
        ppo_epochs: passes over each batch.
        updates_per_batch: optimizer updates in one pass.
        tokens_per_micro_batch: tokens in one forward pass, with padding.
        packing: sequences of a micro-batch share one row, for flex attention.
        logprob_chunk_tokens: positions projected at a time.
        clip_grad_norm: largest norm of the gradient; None does not clip.
        enable_activation_checkpointing: recompute layers in backward.
        compile_model: compile layers, softmax and loss with torch.compile.
        log_peak_memory_stats: measure this process's largest memory so far, in GiB.
        build_profiler: makes torchtune's profiler and its settings; None profiles nothing.
        skipped_folder: gets the batches of skipped steps.
        collective_timeout_s: a collective that waits longer raises.
        logged_responses: so many of each batch's first return the logprobs of their tokens.
        token_advantages: from each response's advantage to its tokens'; None gives them all that.
        ptx: examples of a supervised loss beside the policy's; None has none.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_ranks: int,
        rendezvous: str,
        device: str,
        dtype: str,
        sharding: Sharding,
        seed: int,
        build_model: Callable[[], nn.Module],
        build_checkpointer: Callable[[], Any],
        build_optimizer: Callable[[Any], Optimizer],
        build_lr_scheduler: Callable[[Optimizer], LRScheduler] | None,
        loss: Loss,
        aggregation: Callable[[NDArray[np.int64]], NDArray[np.float64]],
        off_policy: Callable[..., Tensor],
        learning_rate: Schedule | None,
        contract: StalenessContract,
        mask_overlong: bool,
        model_type: str,
        base_model_path: str,
        ppo_epochs: int,
        updates_per_batch: int,
        tokens_per_micro_batch: int,
        packing: bool,
        logprob_chunk_tokens: int,
        clip_grad_norm: float | None,
        enable_activation_checkpointing: bool,
        compile_model: bool,
        log_peak_memory_stats: bool,
        build_profiler: Callable[[], tuple[Any, Any]] | None,
        skipped_folder: str,
        collective_timeout_s: float,
        logged_responses: int = 0,
        token_advantages: TokenAdvantages | None = None,
        ptx: SupervisedExamples | None = None,
    ) -> None:
        self.policy_version = 0
        self._rank, self._num_ranks = rank, num_ranks
        self._num_data_ranks = sharding.num_data_ranks(num_ranks)
        self._device = torch.device(device)
        torch.manual_seed(seed)
        self._sharding = sharding
        meshes = join_ranks(rank, num_ranks, rendezvous, device, sharding, collective_timeout_s)
        self._model = load_sharded_model(
            build_model,
            build_checkpointer,
            meshes,
            sharding,
            model_type=model_type,
            dtype=dtype,
            enable_activation_checkpointing=enable_activation_checkpointing,
            compile_layers=compile_model,
        )
        self._activations = OffloadActivations() if sharding.offload_activations else nullcontext()
        self._logprobs = ResponseLogprobs(
            self._model,
            chunk_tokens=logprob_chunk_tokens,
            entropy_gradient=bool(getattr(loss, "entropy_coeff", 0)),
            compile_softmax=compile_model,
        )
        parts = (self._forward, self._plan, self._num_data_ranks)
        self._supervised = None if ptx is None else SupervisedLoss(ptx, *parts)
        self._optimizer = build_optimizer(self._model.parameters())
        self._lr_scheduler = build_lr_scheduler(self._optimizer) if build_lr_scheduler else None
        self._policy_loss = PolicyLoss(loss, off_policy, compile_loss=compile_model)
        self._aggregation, self._is_first_update, self._skipped_because = aggregation, True, ""
        self._token_advantages = token_advantages
        self._learning_rate, self._step = learning_rate, 0
        self._contract, self._mask_overlong = contract, mask_overlong
        base, scheduler = Path(base_model_path), self._lr_scheduler
        self._state = TrainerState(
            self._model, self._optimizer, scheduler, base, rank, num_ranks, self._device
        )
        self._to_hf = hf_converter(model_type, base)
        self._weights_dtype = DTYPES[dtype]
        self._gathered: dict[int, list[tuple[str, Tensor]]] = {}
        self._use = ResourceUse(self._model, self._device, dtype, num_ranks, log_peak_memory_stats)
        self._profiler = StepProfiler(build_profiler)
        self._skipped_folder, self._logged_responses = Path(skipped_folder), logged_responses
        self._ppo_epochs, self._updates_per_batch = ppo_epochs, updates_per_batch
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._packed_width = row_width(tokens_per_micro_batch) if packing else None
        self._max_grad_norm = math.inf if clip_grad_norm is None else clip_grad_norm

    def train_step(
        self, batch: PackedTrajectories, advantages: NDArray[np.float32], step: int
    ) -> StepResult:
        """Train on one global batch; each rank works on its part.

        Args:
            batch: the S = B * G trajectories of the step, in the order of group ids.
            advantages: [S] float32, one per trajectory.
            step: training steps done before this one, for the schedules.

        Returns:
            The outcome over the global batch, the same on every rank. The policy version stays
            where no update had a finite loss and gradient: a skipped step, whose
            `skipped_because` says why.
        """
        started = time.perf_counter()
        self._step, self._skipped_because = step, ""
        if self._learning_rate is not None:
            set_learning_rate(self._optimizer, self._learning_rate(step))
        trajectories, logged = unpack(batch), self._logged_responses
        samples = make_samples(trajectories, advantages, self._trained_tokens, logged)
        spread_advantages(samples, self._token_advantages, step)
        split = np.array_split(np.arange(len(samples)), self._updates_per_batch)
        parts = [[samples[i] for i in indices] for indices in split]
        several = self._ppo_epochs * self._updates_per_batch > 1
        start_known = several and (self._policy_loss.corrects or self._policy_loss.from_proximal)
        if start_known:
            for part in parts:
                self._fill_proximal_logprobs([s for s in part if s.num_tokens])
        updates: list[dict[str, float]] = []
        for epoch in range(self._ppo_epochs):
            for number, part in enumerate(parts):
                first = epoch == 0 and (number == 0 or start_known)
                index = (step * self._ppo_epochs + epoch) * len(parts) + number
                updates.append(self._update(part, index, with_mismatch=first))
        versions = np.concatenate([s.trajectory.token_versions[s.mask] for s in samples])
        trained = any(is_usable(update) for update in updates)
        if trained:
            self.policy_version += 1
            if self._lr_scheduler is not None:
                self._lr_scheduler.step()
        seconds = time.perf_counter() - started
        sequences = [(s.num_all_tokens, s.num_tokens) for s in samples if s.num_tokens]
        metrics: dict[str, Any] = {
            **over_updates(updates),
            **self._use.metrics(sequences, self._ppo_epochs, start_known, seconds),
            "policy_version": self.policy_version,
            "skipped_steps": step + 1 - self.policy_version,  # each of the others made a version
            "time/train": seconds,
        }
        why = "" if trained else self._skipped_because or nothing_to_train(trajectories)
        if why and self._rank == 0:
            told = metrics | {"skipped_because": why}
            dump_batch(self._skipped_folder, step + 1, batch, advantages, told)
        self._profiler.step()
        return StepResult(
            policy_version=self.policy_version,
            token_versions=dict(Counter(versions.tolist())),
            token_logprobs=gather_logprobs(samples),
            trained_tokens=len(versions),
            skipped_because=why,
            metrics=metrics,
        )

    def _trained_tokens(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """[R] which response tokens are trained: sampled by the policy, and none of the masked."""
        cut_off = self._mask_overlong and trajectory.finish_reason == "length"
        fresh = trajectory.token_versions >= self._contract.oldest_trainable(self.policy_version)
        return trajectory.response_mask & fresh & (not (trajectory.failed or cut_off))

    def _plan(self, samples: list[Sample]) -> list[list[int]]:
        lengths = [sample.num_all_tokens for sample in samples]
        costs = [self._use.flops.forward(length) for length in lengths]
        packed = self._packed_width is not None
        plan = plan_micro_batches(
            lengths, costs, self._num_data_ranks, self._tokens_per_micro_batch, packed=packed
        )
        return plan[self._rank // self._sharding.tensor]

    def _forward(self, members: list[Sample]) -> tuple[Tensor, Tensor]:
        masks = [sample.mask for sample in members]
        trajectories = [sample.trajectory for sample in members]
        batch = token_batch(trajectories, masks, packed_width=self._packed_width)
        with self._activations:
            return self._logprobs(batch.to(self._device))

    @torch.no_grad()
    def _fill_proximal_logprobs(self, samples: list[Sample]) -> None:
        """Logprobs of the policy that the step starts from, where later updates need them."""
        for indices in self._plan(samples) if samples else []:
            members = [samples[i] for i in indices] or samples[:1]  # in step with other ranks
            logprobs = self._forward(members)[0].cpu().split([s.num_tokens for s in members])
            for sample, values in zip(members, logprobs, strict=True):
                sample.proximal_logprobs = values.numpy()

    def _update(self, part: list[Sample], index: int, with_mismatch: bool) -> dict[str, float]:
        """The index-th optimizer update, on the aggregated loss of a global part of the batch."""
        samples = [sample for sample in part if sample.num_tokens]
        if not samples:  # the same on every rank
            return {}
        counts = np.array([sample.num_tokens for sample in part])
        total_tokens = int(counts.sum())
        measured, watch = TokenMetrics(), UpdateWatch()
        weights = checked_aggregation(self._aggregation, counts)
        for sample, weight in zip(part, weights.tolist(), strict=True):
            sample.loss_weight = weight
        learning_rate = self._optimizer.param_groups[0]["lr"]
        self._optimizer.zero_grad(set_to_none=True)
        for indices in self._plan(samples):
            if not indices:  # another rank has one more: take part in its collectives
                (self._forward(samples[:1])[0].sum() * 0.0).backward()
                continue
            members = [samples[i] for i in indices]
            losses = self._weighted_losses(members, measured, watch, first=with_mismatch)
            measured.add({"loss/total": losses * total_tokens})
            # FSDP averages over ranks; the weights are those of all tokens of all ranks.
            (losses.sum() * self._num_data_ranks).backward()
        if self._supervised is not None:
            self._supervised.backward(index, measured, total_tokens)
        grad_norm = clip_grad_norm(self._model.parameters(), self._max_grad_norm)
        metrics = measured.over_ranks(total_tokens, self._sharding.tensor)
        metrics["grad_norm"] = float(grad_norm)
        if is_usable(metrics):  # the same numbers on every rank
            self._optimizer.step()
        elif not self._skipped_because:
            first_of = self._policy_loss.name if self._is_first_update else ""
            self._skipped_because = watch.reason(self._model, metrics, first_of)
        self._is_first_update = False
        return {**metrics, "lr": float(learning_rate)}

    def _weighted_losses(
        self, members: list[Sample], measured: TokenMetrics, watch: UpdateWatch, first: bool
    ) -> Tensor:
        """Token losses [N] of one micro-batch, each times its response's weight."""
        trainer_logprobs, entropy = self._forward(members)
        counts = torch.tensor([sample.num_tokens for sample in members])

        def flat(values: list[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(values)).to(self._device)

        def recorded(name: str) -> Tensor:
            return flat([getattr(sample.trajectory, name)[sample.mask] for sample in members])

        generator_logprobs = recorded("generator_logprobs")
        sequence_ids = torch.arange(len(members)).repeat_interleave(counts).to(self._device)
        start = trainer_logprobs.detach()  # of the step, where this is its only update
        if members[0].proximal_logprobs is not None:
            start = flat([cast(Any, sample.proximal_logprobs) for sample in members])
        has_reference = members[0].trajectory.reference_logprobs is not None
        inputs = LossInputs(
            trainer_logprobs=trainer_logprobs,
            generator_logprobs=generator_logprobs,
            advantages=flat([cast(Any, sample.advantages) for sample in members]),
            sequence_ids=sequence_ids,
            staleness=self._contract.staleness(
                recorded("token_versions").long(), self.policy_version
            ),
            step=self._step,
            reference_logprobs=recorded("reference_logprobs") if has_reference else None,
            proximal_logprobs=start if self._policy_loss.from_proximal else None,
            entropy=entropy,
        )
        losses, token_metrics, correction = self._policy_loss(inputs, start)
        watch.saw(members, inputs, correction, losses)
        ratio = (trainer_logprobs.detach() - generator_logprobs).exp()
        measured.add({"ratio/mean": ratio, "ratio/max": ratio, "entropy": entropy, **token_metrics})
        if first:  # of the step, or of these members in it
            new = [sample.trajectory.oldest_version == self.policy_version for sample in members]
            fresh = torch.tensor(new).repeat_interleave(counts).to(self._device)
            measured.add_mismatch(start - generator_logprobs, correction, fresh)
            keep_logprobs(members, start)
        weights = torch.tensor([sample.loss_weight for sample in members], dtype=torch.float32)
        return losses * weights.repeat_interleave(counts).to(self._device)

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

    def export_weights(self, version: int) -> tuple[tuple[Manifest, NDArray[np.uint8]], Manifest]:
        """Convert and pack what `gather_weights` kept; safe beside the next train step.

        Args:
            version: what `gather_weights` returned.

        Returns:
            This rank's bucket (manifest and bytes), and its manifest alone, for the account.
        """
        bucket = pack_bucket(self._gathered.pop(version))
        return bucket, bucket[0]

    def _gather_layers(self) -> Iterator[StateDict]:
        state_dict = self._model.state_dict()
        for names in layer_groups(state_dict):
            full: StateDict = {}
            for name in names:
                value = state_dict[name]
                assert isinstance(value, DTensor)
                value = value.to(self._device, self._weights_dtype)  # may be offloaded
                full[name] = cast(DTensor, value).full_tensor()
            yield self._to_hf(full)

    def hold_state(self, copy: bool) -> None:
        """Keep the state of this moment for a checkpoint; see `TrainerState.hold`."""
        self._state.hold(self.policy_version, self._gather_layers(), copy=copy)

    def write_state(self, folder: str) -> str | None:
        """Write what is held, beside the next steps if need be; see `TrainerState.write`."""
        return self._state.write(Path(folder))

    def load_state(self, folder: str) -> None:
        """Go on from a checkpoint, of any number of ranks; see `TrainerState.load`."""
        self.policy_version = self._state.load(Path(folder))

    def close(self) -> None:
        """Write the traces of an unfinished profile, and leave the process group."""
        self._profiler.close()
        dist.destroy_process_group()
