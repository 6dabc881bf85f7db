"""One run beside its algorithm: what each step leaves behind, and where an attempt begins again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from numpy.typing import NDArray

from grpo_components.cluster.handles import Batch, Group, Roles
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.evaluation.evaluation import Evaluation
from grpo_components.exchange.ledger import Ledger
from grpo_components.records.agreement import GeneratorAgreement
from grpo_components.records.checkpoints import Checkpoints
from grpo_components.records.failed_samples import FailedSamples
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart, Stateful, roll_back
from grpo_components.records.run_log import RunLog
from grpo_components.records.step_metrics import buffer_metrics, rollout_metrics
from grpo_components.training.skipped_steps import SkippedSteps
from grpo_components.training.step_result import StepResult


class Run:
    """Commits each step (ledger, receipt, checkpoint), evaluates, logs, saves and restores.

    Args:
        start: where the run begins.
        ledger: of the run.
        prompts: that the ledger draws from.
        log: metrics, sampled rollouts and progress.
        receipts: of the run.
        checkpoints: of the run.
        evaluation: of held-out prompts.
        failures: of samples.
        agreement: of trainers and generators on the same tokens.
        skipped_steps: counts steps that trained nothing.
        save_every_n_steps: training steps from one checkpoint to the next.
        rollouts_logged: groups of each step that are logged as text.
    """

    def __init__(
        self,
        start: RunStart,
        ledger: Ledger,
        prompts: Stateful,
        *,
        log: RunLog,
        receipts: Receipts,
        checkpoints: Checkpoints,
        evaluation: Evaluation,
        failures: FailedSamples,
        agreement: GeneratorAgreement,
        skipped_steps: SkippedSteps,
        save_every_n_steps: int,
        rollouts_logged: int,
    ) -> None:
        self._start, self._ledger, self._prompts = start, ledger, prompts
        self.log, self._receipts, self._checkpoints = log, receipts, checkpoints
        self.evaluation, self._failures = evaluation, failures
        self._agreement, self._skipped_steps = agreement, skipped_steps
        self._save_every_n_steps, self._rollouts_logged = save_every_n_steps, rollouts_logged
        self._roles: Roles
        self._weights: WeightSync
        self._tasks: asyncio.TaskGroup

    def connect(self, roles: Roles, weights: WeightSync) -> None:
        """Hand over what is there only after the roles were started."""
        self._roles, self._weights = roles, weights

    def acknowledge(self, generator: str, version: int, loaded: str, published: str) -> None:
        """Record a pull in the receipts; see `Receipts.acknowledged`."""
        self._receipts.acknowledged(generator, version, loaded, published)

    async def restore(self) -> None:
        """Load the checkpoint that this attempt goes on from, if any, into every role."""
        if self._start.checkpoint:
            await self._checkpoints.restore(
                self._start.checkpoint, self._roles.trainers, self._roles.buffer
            )
        if self._start.attempt or self._start.checkpoint:
            await self._weights.restore()

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Evaluate before the first step.

        Args:
            tasks: the loops; evaluations run beside them.
        """
        self._tasks = tasks
        self.log.phase("evaluating the policy")
        await self._evaluate(self._ledger.steps_done)
        await self.evaluation.collect()

    def has_trainable(self, group: Group) -> bool:
        """Count a group's tokens and failed samples; whether any sample is left to train."""
        if self._failures.count_group(group.entry, group.summary):
            return False
        self.log.count_generated(sum(group.summary.response_tokens))
        return True

    async def finish_step(self, batch: Batch, advantages: NDArray[Any], result: StepResult) -> None:
        """Commit a step to ledger, receipts and checkpoint; evaluate, log and save where due.

        Args:
            batch: that was trained.
            advantages: [B, G] that it was trained with.
            result: of the trainers.
        """
        ledger, trained_from = self._ledger, self._ledger.policy_version
        metrics = self._metrics(batch, result, trained_from)
        await ledger.finish_step(result.policy_version)
        step = ledger.steps_done
        # No await until `hold`: a checkpoint must have the very state that its receipt tells of.
        correction_mass = result.metrics["off_policy/correction_mass"]
        self._receipts.step(
            step, result.policy_version, result.token_versions, correction_mass, batch.batch_hash
        )
        self._checkpoints.hold()
        metrics["time/step"] = time.perf_counter() - batch.began
        if self.evaluation.due(step):
            await self._evaluate(step)
        metrics |= await self.evaluation.collect(step)
        await self._log(step, batch, advantages, result, metrics)
        self._agreement.check(step, metrics)
        why = result.skipped_because
        self._skipped_steps.record(step, trained=not why, why=why)
        if step % self._save_every_n_steps == 0 or ledger.finished:
            await self._checkpoints.save(step, self._roles.trainers, self._roles.buffer)

    async def finish(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._checkpoints.finish()

    async def begin_again(self) -> None:
        """Go back to the last checkpoint, in the next attempt, with new trainers."""
        await self._checkpoints.wait_idle()
        self._receipts.close()
        self._start = roll_back(self._start, self._ledger, self._prompts)
        attempt = self._ledger.attempt = self._start.attempt
        self._receipts = self._receipts.next_attempt(attempt)
        for log in (self.log, self._ledger.turns, self._failures):
            log.attempt = attempt
        await asyncio.gather(self._roles.server.begin_again(), self._roles.buffer.begin_again())

    def summary(self) -> None:
        """Show the closing summary.

        Raises:
            SkippedStepsError: if no step of the run trained anything.
        """
        outcome = self._ledger.turns.outcome()
        self.log.summary(self._ledger.dropped_groups, outcome, self._skipped_steps.summary())
        self._skipped_steps.check_trained()

    def close(self) -> None:
        """Close the logs and give up the folder, however the run ended."""
        for part in (self._ledger.turns, self._receipts, self.log, self._start):
            part.close()

    async def _evaluate(self, step: int) -> None:
        await self.evaluation.begin(step, self._roles.generators, self._weights.pull, self._tasks)

    def _metrics(self, batch: Batch, result: StepResult, trained_from: int) -> dict[str, Any]:
        filtered = self._ledger.dropped_groups["filtered"]
        counts = (batch.buffered, batch.dropped_stale, filtered, self._failures.take_count())
        return {
            **buffer_metrics(batch.waited_s, *counts),
            **rollout_metrics(batch.groups, trained_from, result.token_versions),
            **result.metrics,
        }

    async def _log(
        self,
        step: int,
        batch: Batch,
        advantages: NDArray[Any],
        result: StepResult,
        metrics: dict[str, Any],
    ) -> None:
        texts = await self._roles.buffer.texts(batch.entries[: self._rollouts_logged])
        self.log.rollouts(step, batch.entries, texts, advantages, result.token_logprobs)
        self.log.step(step, metrics, result.trained_tokens)
