"""Too many skipped steps end the run."""

import pytest

from grpo_components.errors import SkippedStepsError
from grpo_components.records.guards import SkippedSteps


def test_only_skipped_steps_in_a_row_end_the_run_and_the_error_names_them():
    notes = []
    skipped_steps = SkippedSteps(2, notes.append)
    for step, trained in enumerate([False, True, False, True], start=1):
        skipped_steps.record(step, trained, "" if trained else f"reason {step}")
    skipped_steps.record(5, False, "reason 5")
    with pytest.raises(SkippedStepsError) as error:
        skipped_steps.record(6, False, "reason 6")
    message = str(error.value)
    assert message.startswith("max_skipped_steps: 2 given")
    assert all(fact in message for fact in ("5 to 6", "reason 6"))
    assert [note.split()[1] for note in notes] == ["1", "3", "5", "6"]
    assert "reason 1" in notes[0]
    assert skipped_steps.summary().split()[:3] == ["4", "of", "6,"]
    skipped_steps.check_trained()  # two steps were trained


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_trained_nothing_is_an_error_with_the_first_reason(again):
    skipped_steps = SkippedSteps(10, lambda note: None)
    skipped_steps.check_trained()  # no step yet
    assert skipped_steps.summary() == ""
    skipped_steps.record(1, again, "reason 1")
    skipped_steps.record(2, False, "reason 2")
    if again:  # a rollback to the start of the run loses what was trained
        skipped_steps.check_trained()
        skipped_steps.record(1, False, "reason 1")
        skipped_steps.record(2, False, "reason 2")
    with pytest.raises(SkippedStepsError, match=r"all 2 steps .* reason 1$"):
        skipped_steps.check_trained()
