"""Aggregations: weights whose parts add up to the mean over all, on any ranks and micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean


def token_mean(responses):
    tokens = [loss for response in responses for loss in response]
    return sum(tokens) / len(tokens)


def sequence_mean(responses):
    """S is the papers' batch size: a response without a trained token counts in it."""
    means = [sum(response) / len(response) for response in responses if response]
    return sum(means) / len(responses)


def constant_length(responses):
    return sum(sum(response) / 5 for response in responses) / len(responses)


AGGREGATIONS = [
    (TokenMean(), token_mean),
    (SequenceMean(), sequence_mean),
    (ConstantLength(length=5), constant_length),
]
LOSSES = st.lists(st.floats(-3, 3), max_size=7)
RESPONSES = st.lists(LOSSES, min_size=1, max_size=8).filter(any)


@pytest.mark.parametrize(("aggregation", "mean_over"), AGGREGATIONS)
@given(responses=RESPONSES, data=st.data())
def test_micro_batches_and_ranks_add_up_to_the_mean_over_all(
    aggregation, mean_over, responses, data
):
    weights = aggregation(np.array([len(response) for response in responses]))
    assert weights.dtype == np.float64 and np.isfinite(weights).all()
    place = st.tuples(st.integers(0, 2), st.integers(0, 2))  # rank, micro-batch
    places = data.draw(st.lists(place, min_size=len(responses), max_size=len(responses)))
    parts: dict[tuple[int, int], float] = {}
    for where, weight, response in zip(places, weights, responses, strict=True):
        parts[where] = parts.get(where, 0.0) + weight * sum(response)
    assert sum(parts.values()) == pytest.approx(mean_over(responses), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("length", [0, 2.5, True, "16"])
def test_a_length_that_is_no_count_is_refused(length):
    with pytest.raises(ValueError, match=r"aggregation\.length"):
        ConstantLength(length=length)
