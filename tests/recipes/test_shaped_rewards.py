"""What a batch hands to reward shaping: lengths as the limit counts them."""

from typing import Any, cast

import numpy as np
import pytest
from lib.trajectories import trajectory

from grpo_components.cluster.batch import Batch
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.trajectory import pack, summarize


def shaped(mask, finish_reason="stop"):
    """A response and its sibling: limit 10 tokens, of which 4 are punished."""
    shaping = RewardShaping(0.0, 10, overlong_tokens=4, overlong_penalty=0.5)
    response = trajectory(len(mask), mask, reward=1.0, finish_reason=finish_reason)
    group = summarize(pack([response, trajectory(1, reward=1.0)]))
    return shaping(Batch(cast(Any, None), [group], [], "", 0, 0, 0.0), 0).tolist()


@pytest.mark.parametrize("said", [0, 3, 6])
@pytest.mark.parametrize(("length", "loses"), [(6, 0.0), (8, 0.25), (10, 0.5)])
def test_the_overlong_penalty_counts_what_the_environment_said(said, length, loses):
    """The same loss however many tokens the policy sampled."""
    mask = np.arange(length) >= said
    mask[0] = True  # the policy begins
    assert shaped(mask) == [[1.0 - loses, 1.0]]


@pytest.mark.parametrize("length", [3, 9, 10])
def test_a_conversation_that_the_limit_ended_loses_all_of_the_penalty(length):
    """However far from the limit it stood when the next words had no room."""
    assert shaped([True] * length, finish_reason="length") == [[0.5, 1.0]]
