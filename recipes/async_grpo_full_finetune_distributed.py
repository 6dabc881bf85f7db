"""Asynchronous GRPO, full finetune: generation and training overlapped on split hardware.

    tune run async_grpo_full_finetune_distributed --config tiny_async_grpo
    tune cp  async_grpo_full_finetune_distributed my_grpo.py     # fork it, edit it, run the copy
    tune run my_grpo.py --config my_config.yaml max_staleness=1

The whole algorithm is in this file: `rollout_loop` (one per rollout in flight) and `training_loop`
run side by side and meet in the replay buffer. Put your loss or advantages in `setup` at EDIT ME.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch  # noqa: F401 -- for a loss of yours in this file
from omegaconf import DictConfig
from torchtune import config

from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.objective.contracts import advantages_of
from grpo_components.objective.dynamic_sampling import DynamicSampling
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.objective.schedules import as_schedule
from grpo_components.rollout.prompt_stream import PromptStream
from grpo_components.running import preflight
from grpo_components.running.agreement import GeneratorAgreement
from grpo_components.running.building import build, build_data
from grpo_components.running.checkpoints import build_checkpoints
from grpo_components.running.cluster import build_cluster
from grpo_components.running.component_trial import try_components
from grpo_components.running.evaluation import build_evaluation
from grpo_components.running.event_log import open_turns
from grpo_components.running.failed_samples import build_failed_samples
from grpo_components.running.partial_runs import roles_of
from grpo_components.running.quiet import quiet_libraries
from grpo_components.running.receipts import build_receipts
from grpo_components.running.recovery import refill
from grpo_components.running.resume import begin_run, roll_back
from grpo_components.running.role import Role
from grpo_components.running.role_arguments import RoleArguments, role_arguments, shaping_settings
from grpo_components.running.run_log import build_run_log
from grpo_components.running.step_metrics import buffer_metrics, rollout_metrics
from grpo_components.running.supervision import RoleLostError, exit_code, undisturbed
from grpo_components.training.skipped_steps import SkippedSteps

# Dotted paths: each role's module is imported in the role's own process only.
GENERATOR = "grpo_components.rollout.generator.Generator"
REFERENCE = "grpo_components.training.reference.Reference"
REWARD_MODEL = "grpo_components.training.reward_model.RewardModel"
REPLAY_BUFFER = "grpo_components.exchange.replay_buffer.ReplayBuffer"
TRAINER = "grpo_components.training.trainer.Trainer"
PARAMETER_SERVER = "grpo_components.exchange.parameter_server.VLLMParameterServer"
GRACE_S = 30  # a role's own time-out comes first: its error says more


@dataclass
class GeneratorState:
    """What the loops know of one generator."""

    role: Role
    pulling: Any  # held by who pulls or evaluates
    version: int = 0
    rollouts_since_pull: int = 0


class AsyncGRPOFullFinetuneRecipeDistributed:
    """Asynchronous GRPO with Ray, torchrl, vLLM and torchtune.

    Features:
        - Generators (vLLM in torchrl collectors) and trainer ranks (FSDP2) on separate hardware.
        - A staleness contract: no token older than `max_staleness` policy versions is trained.
        - Weights by push (trainer, every n steps) and pull (generators, every m rollouts).
        - `max_staleness: 0` with n = m = 1 is the synchronous algorithm.
    """

    async def run(self) -> None:
        """Run the loops; roles that fail are restarted, other failures end the run."""
        await self.cluster.ready(self.timeouts.startup_s)
        await self.cluster.supervise(self.loops, self.begin_again)
        await self.cluster.close_roles(self.timeouts.shutdown_s)
        self.run_log.summary(self.ledger.dropped_groups, self.turns.outcome(), self.skips.told())
        self.skips.check_trained()

    async def loops(self) -> None:
        """All loops side by side, from the beginning of an attempt to the end of the run."""
        if self.beginning.attempt or self.beginning.checkpoint:
            await self.restore()
        self.run_log.phase("evaluating the policy")
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.training_loop(loops))
            for generator in self.generators:
                for _ in range(self.rollouts_in_flight):
                    loops.create_task(self.rollout_loop(generator))

    async def rollout_loop(self, generator: GeneratorState) -> None:
        """Admit a group, generate it (rewards included), filter, add reference logprobs, buffer."""
        role, timeouts = generator.role, self.timeouts
        while entry := await self.ledger.admit(role.name, timeouts.train_step_s):
            try:
                await self.pull_if_due(generator, entry)
                identity = (entry.prompt, entry.epoch, entry.group_id, self.beginning.attempt)
                temperature = self.temperature(entry.target_step)
                group, summary, entry.text = role.submit(
                    "generate_group", *identity, temperature, num_returns=3
                )
                turn = self.turns.awaited("finish", group=entry.group_id)
                learned = await role.result(summary, "generate_group", timeouts.rollout_s, turn)
            except RoleLostError:  # another generator takes the group
                return await self.ledger.given_back(entry)
            await self.ledger.generated(entry.group_id, learned.response_tokens)
            if scorer := self.reward_model:
                scored = scorer.submit("add_scores", group, entry.text, num_returns=3)
                group, summary, entry.text = scored
                learned = await scorer.result(summary, "add_scores", timeouts.rollout_s)
            if self.failures.in_group(entry, learned):  # all of its samples failed
                await self.ledger.dropped([entry.group_id], "failed")
                continue
            self.run_log.generated(sum(learned.response_tokens))
            filtering = self.dynamic_sampling
            if filtering and not filtering.keeps(learned.rewards, learned.successes):
                await self.ledger.dropped([entry.group_id], "filtered")
                continue
            if self.references:
                reference = self.references[entry.group_id % len(self.references)]
                group, kl = reference.submit("add_logprobs", group, num_returns=2)
                entry.reference_kl = await reference.result(kl, "add_logprobs", timeouts.rollout_s)
            entry.parts = (group, summary)
            await self.buffer.call("add", *entry.parts, timeout_s=timeouts.batch_s + GRACE_S)
            await self.ledger.buffered(entry.group_id)

    async def training_loop(self, beside: asyncio.TaskGroup) -> None:
        """Take a batch, compute advantages, train on every rank, push; evaluate, log, save."""
        await self.evaluation.begin(self.ledger.steps_done, self.generators, beside)
        await self.evaluation.finished()
        while not self.ledger.finished:
            started = time.perf_counter()
            batch, taken, entries, metrics = await self.take_batch()
            done, start_version = self.ledger.steps_done, self.ledger.policy_version
            advantages = advantages_of(self.advantages, self.shaped_rewards(taken.groups, entries))
            trained = (await self.on_trainers("train_step", batch, advantages.ravel(), done))[0]
            token_versions, why = trained.pop("token_versions"), trained.pop("skipped_because", "")
            metrics |= rollout_metrics(taken.groups, start_version, token_versions) | trained
            step, version = done + 1, trained["policy_version"]
            evaluating = self.evaluation.due(step)
            push_due = 1 if evaluating else self.push_every_n_steps
            if version - self.ledger.published_version >= push_due:
                metrics["time/push"] = await self.push()
            await self.ledger.stepped(version)
            correction_mass = metrics["off_policy/correction_mass"]
            self.receipts.step(step, version, token_versions, correction_mass, taken.batch_hash)
            self.checkpoints.hold()
            metrics["time/step"] = time.perf_counter() - started
            if evaluating:
                await self.evaluation.begin(step, self.generators, beside)
            metrics |= await self.evaluation.finished(step)
            await self.log(step, metrics, entries, advantages)
            self.agreement.check(step, metrics)
            self.skips.stepped(step, version > start_version or self.rollout_only, why)
            if step % self.save_every_n_steps == 0 or self.ledger.finished:
                await self.checkpoints.save(step, self.trainers, self.buffer)
        await self.checkpoints.finish()

    async def restore(self) -> None:
        """Go on from where an attempt begins; generators have its weights before they sample."""
        if self.beginning.checkpoint:
            await self.checkpoints.restore(self.beginning.checkpoint, self.trainers, self.buffer)
        await self.push()
        living, timeout_s = [g for g in self.generators if not g.role.lost], self.timeouts.weights_s
        await asyncio.gather(*(g.role.call("begin_attempt", timeout_s=timeout_s) for g in living))
        await asyncio.gather(*(self.pull(g, "restore", has=-1) for g in living))

    async def begin_again(self) -> None:
        """Back to the last checkpoint, in the next attempt, after new trainers were started."""
        await self.checkpoints.settled()
        self.receipts.close()
        self.beginning = roll_back(self.beginning, self.ledger, self.prompts)
        self.receipts = self.receipts.next_attempt(self.beginning.attempt)
        for log in (self.run_log, self.turns, self.failures):
            log.attempt = self.beginning.attempt
        await asyncio.gather(self.server.begin_again(), self.buffer.begin_again())

    async def pull_if_due(self, generator: GeneratorState, entry: LedgerEntry) -> None:
        """Pull every m rollouts, and when a group needs newer weights than its generator has."""

        def due() -> bool:
            by_count = generator.rollouts_since_pull >= self.pull_every_m_rollouts
            newer = not self.turns.pinned and generator.version < self.ledger.published_version
            return (by_count and newer) or generator.version < entry.needed_version

        if self.turns.replaying or due():  # a replay pulls where the recorded run did
            async with generator.pulling:
                if self.turns.replaying or due():  # one pull serves all that waited for it
                    await self.pull(generator, f"group {entry.group_id}")
        generator.rollouts_since_pull += 1
        entry.start_version = generator.version

    async def pull(self, generator: GeneratorState, cause: str, has: int | None = None) -> None:
        """Server -> generator: load the newest published weights, where they are newer.

        Args:
            generator: that loads them.
            cause: what it needs them for.
            has: the version of its weights, where it lost what it had; -1 is any.
        """
        role, timeout_s = generator.role, self.timeouts.weights_s
        generator.rollouts_since_pull = 0
        generator.version = generator.version if has is None else has
        if await self.ledger.pulls(role.name, generator.version, cause):
            version, buckets, manifests = await self.server.call("newest", timeout_s=timeout_s)
            loading = role.submit("load_weights", version, *buckets, once=True)
            answer = await role.result(loading, "load_weights", timeout_s)
            if answer is None:  # it was restarted, and has pulled newer ones by that
                return
            generator.version, loaded = answer
            exports = zip(self.trainers, manifests, strict=True)
            pushed = [await t.answer(part, "export_weights", timeout_s) for t, part in exports]
            self.receipts.acknowledged(role.name, version, loaded, snapshot_checksum(pushed))
            await self.server.call("acknowledge", role.name, version, timeout_s=timeout_s)

    async def push(self) -> float:
        """Trainer -> server: publish the weights; packing them overlaps the next step.

        Returns:
            Seconds that training stood still.
        """
        started = time.perf_counter()
        version = (await self.on_trainers("gather_weights"))[0]
        exports = [
            trainer.submit("export_weights", version, num_returns=2, lane="export")
            for trainer in self.trainers
        ]
        buckets, manifests = zip(*exports, strict=True)
        timeout_s = self.timeouts.weights_s
        await self.turns.take("push", version=version)
        await self.server.call("push", version, buckets, manifests, timeout_s=timeout_s)
        await self.ledger.published(version)
        return time.perf_counter() - started

    async def take_batch(self) -> tuple[Any, Any, list[LedgerEntry], dict[str, float]]:
        """Consume one batch of whole, fresh groups; stale ones are dropped and issued again.

        Returns:
            The packed batch, its `BatchSummary`, the ledger's entries, and what was measured.
        """
        started, timeout_s, dropped, taken = time.perf_counter(), self.timeouts.batch_s, 0, None
        while not (taken and taken.groups):  # a take that only found stale groups has no batch
            if self.wait_for_stale_groups:
                await self.ledger.until_none_is_doomed(timeout_s)
            batch, summary = self.buffer.submit(
                "take", *self.ledger.next_batch(self.groups_per_step), num_returns=2
            )
            taken = await self.buffer.result(summary, "take", timeout_s + GRACE_S)
            stale = [group.group_id for group in taken.dropped]
            entries = await self.ledger.taken([group.group_id for group in taken.groups], stale)
            dropped += len(stale)
        waited_s, filtered = time.perf_counter() - started, self.ledger.dropped_groups["filtered"]
        counts = (taken.buffered, dropped, filtered, self.failures.count())
        return batch, taken, entries, buffer_metrics(waited_s, *counts)

    def shaped_rewards(self, groups: list[Any], entries: list[LedgerEntry]) -> Any:
        """The batch's rewards [B, G], less KL and overlong penalties where the config has them."""
        rewards = np.array([group.rewards for group in groups])
        lengths = np.array([group.response_lengths for group in groups])
        cut_off = np.array([group.finish_reasons for group in groups]) == "length"
        kl = np.array([entry.reference_kl for entry in entries]) if self.references else None
        return self.reward_shaping(rewards, lengths, kl, self.ledger.steps_done, cut_off)

    async def log(self, step: int, metrics: dict, entries: list, advantages: Any) -> None:
        """Log one step's metrics, and a few of its groups as text."""
        shown = [entry.text for entry in entries[: self.rollouts_logged]]
        texts = [text and await self.buffer.answer(text, "a group's text", 60) for text in shown]
        self.run_log.rollouts(step, entries, texts, advantages, metrics.pop("token_logprobs"))
        self.run_log.step(step, metrics)

    async def on_trainers(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every trainer rank at once (they meet in collectives)."""
        timeout_s = self.timeouts.train_step_s
        calls = (trainer.call(method, *args, timeout_s=timeout_s) for trainer in self.trainers)
        return await asyncio.gather(*calls)

    def setup(self, cfg: DictConfig) -> None:
        """Check the config, build what lives in this process, and start a process per role.

        Args:
            cfg: the keys are explained in `recipes/configs/tiny_async_grpo.yaml`.

        Raises:
            ValueError: for a config that cannot run, before Ray starts.
        """
        cfg = preflight.check(cfg)
        quiet_libraries(cfg.log_level)
        tokenizer, dataset, held_out = build_data(cfg)
        # EDIT ME: the objective per token, the weight of each token's loss in the batch's, and the
        # correction for what lies between generator and trainer; by value to the trainer.
        loss = build("loss", cfg.loss)
        aggregation = build("aggregation", cfg.aggregation)
        off_policy = build("off_policy", cfg.off_policy)
        ptx = build("ptx", cfg.ptx, tokenizer) if cfg.ptx else None  # a supervised loss beside it
        self.advantages = build("advantages", cfg.advantages)  # EDIT ME: rewards [B, G] -> [B, G]
        self.reward_shaping = RewardShaping(**shaping_settings(cfg))
        dynamic = cfg.dynamic_sampling
        self.dynamic_sampling = DynamicSampling(dynamic.max_discarded) if dynamic.enabled else None
        self.temperature = as_schedule("generator.temperature", cfg.generator.temperature)
        objective = {"loss": loss, "aggregation": aggregation, "off_policy": off_policy, "ptx": ptx}
        try_components(cfg, tokenizer, dataset, self.advantages, self.reward_shaping, objective)
        self.timeouts, self.rollout_only = cfg.timeouts, cfg.rollout_only
        self.groups_per_step, self.rollouts_in_flight = cfg.groups_per_step, cfg.rollouts_in_flight
        self.push_every_n_steps = cfg.push_every_n_steps
        self.save_every_n_steps = cfg.save_every_n_steps
        self.pull_every_m_rollouts = cfg.pull_every_m_rollouts
        self.wait_for_stale_groups = cfg.stale_groups == "wait"
        self.rollouts_logged = cfg.rollouts_logged_per_step
        contract = StalenessContract(cfg.max_staleness, cfg.groups_per_step)
        self.prompts = PromptStream(dataset, shuffle=cfg.shuffle, seed=cfg.seed)
        self.ledger = Ledger(contract, 0 if cfg.eval_only else cfg.num_steps, self.prompts)
        begun = self.beginning = begin_run(cfg, self.ledger, self.prompts)
        attempt = begun.attempt
        self.turns = self.ledger.turns = open_turns(cfg, attempt)
        self.run_log = build_run_log(cfg, attempt, begun.note, dataset, held_out)
        self.failures = build_failed_samples(cfg, attempt, self.run_log.note)
        self.agreement = GeneratorAgreement(cfg.max_generator_kl)
        self.skips = SkippedSteps(cfg.max_skipped_steps, cfg.output_dir, self.run_log.note)
        self.checkpoints = build_checkpoints(cfg, self.ledger, self.prompts, self.run_log, begun)
        parts = (self.temperature, self.pull, self.failures.in_evaluation, self.turns)
        parts = (*parts, (self.run_log.evaluation, self.checkpoints.evaluated))
        self.evaluation = build_evaluation(cfg, held_out, *parts)
        self.receipts = build_receipts(cfg, self.ledger, attempt, begun.identity)
        self.run_log.phase("starting Ray and the roles")
        self.cluster = build_cluster(cfg, attempt, self.run_log.note, self.turns)
        self.cluster.start()
        compared = (loss, self.reward_shaping, self.advantages)
        needs_reference = any(getattr(part, "needs_reference", False) for part in compared)
        num_references = cfg.num_references if needs_reference else 0
        arguments = role_arguments(
            cfg,
            contract=contract,
            objective=objective | {"token_advantages": getattr(self.advantages, "per_token", None)},
            num_references=num_references,
            stop_tokens=tokenizer.stop_tokens,
            longest_prompt=max(dataset.max_prompt_length, held_out.max_prompt_length),
            rendezvous=str(self.cluster.rendezvous),
        )
        self.spawn_roles(cfg, arguments, num_references)

    def spawn_roles(self, cfg: DictConfig, arguments: RoleArguments, num_references: int) -> None:
        """Start a process per role, side by side; `run` waits until they are ready."""
        spawn = self.cluster.spawn
        trainer, generator = roles_of(cfg, TRAINER, GENERATOR)  # or what stands in for them
        self.server = spawn("parameter_server", PARAMETER_SERVER, remembers="push")
        self.buffer = spawn("replay_buffer", REPLAY_BUFFER, **arguments.replay_buffer)
        self.buffer.recover = partial(refill, self.buffer, self.ledger, self.timeouts.weights_s)
        self.trainers = [
            spawn(f"trainer_{rank}", trainer, restarts_alone=False, rank=rank, **arguments.trainer)
            for rank in range(cfg.num_trainers)
        ]
        self.references = [
            spawn(f"reference_{n}", REFERENCE, **arguments.reference) for n in range(num_references)
        ]
        path, scoring = cfg.reward_model.path, arguments.reward_model
        self.reward_model = spawn("reward_model", REWARD_MODEL, **scoring) if path else None
        generators = [
            spawn(f"generator_{number}", generator, number=number, **arguments.generator)
            for number in range(cfg.num_generators)
        ]
        self.generators = [GeneratorState(role, self.turns.lock()) for role in generators]
        for generator in self.generators:
            generator.role.recover = partial(self.pull, generator, "restart", has=0)

    def cleanup(self) -> None:
        """Stop every process, close the logs, give up the folder, however the run ended."""
        with undisturbed():
            if hasattr(self, "cluster"):
                self.cluster.stop()
            for part in ("turns", "receipts", "run_log", "beginning"):
                if hasattr(self, part):
                    getattr(self, part).close()


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Run it with a config (`tune ls` has some), whose keys the command line overrides."""
    recipe = AsyncGRPOFullFinetuneRecipeDistributed()
    try:
        recipe.setup(cfg)
        asyncio.run(recipe.run())
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(exit_code(recipe_main))
