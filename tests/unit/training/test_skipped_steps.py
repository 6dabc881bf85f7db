"""Skipped steps: the batch comes back whole without pickle, and too many end the run."""

import math

import numpy as np
import pytest

from grpo_components.errors import SkippedStepsError
from grpo_components.training.skipped_steps import SkippedSteps, dump_batch, load_batch
from grpo_components.trajectory import Trajectory, batch_hash, pack, unpack

METRICS = {
    "grad_norm": math.inf,
    "token_versions": {7: 5},
    "skipped_because": "the gradient of w has inf",
}


def record(size, reference):
    return Trajectory(
        prompt_ids=np.arange(3),
        response_ids=np.arange(size),
        response_mask=np.arange(size) % 2 == 0,
        generator_logprobs=np.full(size, math.nan, np.float32),
        token_versions=np.full(size, 7, np.int32),
        prompt_index=1,
        epoch=0,
        group_id=5,
        attempt=0,
        finish_reason="stop",
        reward=math.inf,
        reward_terms={"correctness": 0.5},
        error="außen",
        reference_logprobs=np.zeros(size, np.float32) if reference else None,
    )


@pytest.mark.parametrize("reference", [True, False])
def test_a_batch_comes_back_as_it_was(tmp_path, reference):
    packed = pack([record(4, reference), record(1, reference)])
    advantages = np.array([math.nan, -1], np.float32)
    dump_batch(tmp_path, 3, packed, advantages, METRICS)
    again, same_advantages, metrics = load_batch(tmp_path / "step_3")
    assert batch_hash(again) == batch_hash(packed) and again.keys() == packed.keys()
    assert [t.error for t in unpack(again)] == ["außen", "außen"]
    np.testing.assert_array_equal(same_advantages, advantages)
    assert metrics == {**METRICS, "token_versions": {"7": 5}}


def test_the_readme_loads_the_batch(tmp_path):
    packed = pack([record(2, False)])
    dump_batch(tmp_path, 1, packed, np.zeros(1, np.float32), METRICS)
    lines = (tmp_path / "step_1" / "README").read_text().splitlines()
    assert lines[0] == "Training step 1 was skipped: the gradient of w has inf."
    names = {}
    exec("\n".join(line.strip() for line in lines if line.startswith("  ")), names)
    assert batch_hash(names["packed"]) == batch_hash(packed)


def test_only_skipped_steps_in_a_row_end_the_run_and_the_error_names_them(tmp_path):
    notes = []
    skipped_steps = SkippedSteps(2, str(tmp_path), notes.append)
    for step, trained in enumerate([False, True, False, True], start=1):
        skipped_steps.record(step, trained, "" if trained else f"reason {step}")
    skipped_steps.record(5, False, "reason 5")
    with pytest.raises(SkippedStepsError) as error:
        skipped_steps.record(6, False, "reason 6")
    message = str(error.value)
    assert message.startswith("max_skipped_steps: 2 given")
    assert all(fact in message for fact in ("5 to 6", "reason 6", f"{tmp_path}/skipped"))
    assert [note.split()[1] for note in notes] == ["1", "3", "5", "6"]
    assert "reason 1" in notes[0] and f"{tmp_path}/skipped/step_1" in notes[0]
    assert skipped_steps.summary().split()[:3] == ["4", "of", "6,"]
    skipped_steps.check_trained()  # two steps were trained


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_trained_nothing_is_an_error_with_the_first_reason(tmp_path, again):
    skipped_steps = SkippedSteps(10, str(tmp_path), lambda note: None)
    skipped_steps.check_trained()  # no step yet
    assert skipped_steps.summary() == ""
    skipped_steps.record(1, again, "reason 1")
    skipped_steps.record(2, False, "reason 2")
    if again:  # a rollback to the start of the run loses what was trained
        skipped_steps.check_trained()
        skipped_steps.record(1, False, "reason 1")
        skipped_steps.record(2, False, "reason 2")
    with pytest.raises(SkippedStepsError, match=r"all 2 steps .* reason 1;"):
        skipped_steps.check_trained()
