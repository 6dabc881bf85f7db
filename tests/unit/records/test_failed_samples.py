"""Failed samples are counted and recorded with their prompts; too many end the run."""

import json
import math

import pytest

from grpo_components.errors import FailedSamplesError
from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.records.guards import FailedSamples
from grpo_components.trajectory import GroupSummary


def entry(number):
    prompt = {"prompt_index": number, "prompt_text": f"question {number}", "answer": "1"}
    return LedgerEntry(100 + number, prompt, 2, 0, 0, 0)


def summary(*errors, scored=2):
    size = len(errors) + scored
    rewards = [math.nan] * len(errors) + [0.5] * scored
    reasons = ["error"] * len(errors) + ["stop"] * scored
    tokens = [3] * size
    return GroupSummary(
        *(0, 0, rewards, [False] * size, tokens, tokens, 0, 0, reasons, list(errors)),
        reward_terms=[{} for _ in rewards],
        turns=[1] * size,
    )


def results(*errors):
    return [
        {"prompt_index": i, "prompt_text": f"held out {i}", "reward": 1.0, "error": error}
        for i, error in enumerate(errors)
    ]


@pytest.fixture
def notes():
    return []


@pytest.fixture
def failures(tmp_path, notes):
    return FailedSamples(0.5, 12, tmp_path, 1, notes.append)


def records(tmp_path):
    path = tmp_path / "failed_samples.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_without_failures_nothing_is_written(failures, tmp_path, notes):
    assert failures.count_group(entry(3), summary()) is False
    assert len(failures.count_evaluation(4, results(None, None))) == 2
    assert failures.take_count() == 0 and not notes and list(tmp_path.iterdir()) == []


def test_each_failure_is_written_with_its_prompt_and_counted_until_the_step(
    failures, tmp_path, notes
):
    assert failures.count_group(entry(3), summary("a", "b", "a")) is False
    scored = failures.count_evaluation(4, results(None, "c\x1b[2J", None))
    assert [result["prompt_index"] for result in scored] == [0, 2]
    group, evaluation = records(tmp_path)
    assert group == {
        "attempt": 1,
        "group_id": 103,
        "epoch": 2,
        "prompt_index": 3,
        "prompt": "question 3",
        "errors": {"a": 2, "b": 1},
    }
    assert (evaluation["evaluation"], evaluation["prompt"]) == (4, "held out 1")
    assert "\x1b" not in (tmp_path / "failed_samples.jsonl").read_text()
    (note,) = notes
    assert "3 failed in group 103: a" in note and str(tmp_path) in note
    assert failures.take_count() == 4
    assert failures.take_count() == 0


def test_a_traceback_goes_to_the_file_and_its_first_line_to_the_user(failures, tmp_path, notes):
    error = "reward mood: KeyError (/here/my_rewards.py:12): 'x'"
    trace = 'Traceback (most recent call last):\n  File "/here/my_rewards.py", line 12, in __call__'
    failures.count_group(entry(3), summary(f"{error}\n{trace}", "b", f"{error}\n{trace}"))
    (record,) = records(tmp_path)
    assert record["errors"] == {error: 2, "b": 1}
    assert record["tracebacks"] == {error: trace}
    failures.take_count()
    failures.count_group(entry(3), summary(f"{error}\n{trace}"))
    assert error in notes[1] and "Traceback" not in notes[1]


def test_a_group_whose_samples_all_failed_is_reported(failures):
    assert failures.count_group(entry(3), summary("a", "b", scored=0)) is True


def test_too_many_between_two_steps_end_the_run_with_the_last_error_and_the_file(
    failures, tmp_path
):
    for _ in range(3):  # the counts start anew at every step
        failures.count_group(entry(1), summary("a", "b", "c", "d", "e"))
        assert failures.take_count() == 5
    failures.count_group(entry(1), summary("a", "b", "c", "d", "e"))
    with pytest.raises(FailedSamplesError) as ended:
        failures.count_group(entry(7), summary("x" * 5000))
    text = str(ended.value)
    assert text.startswith("max_failed_samples: 0.5 given, but 6 of 10 samples ")
    assert "prompt 7: xxx" in text and text.endswith(str(tmp_path / "failed_samples.jsonl"))
    assert len(text) < 1000
    assert records(tmp_path)[-1]["errors"] == {"x" * 5000: 1}, "the record of the last one is kept"


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_is_of_all_samples_that_ended_since_the_step_and_at_least_of_a_batch(
    share, tmp_path
):
    failures = FailedSamples(share, 8, tmp_path, 0, print)
    for _ in range(50):  # a step that takes many groups, as where dynamic sampling filters
        failures.count_group(entry(1), summary(scored=7))
        failures.count_evaluation(1, results(*[None] * 7))
        if share:  # below each share but 0
            failures.count_group(entry(1), summary("a"))
    allowed = math.ceil(share * 8) - 1 if share else 0
    failures.take_count()
    for _ in range(allowed):
        failures.count_group(entry(1), summary("a", scored=0))
    with pytest.raises(FailedSamplesError):
        failures.count_group(entry(1), summary("a", scored=0))


def test_an_evaluation_without_any_score_ends_the_run(failures):
    with pytest.raises(FailedSamplesError) as ended:
        failures.count_evaluation(0, results("timed out", "crashed"))
    assert "step 0" in str(ended.value) and "timed out" in str(ended.value)
