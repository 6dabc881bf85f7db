"""Held-out figures: unbiased, with intervals that hold, and of one policy version."""

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.evaluation.metrics import (
    evaluation_metrics,
    mean_interval,
    pass_at,
    share_interval,
)


def result(prompt=0, reward=1.0, success=True, oldest=4, newest=4):
    return {
        "prompt_index": prompt,
        "reward": reward,
        "success": success,
        "oldest_version": oldest,
        "newest_version": newest,
    }


def test_an_evaluation_is_the_mean_over_its_prompts_and_names_its_version():
    rewards = [(1.0, True), (0.0, False), (0.5, False), (1.0, True)]
    metrics = evaluation_metrics([result(i, *each) for i, each in enumerate(rewards)])
    low, high = (metrics.pop(f"eval/success_rate_{end}") for end in ("low", "high"))
    assert (low, high) == pytest.approx((0.1500, 0.8500), abs=1e-4), "Wilson's, of 2 in 4"
    low, high = (metrics.pop(f"eval/reward_mean_{end}") for end in ("low", "high"))
    assert low + high == pytest.approx(1.25) and high - low == pytest.approx(2 * 0.46916, abs=1e-4)
    assert metrics == {
        "eval/success_rate": 0.5,
        "eval/reward_mean": 0.625,
        "eval/policy_version": 4,
        "eval/prompts": 4,
    }


def test_several_responses_give_pass_at_the_powers_of_two():
    """Prompt 0: 1 of 4 right; prompt 1: 2 of 3, one could not be scored; prompt 2: none of 1."""
    right = {0: [True, False, False, False], 1: [True, True, False], 2: [False]}
    results = [result(p, float(s), s) for p, successes in right.items() for s in successes]
    metrics = evaluation_metrics(results)
    assert metrics["eval/success_rate"] == pytest.approx((1 / 4 + 2 / 3 + 0) / 3)
    assert metrics["eval/pass_at_2"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["eval/pass_at_4"] == 1.0
    assert "eval/pass_at_3" not in metrics and "eval/pass_at_8" not in metrics
    assert metrics["eval/prompts"] == 3


@pytest.mark.parametrize(
    "mixed", [[result(), result(oldest=5, newest=5)], [result(oldest=3)]], ids=["two", "within"]
)
def test_an_evaluation_of_mixed_versions_is_a_bug(mixed):
    with pytest.raises(AssertionError, match="several policy versions"):
        evaluation_metrics(mixed)


@given(successes=st.lists(st.booleans(), min_size=1, max_size=7), k=st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k(successes, k):
    k = min(k, len(successes))
    drawn = [any(each) for each in itertools.combinations(successes, k)]
    assert pass_at(k, len(successes), sum(successes)) == pytest.approx(fmean(drawn))


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=30),
)
def test_an_interval_lies_around_its_mean_and_between_0_and_1(counts):
    shares = [right / 4 for right in counts]
    low, high = share_interval(shares, 4 * len(shares))
    assert 0 <= low <= fmean(shares) <= high <= 1 and high > low


@pytest.mark.parametrize("alike", [False, True])
def test_intervals_have_the_truth_as_often_as_they_say(alike):
    """Of responses that depend on the prompt's difficulty, or are all of one kind for a prompt."""
    draw, truth, held = random.Random(5), 0.3, 0
    for _ in range(400):
        shares = []
        for _ in range(60):
            chance = float(draw.random() < truth) if alike else 2 * truth * draw.random()
            shares.append(fmean(draw.random() < chance for _ in range(4)))
        low, high = share_interval(shares, 240)
        held += low <= truth <= high
    assert 0.92 <= held / 400 <= 0.98


def test_many_responses_to_one_prompt_say_little_about_others():
    assert share_interval([0.5], 64) == share_interval([0.5], 1)
    low, high = share_interval([0.5], 64)
    assert low < 0.1 and high > 0.9


def test_one_prompt_has_no_interval_of_its_reward():
    assert all(map(math.isnan, mean_interval([0.5])))
