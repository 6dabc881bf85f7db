"""What a batch hands to reward shaping: lengths as the limit counts them."""

from typing import Any, cast

import numpy as np
import pytest

from grpo_components.cluster.batch import Batch
from grpo_components.objective.reward_shaping import RewardShaping
from grpo_components.trajectory import Trajectory, pack, summarize


def response(mask, reward=1.0, finish_reason="stop"):
    size = len(mask)
    return Trajectory(
        prompt_ids=np.arange(3),
        response_ids=np.arange(size),
        response_mask=np.array(mask, bool),
        generator_logprobs=np.full(size, -1.0, np.float32),
        token_versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_index=0,
        epoch=0,
        group_id=0,
        attempt=0,
        finish_reason=finish_reason,
        reward=reward,
    )


@pytest.mark.parametrize("said", [0, 3, 6])
@pytest.mark.parametrize(("length", "loses"), [(6, 0.0), (8, 0.25), (10, 0.5)])
def test_the_overlong_penalty_counts_what_the_environment_said(said, length, loses):
    """Limit 10, of which 4 are punished: the same loss however many tokens the policy sampled."""
    mask = np.arange(length) >= said
    mask[0] = True  # the policy begins
    shaping = RewardShaping(0.0, 10, overlong_tokens=4, overlong_penalty=0.5)
    group = summarize(pack([response(mask), response([True])]))
    batch = Batch(cast(Any, None), [group], [], "", 0, 0, 0.0)
    shaped = shaping(batch, 0)
    assert shaped.tolist() == [[1.0 - loses, 1.0]]


@pytest.mark.parametrize("length", [3, 9, 10])
def test_a_conversation_that_the_limit_ended_loses_all_of_the_penalty(length):
    """However far from the limit it stood when the next words had no room."""
    shaping = RewardShaping(0.0, 10, overlong_tokens=4, overlong_penalty=0.5)
    group = summarize(pack([response([True] * length, finish_reason="length"), response([True])]))
    batch = Batch(cast(Any, None), [group], [], "", 0, 0, 0.0)
    shaped = shaping(batch, 0)
    assert shaped.tolist() == [[0.5, 1.0]]
