"""Too many skipped steps end the run."""

import pytest

from grpo_components.errors import SkippedStepsError
from grpo_components.records.guards import SkippedSteps


def test_only_skipped_steps_in_a_row_end_the_run_and_the_error_names_them():
    notes = []
    skipped_steps = SkippedSteps(2, notes.append)
    assert skipped_steps.summary() == ""
    for step, trained in enumerate([False, True, False, True], start=1):
        skipped_steps.record(step, "" if trained else f"reason {step}")
    skipped_steps.record(5, "reason 5")
    with pytest.raises(SkippedStepsError) as error:
        skipped_steps.record(6, "reason 6")
    message = str(error.value)
    assert message.startswith("max_skipped_steps: 2 given")
    assert all(fact in message for fact in ("5 to 6", "reason 6"))
    assert [note.split()[1] for note in notes] == ["1", "3", "5", "6"]
    assert "reason 1" in notes[0]
    assert skipped_steps.summary() == "4, the first was step 1"
