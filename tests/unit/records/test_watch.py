"""A loss out of balance, seeds used twice and biased drops are warned of once; nothing else is."""

import numpy as np
import pytest

from grpo_components.objective.aggregation import SequenceMean, TokenMean
from grpo_components.records.guards import RunWatch
from grpo_components.trajectory import GroupSummary


def group(group_id, seeds):
    nothing = {name: [] for name in ("rewards", "successes", "response_tokens", "finish_reasons")}
    more = {name: [] for name in ("response_lengths", "errors", "reward_terms", "turns")}
    versions = {"oldest_version": 0, "newest_version": 0, "prompt_index": 0}
    return GroupSummary(group_id=group_id, seeds=seeds, **nothing, **more, **versions)


def test_a_seed_of_two_groups_is_warned_of_once_and_one_of_a_group_made_again_is_not(watch, notes):
    watch.count_group(group(0, [1, 2]))
    watch.count_group(group(0, [1, 2]))  # its generator was lost
    watch.count_group(group(1, [3, 4]))
    watch.count_group(group(2, []))  # recorded
    assert notes == []
    for number in (3, 4):
        watch.count_group(group(number, [5, 2]))
    (line,) = notes
    assert line.startswith("warning: groups 0 and 3 have samples of the same seed (2)")


def test_a_seed_of_two_samples_of_a_group_is_warned_of(watch, notes):
    watch.count_group(group(7, [1, 1]))
    assert len(notes) == 1 and "groups 7 and 7" in notes[0]


def losses(aggregation, counts=(3, 1, 9), seed=0):
    """Metrics as a trainer measures them: a sum weighted by the aggregation, and token means."""
    numbers, counts = np.random.default_rng(seed), np.array(counts)
    tokens = numbers.normal(0, 2, counts.sum()).astype(np.float32)
    weights = np.repeat(aggregation(counts), counts).astype(np.float32)
    return {"loss/total": float(weights @ tokens), "loss/policy": float(tokens.mean())}


@pytest.mark.parametrize("seed", range(20))
def test_rounding_and_what_a_run_does_not_measure_are_no_imbalance(watch, notes, seed):
    metrics = losses(TokenMean(), counts=(300, 17, 64), seed=seed)
    watch.check_step(1, metrics)
    watch.check_step(2, metrics | {"loss/penalty": float("nan"), "ratio/max": 1.5})
    watch.check_step(3, metrics | {"loss/total": metrics["loss/total"] + 1, "loss/penalty": 1.0})
    watch.check_step(4, metrics | {"loss/total": float("nan")})
    watch.check_step(5, metrics | {"loss/ptx": 0.5, "loss/total": 9.0})
    watch.check_step(6, {})
    assert notes == []


def test_tokens_that_do_not_weigh_the_same_are_warned_of_with_the_step(watch, notes):
    watch.check_step(4, losses(SequenceMean()))
    watch.check_step(5, losses(SequenceMean()))
    assert len(notes) == 1 and notes[0].startswith("warning: step 4: loss/total is ")


def test_another_aggregation_weighs_tokens_as_it_likes(notes):
    RunWatch(notes.append, averages_tokens=False, ends="").check_step(1, losses(SequenceMean()))
    assert notes == []


def test_a_jump_of_the_mismatch_is_warned_of_and_growth_or_few_tokens_are_not(watch, notes):
    for step, kl in enumerate((1e-13, 1e-4, 4e-4, 6e-3, 0.05, 0.09, 0.1, float("nan")), 1):
        watch.check_step(step, {"mismatch/generator_kl": kl})
    assert notes == []
    watch.check_step(10, {"mismatch/generator_kl": 2.0})
    (line,) = notes
    assert line.startswith(
        "warning: step 10: mismatch/generator_kl is 2, the median of the 7 steps"
    )


def test_no_jump_is_named_before_there_are_steps_to_compare_with(watch, notes):
    for step in (1, 2, 3):
        watch.check_step(step, {"mismatch/generator_kl": 10.0**step})
    assert notes == []


def test_a_run_whose_responses_are_all_cut_off_says_what_would_have_ended_them(watch, notes):
    watch.check_step(1, {"rollout/cut_off_fraction": 0.99})
    assert not notes
    for step in (2, 3):
        watch.check_step(step, {"rollout/cut_off_fraction": 1.0})
    assert len(notes) == 1 and "7 (<end>)" in notes[0]
