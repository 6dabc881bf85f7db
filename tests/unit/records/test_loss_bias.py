"""A loss that depends on length or reward is significant; one that does not rarely is."""

import math
from itertools import combinations

import numpy as np
import pytest
from lib.trajectories import summary

from grpo_components.records.loss_bias import LossBias, kolmogorov_smirnov


def distance(left, right):
    """By its definition, over all thresholds."""
    left, right = np.array(left), np.array(right)
    return max(abs((left <= at).mean() - (right <= at).mean()) for at in [*left, *right])


SAMPLES = [
    ([1, 2, 3], [4, 5, 6, 7]),
    ([1.5, 6, 3], [4, 2, 6.5, 7, 0]),
    ([1, 1, 2, 2], [2, 2, 2, 3]),  # equal values
    ([0, 0.5, 0.5, 1], [0, 0, 0, 0.5, 0.5]),
    ([1, 1], [1, 1, 1]),
]


@pytest.mark.parametrize(("left", "right"), SAMPLES)
def test_the_chance_is_the_share_of_divisions_that_are_as_far_apart(left, right):
    found, chance = kolmogorov_smirnov(left, right)
    assert found == pytest.approx(distance(left, right))
    pooled, far = [*left, *right], 0
    divisions = list(combinations(range(len(pooled)), len(left)))
    for chosen in divisions:
        rest = [pooled[i] for i in range(len(pooled)) if i not in chosen]
        far += distance([pooled[i] for i in chosen], rest) >= found - 1e-9
    assert chance == pytest.approx(far / len(divisions))


def test_samples_without_a_common_value_have_the_smallest_chance():
    for sizes in ((8, 8), (8, 1000), (500, 500)):
        found, chance = kolmogorov_smirnov(np.arange(sizes[0]), 10**6 + np.arange(sizes[1]))
        assert found == 1
        assert chance == pytest.approx(2 / math.comb(sum(sizes), sizes[0]), abs=1e-12)


def test_chances_of_equal_distributions_are_not_too_small():
    """Of values with and without ties, 1 in 20 is below 0.05 at most, but for luck."""
    numbers = np.random.default_rng(0)
    for draw in (lambda n: numbers.normal(size=n), lambda n: numbers.integers(0, 5, n) / 4):
        chances = [kolmogorov_smirnov(draw(12), draw(40))[1] for _ in range(150)]
        assert 0.01 < np.mean(np.array(chances) <= 0.05) < 0.09


def run(watch, is_lost, number=400, reason="stale", seed=0, drift=0.0):
    """Groups of random lengths and rewards, some of which are lost."""
    numbers = np.random.default_rng(seed)
    for i in range(number):
        tokens = int(numbers.integers(5, 50) + drift * i)
        rewards = numbers.integers(0, 2, 4).astype(float)
        rewards[0] = math.nan  # a failed sample
        watch.follow(
            {"event": "finish", "attempt": 0, "group": i, "response_tokens": [tokens, tokens + 2]}
        )
        watch.count_group(summary(rewards.tolist(), group_id=i))
        lost = is_lost(i, tokens, float(np.nanmean(rewards)))
        event = {"event": "drop", "groups": [i], "reason": reason, "reissue": True}
        watch.follow({"attempt": 0, **(event if lost else {"event": "sample", "groups": [i]})})


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_by_chance_is_no_bias(watch, notes, seed):
    run(watch, lambda number, *_: number % 5 == 0, seed=seed)
    assert notes == []
    assert set(watch.bias.compare()) == {"length", "reward"}


def test_losing_the_hard_ones_is_warned_of_once_with_both_distances(watch, notes):
    run(watch, lambda number, _, reward: reward < 0.5 and number % 2)
    (line,) = notes
    assert line.startswith("warning: dropped groups are harder: the ")
    assert "as mean reward" in line and "stale_groups: wait" in line
    found = watch.bias.compare()
    assert found["reward"].chance < 1e-4 < found["length"].chance
    assert found["reward"].of_admitted < found["reward"].distance
    kinds = (f"bias/{name}_{what}" for name in found for what in ("distance", "chance"))
    assert watch.bias.metrics().keys() == {*kinds} and len(found) == 2


def test_whatever_the_reason_was_but_what_a_filter_chose_on_purpose(watch, notes):
    run(watch, lambda _, __, reward: reward < 0.5, reason="filtered")
    assert notes == [] and watch.bias.summary() == "nothing was lost"
    run(watch, lambda _, tokens, __: tokens > 30, reason="failed")
    assert notes[0].startswith("warning: dropped groups are longer: the ")
    assert "failed) have" in notes[0] and "failed_samples.jsonl" in notes[0]


def test_the_distance_to_all_is_that_of_trained_to_trained_and_lost():
    numbers = np.random.default_rng(1)
    lost, trained = numbers.normal(size=30), numbers.normal(0.5, size=70)
    bias = LossBias()
    for i, tokens in enumerate([*lost, *trained]):
        bias.follow({"event": "finish", "group": i, "response_tokens": [tokens]})
        drop = {"event": "drop", "groups": [i], "reason": "stale"}
        bias.follow(drop if i < len(lost) else {"event": "sample", "groups": [i]})
    found = bias.compare()["length"]
    assert found.distance == pytest.approx(distance(lost, trained))
    assert found.of_admitted == pytest.approx(distance([*lost, *trained], trained))
    assert "reward" not in bias.compare()  # none was scored


def test_what_is_kept_is_bounded_and_another_attempt_forgets_what_was_in_flight(watch):
    run(watch, lambda number, *_: number % 5 == 0, number=700)
    bias = watch.bias
    assert len(bias._ended) == 512 and not bias._living
    bias.follow({"event": "finish", "attempt": 0, "group": 1, "response_tokens": [3]})
    bias.follow({"event": "issue", "attempt": 1, "group": 1})
    assert not bias._living


def test_too_few_are_not_compared(watch, notes):
    run(watch, lambda number, tokens, _: number < 7, number=60)
    assert notes == [] and watch.bias.metrics() == {}
    assert watch.bias.summary() == "7 lost (7 stale), too few to compare"
