"""The plan of a run's memory is never below the measured peak, and at most 10 % above it."""

from dataclasses import replace

import plan
import pytest

SMALL = plan.Case("small", width=64, layers=2, vocabulary=1024, tokens=512, groups=3, response=64)
CASES = {
    "small": SMALL,
    "deep, checkpointing": replace(SMALL, layers=6, checkpointing=True),
    "one micro-batch for all": replace(SMALL, tokens=4096, vocabulary=4096),
    "reference": replace(SMALL, width=128, reference=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_peak_of_a_real_step(name, monkeypatch):
    monkeypatch.setattr(plan, "in_child", lambda function, *args: function(*args))
    peaks, planned = plan.measured(CASES[name]), plan.predicted(CASES[name])
    assert peaks.live <= planned <= 1.1 * peaks.live


def test_live_tensors_are_what_the_allocator_gave_out():
    peaks = plan.measured(SMALL)  # in a process in which nothing was allocated before
    assert peaks.allocated == pytest.approx(peaks.live, rel=0.02)


def test_the_plan_is_the_peak_of_each_of_two_ranks():
    case = replace(SMALL, ranks=2)
    peaks, planned = plan.measured(case), plan.predicted(case)
    assert peaks.live <= planned <= 1.1 * peaks.live
    assert planned < plan.predicted(SMALL)  # each has half of the weights


@pytest.mark.parametrize("name", plan.PUBLISHED)
def test_the_sizes_are_those_of_the_model_cards(name):
    assert plan.sizes_of(name) == pytest.approx(plan.PUBLISHED[name], rel=0.01)


def test_the_command_prints_the_published_sizes(capsys):
    plan.main(["--published"])
    table = capsys.readouterr().out
    assert all(name in table for name in plan.PUBLISHED)
