"""Every sampled token of a step is counted once, under what the step made of it."""

import numpy as np
import torch
from lib.trajectories import trajectory as record

from grpo_components.training.sample import make_samples
from grpo_components.training.token_use import TokenUse, keep_weighted
from grpo_components.trajectory import SESSION_COUNTS, pack, summarize

CPU = torch.device("cpu")


def trajectory(group, versions, mask=None, **fields):
    versions = np.array(versions, np.int32)
    return record(len(versions), mask, group_id=group, token_versions=versions, **fields)


def everything(found):
    return found


def count(trajectories, updated=everything, mask_overlong=True, responses=None, masked=everything):
    """Of samples of which those in `updated` were trained, with `masked` trained tokens."""
    use = TokenUse(oldest=3, mask_overlong=mask_overlong, corrects=False)
    advantages = np.zeros(responses or len(trajectories))
    samples = make_samples(
        pack(trajectories), advantages, lambda each: masked(use.trained_tokens(each)), 0
    )
    for sample in updated(samples):
        sample.updated = True
    return use.count(samples, CPU, 1)


BATCH = [
    trajectory(7, [3, 4, 4]),
    trajectory(7, [1, 2, 3, 4]),  # the first two are stale
    trajectory(7, [1, 3, 3], finish_reason="length"),
    trajectory(7, [3, -1, -1, 3], mask=[1, 0, 0, 1]),  # the environment spoke in between
    trajectory(8, [0, 3], finish_reason="error", error="no reward"),
    trajectory(8, [], finish_reason="error", error="no answer"),
]


def test_each_cause_has_its_tokens_and_a_token_the_first_of_its_causes():
    assert count(BATCH) == {7: {"trained": 3 + 2 + 2, "stale": 2, "overlong": 3}, 8: {"failed": 2}}
    assert count(BATCH, mask_overlong=False)[7] == {"trained": 9, "stale": 3}


def test_tokens_without_a_usable_update_are_skipped():
    found = count(BATCH, updated=lambda samples: samples[1:])
    assert found[7] == {"skipped": 3, "trained": 4, "stale": 2, "overlong": 3}


def test_the_tokens_that_no_client_kept_are_in_no_trajectory():
    facts = {"sampled_tokens": 50, "unanswered_tokens": 45, **dict.fromkeys(SESSION_COUNTS, 0)}
    parts = [
        trajectory(1, [3, 3], session={"sample": 0, **facts}),
        trajectory(1, [2, 3, 3], session={"sample": 0}),  # the session forked
    ]
    assert count(parts, responses=1) == {1: {"trained": 4, "stale": 1, "unanswered": 45}}
    assert summarize(pack(parts)).response_tokens == [50]


def test_a_failed_session_has_all_its_tokens_in_failed_samples():
    facts = {"sampled_tokens": 50, "unanswered_tokens": 45}
    failed = trajectory(1, [], finish_reason="error", session={"sample": 0, **facts})
    assert count([failed]) == {1: {"failed": 50}}


def test_a_weight_above_0_in_one_update_is_enough():
    use = TokenUse(0, False, True)
    samples = make_samples(pack(BATCH[:1]), np.zeros(1), use.trained_tokens, 0)
    for weights in ([0.0, 0.0, 1.2], [0.5, 0.0, 0.0]):
        keep_weighted(samples, torch.tensor(weights))
    keep_weighted(samples, None)
    assert samples[0].weighted is not None
    assert samples[0].weighted.tolist() == [True, False, True]
