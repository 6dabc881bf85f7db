"""A step is committed before anything is told of it, and saved once all checks have passed."""

import asyncio
from collections import Counter
from dataclasses import replace
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from lib.trajectories import summary

from grpo_components.cluster.batch import Batch
from grpo_components.errors import DisagreementError
from grpo_components.records.run import RunRecords
from grpo_components.settings import Settings
from grpo_components.training.step_result import StepResult

RESULT = StepResult(1, {0: 2}, {}, 2, "the loss is nan", {"loss/total": 0.25})


class Setting:
    """A run whose parts write down what they are asked for."""

    def __init__(self, evaluation_due=False):
        self.calls = calls = MagicMock()
        for method in ("commit", "save_if_due", "restore", "finish", "roll_back"):
            setattr(calls.journal, method, AsyncMock(return_value=7))
        calls.evaluation.due.return_value, calls.evaluation.begin = evaluation_due, AsyncMock()
        calls.evaluation.collect = AsyncMock(return_value={"eval/x": 1})
        calls.roles.buffer = MagicMock(texts=AsyncMock(return_value=[]), begin_again=AsyncMock())
        calls.roles.server.begin_again = AsyncMock()
        calls.ledger.policy_version, calls.ledger.dropped_groups = 0, {"filtered": 4}
        calls.failures.take_count.return_value = 0
        numbers = {"max_generator_kl": 1.0, "max_skipped_steps": 2}
        cfg = Settings.model_construct(rollouts_logged_per_step=2, **numbers)
        names = ("start", "ledger", "journal", "log", "evaluation", "failures", "watch")
        self.records = RunRecords(cfg, *(getattr(calls, name) for name in names))
        self.run = self.records.run_with(calls.roles, calls.weights)

    def finish_step(self, groups=(), reused=0, **measured):
        """Finish a step; returns its metrics."""
        result = replace(RESULT, metrics=RESULT.metrics | measured)

        async def attempt():
            async with asyncio.TaskGroup() as tasks:
                await self.run.begin(tasks)
                self.calls.reset_mock()
                batch = Batch(MagicMock(), [*groups], [], "hash", 3, 1, 0.5, reused=reused)
                await self.run.finish_step(batch, np.zeros((1, 2)), result)

        asyncio.run(attempt())
        step, metrics, trained_tokens = self.calls.log.step.call_args.args
        assert (step, trained_tokens) == (7, 2)
        return metrics


def test_metrics_of_rollouts_are_of_new_groups_and_those_of_reuse_are_added():
    setting = Setting()
    setting.calls.ledger.reuse.metrics = {"reuse/share": 0.5}
    metrics = setting.finish_step([summary([1.0]), summary([0.0])], reused=1)
    assert (metrics["rollout/reward_mean"], metrics["reuse/share"]) == (1.0, 0.5)


@pytest.mark.parametrize("evaluation_due", [False, True])
def test_a_step_is_committed_then_evaluated_logged_checked_and_saved(evaluation_due):
    setting = Setting(evaluation_due)
    metrics = setting.finish_step()
    names = ("journal.commit", "evaluation.begin", "log.step")
    names = (*names, "watch.check_step", "log.note", "journal.save_if_due")
    order = [call[0] for call in setting.calls.mock_calls if call[0] in names]
    assert order == [name for name in names if evaluation_due or name != "evaluation.begin"]
    setting.calls.journal.commit.assert_awaited_once_with("hash", RESULT, Counter())
    assert metrics["loss/total"] == 0.25 and metrics["eval/x"] == 1
    waited = ("buffer/size", "buffer/dropped_stale", "buffer/filtered", "time/wait_for_batch")
    assert [metrics[name] for name in waited] == [3, 1, 4, 0.5] and metrics["time/step"] > 0
    setting.calls.log.note.assert_called_once_with("step 7 is skipped: the loss is nan")


def test_a_step_on_whose_tokens_both_sides_disagree_is_logged_and_not_saved():
    setting = Setting()
    with pytest.raises(ExceptionGroup) as ended:
        setting.finish_step(**{"mismatch/fresh_kl": 1.5, "mismatch/fresh_tokens": 16.0})
    assert isinstance(ended.value.exceptions[0], DisagreementError)
    setting.calls.log.step.assert_called_once()
    setting.calls.journal.save_if_due.assert_not_awaited()


def test_the_next_attempt_begins_in_the_journal_and_the_empty_roles():
    setting = Setting()
    asyncio.run(setting.run.begin_again())
    setting.calls.journal.roll_back.assert_awaited_once_with()
    setting.calls.roles.server.begin_again.assert_awaited_once_with()
    setting.calls.roles.buffer.begin_again.assert_awaited_once_with()


def test_the_folder_is_unlocked_last():
    setting = Setting()
    setting.records.close()
    closed = [call[0] for call in setting.calls.mock_calls if call[0].endswith(".close")]
    assert closed == ["journal.close", "log.close", "start.lock.close"]
