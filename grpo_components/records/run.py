"""Handles the logs, evaluations, checkpoints and rollbacks around a run's training steps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.handles import Roles
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.evaluation.evaluation import Evaluation
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.records.guards import FailedSamples, RunWatch, SkippedSteps, check_agreement
from grpo_components.records.journal import Journal
from grpo_components.records.resume import RunStart
from grpo_components.records.run_log import RunLog
from grpo_components.records.step_metrics import reward_use, rollout_metrics, session_counts
from grpo_components.settings import Settings
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary


@dataclass(frozen=True)
class RunRecords:
    """The parts of a run that write to its folder; they outlive its roles (Ray processes)."""

    cfg: Settings
    start: RunStart
    ledger: Ledger
    journal: Journal
    log: RunLog
    evaluation: Evaluation
    failures: FailedSamples
    watch: RunWatch
    curriculum: PromptCurriculum | None = None
    """Curriculum that draws the run's prompts; None without one."""

    def run_with(self, roles: Roles, weights: WeightSync) -> Run:
        """Return a `Run` with these records, on roles that have been started."""
        return Run(self, roles, weights)

    def close(self) -> None:
        """Close the logs and unlock the folder, however the run ended."""
        for part in (self.journal, self.log, self.start.lock):
            part.close()


class Run:
    """Does what surrounds the training steps: evaluates, logs, saves, restores and rolls back."""

    def __init__(self, records: RunRecords, roles: Roles, weights: WeightSync) -> None:
        self._records, self._roles, self._weights = records, roles, weights
        self._ledger, self._journal, self._log = records.ledger, records.journal, records.log
        self._cfg, self._evaluation = records.cfg, records.evaluation
        self._skipped_steps = SkippedSteps(records.cfg.max_skipped_steps, records.log.note)
        self._tasks: asyncio.TaskGroup | None = None

    async def restore(self) -> None:
        """Bring the roles to the state that this attempt starts from; do nothing in a new run."""
        await self._journal.restore(self._roles, self._weights)

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Evaluate the policy before an attempt's first step; all evaluations run in `tasks`."""
        self._tasks = tasks
        if self._evaluation.is_on:
            self._log.phase("evaluating the policy", shown=True)
            await self._evaluate(self._ledger.steps_done)
            await self._evaluation.collect()
        if not self._ledger.finished:
            self._log.phase("first step")

    def has_trainable(self, entry: LedgerEntry, summary: GroupSummary) -> bool:
        """Count a group's tokens and failed samples; return whether any sample can be trained."""
        if self._records.failures.count_group(entry, summary):
            return False
        self._records.watch.count_group(summary)
        self._log.count_generated(sum(summary.response_tokens))
        return True

    async def finish_step(self, batch: Batch, advantages: NDArray[Any], result: StepResult) -> None:
        """Commit a trained step and log it; evaluate and save a checkpoint if due."""
        metrics = self._metrics(batch, result)
        sessions = session_counts(batch.groups)
        step = await self._journal.commit(batch.batch_hash, result, sessions)
        metrics |= self._records.curriculum.metrics if self._records.curriculum else {}
        metrics |= self._ledger.reuse.metrics
        metrics["time/step"] = time.perf_counter() - batch.began
        if self._evaluation.due(step):
            await self._evaluate(step)
        metrics |= await self._evaluation.collect(step)
        metrics |= reward_use([generator.reward_use for generator in self._roles.generators])
        logged = batch.entries[: self._cfg.rollouts_logged_per_step]
        texts = await self._roles.buffer.texts(logged)
        self._log.rollouts(step, batch.entries, texts, advantages, result.token_logprobs)
        self._log.step(step, metrics, result.trained_tokens)
        check_agreement(self._cfg.max_generator_kl, step, metrics)
        self._records.watch.check_step(step, metrics)
        self._skipped_steps.record(step, result.skipped_because)
        await self._journal.save_if_due(step, self._roles, batch.packed)

    async def finish(self) -> None:
        """Wait until the last checkpoint has been written."""
        self._log.phase("last checkpoint")
        await self._journal.finish()

    async def begin_again(self) -> None:
        """Start the next attempt from the last checkpoint, after the trainers restarted."""
        await self._journal.roll_back()
        await asyncio.gather(self._roles.server.begin_again(), self._roles.buffer.begin_again())

    def summary(self) -> None:
        """Show the run's closing summary; after `replay_until`, show how to go on instead."""
        if (until := self._cfg.replay_until) is not None:
            how = "resume_from_checkpoint=true, without replay_events"
            return self._log.note(f"steps 1 to {until} repeated; to go on with other keys: {how}")
        skipped, recording = self._skipped_steps.summary(), self._ledger.events.recording
        replayed = recording.summary() if recording else ""
        self._journal.close()  # the summary's table of groups needs the end record
        self._log.summary(replayed, skipped)

    async def _evaluate(self, step: int) -> None:
        assert self._tasks is not None, "`begin` comes first"
        generators, pull = self._roles.generators, self._weights.pull
        await self._evaluation.begin(step, generators, pull, self._tasks)

    def _metrics(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        trained_from, new = self._ledger.policy_version, len(batch.groups) - batch.reused
        groups = batch.groups[:new], batch.groups[new:]
        return {
            "time/wait_for_batch": batch.waited_s,
            "time/push": 0.0,
            "push/bytes": 0,
            "buffer/size": batch.buffered,
            "buffer/dropped_stale": batch.dropped_stale,
            "buffer/filtered": self._ledger.dropped_groups["filtered"],
            "rollout/failed_samples": self._records.failures.take_count(),
            **rollout_metrics(groups[0], trained_from, result.token_versions, groups[1]),
            **result.metrics,
        }
