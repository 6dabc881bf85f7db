"""Asynchronous GRPO, full finetune: generation and training overlapped on split hardware.

    tune run async_grpo_full_finetune_distributed --config tiny_async_grpo
    tune cp  async_grpo_full_finetune_distributed my_grpo.py     # fork it, edit it, run the copy
    tune run my_grpo.py --config my_config.yaml max_staleness=1

The whole algorithm is in this file. Its loops run side by side and meet in the replay buffer:

    rollout_loop, one per generator                training_loop
      has_room   for the responses of a group        take        a batch of whole, fresh groups *
      admit      when the staleness contract allows  shape       rewards minus penalties [B, G]
    rollout, one per group                           advantages                          [B, G]
      pull       weights every m rollouts or sooner  train_step  on every rank; version + 1
      generate   a group, rewards included           push        weights every n steps
      filter     drop if failed or rewards all equal finish_step record, evaluate, log, save
      reference  logprobs, where a KL needs them
      teacher    logprobs, where the config names one
      buffer     the group; wait while it is full    * `replay_generation` reuses trained groups

The default loss is `grpo_loss`, below. EDIT ME marks the places that a fork usually edits.
"""

from __future__ import annotations

import asyncio
import sys

import torch
from omegaconf import DictConfig
from torch import Tensor

from grpo_components.cluster import supervision
from grpo_components.cluster.cluster import build_cluster
from grpo_components.cluster.handles import GeneratorHandle
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.config import preflight
from grpo_components.config.data import build_data, build_prompts
from grpo_components.config.objective import build_objective
from grpo_components.config.open_run import open_run
from grpo_components.config.start_roles import start_roles
from grpo_components.errors import RoleLostError
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.losses import LossInputs


