"""A step is committed before anything is told of it, and saved once all checks have passed."""

import asyncio
from collections import Counter
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from grpo_components.cluster.batch import Batch
from grpo_components.records.run import RunRecords
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary

BATCH = Batch(MagicMock(), [], [], "hash", 3, 1, 0.5)
RESULT = StepResult(1, {0: 2}, {}, 2, "the loss is nan", {"loss/total": 0.25})


class Setting:
    """A run whose parts write down what they are asked for."""

    def __init__(self, evaluation_due=False):
        self.calls = calls = MagicMock()
        journal, evaluation, roles = calls.journal, calls.evaluation, calls.roles
        for method in ("commit", "save_if_due", "restore", "finish", "roll_back"):
            setattr(journal, method, AsyncMock(return_value=7))
        evaluation.due.return_value = evaluation_due
        evaluation.begin, evaluation.collect = AsyncMock(), AsyncMock(return_value={"eval/x": 1})
        roles.buffer.texts = AsyncMock(return_value=[])
        roles.buffer.begin_again, roles.server.begin_again = AsyncMock(), AsyncMock()
        calls.ledger.policy_version, calls.ledger.dropped_groups = 0, {"filtered": 4}
        calls.failures.take_count.return_value = 0
        calls.watch.bias.metrics.return_value = {}
        self.records = RunRecords(
            calls.start,
            calls.ledger,
            journal,
            calls.log,
            evaluation=evaluation,
            failures=calls.failures,
            agreement=calls.agreement,
            skipped_steps=calls.skipped_steps,
            rollouts_logged=2,
            watch=calls.watch,
        )
        self.run = self.records.run_with(roles, calls.weights)

    def order(self, *names):
        """Those of the calls, in the order in which they came."""
        return [call[0] for call in self.calls.mock_calls if call[0] in names]

    def finish_step(self, batch=BATCH):
        async def attempt():
            async with asyncio.TaskGroup() as tasks:
                await self.run.begin(tasks)
                self.calls.reset_mock()
                await self.run.finish_step(batch, np.zeros((1, 2)), RESULT)

        asyncio.run(attempt())


def test_metrics_of_rollouts_are_of_new_groups_and_those_of_reuse_are_added():
    groups = [
        GroupSummary(number, 0, [reward], [True], [2], [2], 0, 0, ["stop"], [], [{}], [1])
        for number, reward in ((7, 1.0), (3, 0.0))
    ]
    setting = Setting()
    setting.calls.ledger.reuse.metrics = {"reuse/share": 0.5}
    setting.finish_step(Batch(MagicMock(), groups, [], "hash", 3, 1, 0.5, reused=1))
    _, metrics, _ = setting.calls.log.step.call_args.args
    assert (metrics["rollout/reward_mean"], metrics["reuse/share"]) == (1.0, 0.5)


@pytest.mark.parametrize("evaluation_due", [False, True])
def test_a_step_is_committed_then_evaluated_logged_checked_and_saved(evaluation_due):
    setting = Setting(evaluation_due)
    setting.finish_step()
    names = ("journal.commit", "evaluation.begin", "log.step", "agreement.check")
    names = (*names, "watch.check_step")
    order = setting.order(*names, "journal.save_if_due")
    expected = [*names, "journal.save_if_due"]
    assert order == [name for name in expected if evaluation_due or name != "evaluation.begin"]
    setting.calls.journal.commit.assert_awaited_once_with("hash", RESULT, Counter())
    step, metrics, trained_tokens = setting.calls.log.step.call_args.args
    assert (step, trained_tokens) == (7, 2)
    assert metrics["loss/total"] == 0.25 and metrics["eval/x"] == 1
    assert metrics["buffer/size"] == 3 and metrics["time/step"] > 0
    counted = setting.calls.skipped_steps.record
    counted.assert_called_once_with(7, trained=False, why="the loss is nan")


def test_the_next_attempt_begins_in_the_journal_the_logs_and_the_empty_roles():
    setting = Setting()
    asyncio.run(setting.run.begin_again())
    assert setting.calls.log.attempt == setting.calls.failures.attempt == 7
    setting.calls.roles.server.begin_again.assert_awaited_once_with()
    setting.calls.roles.buffer.begin_again.assert_awaited_once_with()


def test_the_folder_is_unlocked_last():
    setting = Setting()
    setting.records.close()
    closed = [call[0] for call in setting.calls.mock_calls if call[0].endswith(".close")]
    assert closed == ["journal.close", "log.close", "start.close"]