# EDIT ME: the policy loss of each trained token [N]; the config's `loss._component_` replaces it.
# To any loss, the config adds KL and entropy terms (`loss.kl_coeff`, `loss.entropy_coeff`).
def grpo_loss(
    tokens: LossInputs, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A): arXiv 2402.03300, eq. 3."""
    log_ratio = tokens.trainer_logprobs - tokens.anchor_logprobs  # log rho
    ratio = log_ratio.clamp(max=80).exp()  # no overflow, as 0 * inf is NaN
    low, high, advantages = 1 - clip_low, 1 + clip_high, tokens.advantages
    losses = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    return losses, {
        "ratio/mean": ratio.detach(),
        "ratio/max": ratio.detach(),
        "ratio/clip_fraction": (too_low | too_high).float(),
        "ratio/clip_fraction_low": too_low.float(),
        "ratio/clip_fraction_high": too_high.float(),
    }


class AsyncGRPOFullFinetuneRecipeDistributed:
    """Trains a policy by asynchronous GRPO, with Ray, torchrl, vLLM and torchtune.

    Features:
        - Generators (vLLM in torchrl collectors) and trainer ranks (FSDP2) on separate hardware.
        - A staleness contract: no token older than `max_staleness` policy versions is trained.
        - Trainers push their weights every n steps; generators pull them every m rollouts.
        - `max_staleness: 0` with n = m = 1 is the synchronous algorithm. With `colocate: true`,
          generators and trainers then take turns on the same hardware.
    """

    async def rollout_loop(self, generator: GeneratorHandle, loops: asyncio.TaskGroup) -> None:
        """Begin group after group until the run needs no more."""
        while await generator.has_room():
            entry = await self.ledger.admit(generator.name, self.publish_s)
            if entry is None:
                return
            loops.create_task(self.rollout(generator, entry))

    async def rollout(self, generator: GeneratorHandle, entry: LedgerEntry) -> None:
        """Generate one group, and put it into the buffer unless it is rejected."""
        try:
            await self.weights.pull_if_due(generator, entry)
            temperature = self.temperature(entry.target_step)
            summary = await generator.generate_group(entry, temperature)
            if self.roles.reward_model:
                summary = await self.roles.reward_model.add_scores(entry)
            if not self.run.has_trainable(entry, summary):
                return await self.ledger.drop([entry.group_id], "failed")
            sampling = self.dynamic_sampling
            if sampling and not sampling.keeps(summary.rewards, summary.successes):
                return await self.ledger.drop([entry.group_id], "filtered")
            if self.roles.references:
                await self.roles.references.add_logprobs(entry)
            if self.roles.teachers:
                await self.roles.teachers.add_logprobs(entry)
            await self.roles.buffer.add(entry)
        except RoleLostError:
            self.ledger.give_back(entry)  # it is generated again

    async def training_loop(self, loops: asyncio.TaskGroup) -> None:
        """Train batch after batch until every step of the run is done."""
        await self.run.begin(loops)
        while not self.ledger.finished:
            batch = await self.roles.buffer.take(self.groups_per_step)
            rewards = self.reward_shaping(batch, self.ledger.steps_done)
            advantages = self.advantages(rewards)
            result = await self.roles.trainers.train_step(batch, advantages)
            pushed = self.weights.push_if_due(result.policy_version, result.probe_logprobs)
            result.metrics.update(await pushed)
            await self.run.finish_step(batch, advantages, result)
        await self.run.finish()

    def setup(self, given: DictConfig) -> None:
        """Check the config, build what lives in this process, and start a process per role.

        Args:
            given: the config, whose keys are explained in `recipes/configs/tiny_async_grpo.yaml`.

        Raises:
            ValueError: the config cannot run; raised before Ray starts.
        """
        cfg = preflight.read_config(given)
        tokenizer, dataset, held_out = build_data(cfg)
        # EDIT ME: the loss. Put a coefficient of your own under `user:` in the config, and pass
        # partial(grpo_loss, my_coeff=cfg.user.my_coeff). The trainers get the loss by value.
        # EDIT ME: for advantages of your own, add advantages=my_function. It gets rewards, a NumPy
        # array [B, G] with NaN where a sample failed, and returns advantages [B, G].
        objective = build_objective(cfg, grpo_loss, tokenizer, dataset, held_out)
        self.advantages = objective.advantages_of
        self.reward_shaping = objective.reward_shaping
        self.dynamic_sampling = objective.dynamic_sampling
        self.temperature = objective.temperature

        self.groups_per_step, self.timeouts = cfg.groups_per_step, cfg.timeouts
        self.publish_s = cfg.publish_s  # longest time of a push and the steps before it
        contract = StalenessContract.of(cfg)
        prompts = build_prompts(cfg, dataset)
        self.ledger = Ledger(contract, 0 if cfg.eval_only else cfg.num_steps, prompts)
        self.records = open_run(
            cfg, self.ledger, prompts, self.temperature, tokenizer, dataset, held_out, __file__
        )
        log = self.records.log
        self.cluster = build_cluster(cfg, self.ledger, log.note, log.phase)
        self.cluster.start()
        longest = max(dataset.max_prompt_length, held_out.max_prompt_length)
        self.roles = start_roles(
            cfg, self.cluster, self.ledger, contract, objective, tokenizer, longest
        )
        self.weights = WeightSync(
            self.ledger,
            self.roles,
            push_every_n_steps=cfg.push_every_n_steps,
            pull_every_m_rollouts=cfg.pull_every_m_rollouts,
            push_early=self.records.evaluation.due,
            probe_kl=cfg.probe_kl,
        )
        self.run = self.records.run_with(self.roles, self.weights)

    async def train(self) -> None:
        """Run the loops to the end; roles that fail are restarted, other failures end the run."""
        await self.cluster.ready(self.timeouts.startup_s)
        await self.cluster.supervise(self.loops, self.run.begin_again, self.weights.recover)
        await self.cluster.close_roles(self.timeouts.shutdown_s)
        self.run.summary()

    async def loops(self) -> None:
        """Run all loops side by side to the end; called again after the trainers are restarted."""
        await self.run.restore()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.training_loop(loops))
            for generator in self.roles.generators:
                loops.create_task(self.rollout_loop(generator, loops))

    def cleanup(self) -> None:
        """Stop every process and close the logs, however the run ended."""
        with supervision.undisturbed():
            if hasattr(self, "cluster"):
                self.cluster.stop()
            if hasattr(self, "records"):
                self.records.close()


@preflight.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run the recipe; the command line overrides keys of the config."""
    recipe = AsyncGRPOFullFinetuneRecipeDistributed()
    try:
        recipe.setup(cfg)
        asyncio.run(recipe.train())
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(supervision.exit_code(recipe_main))
