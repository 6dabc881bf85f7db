"""Aggregations: worked by hand, and untouched by micro-batches, ranks and padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean

AGGREGATIONS = {
    "token mean": TokenMean(),
    "sequence mean": SequenceMean(),
    "constant length": ConstantLength(length=5),
}


def mean_over(name, responses):
    """The update's loss with plain Python, from a list of losses per response."""
    if name == "token mean":
        tokens = [loss for response in responses for loss in response]
        return sum(tokens) / len(tokens)
    if name == "sequence mean":
        return sum(sum(response) / len(response) for response in responses) / len(responses)
    return sum(sum(response) / 5 for response in responses) / len(responses)


def test_two_responses_of_three_tokens_by_hand():
    # losses 1 2 3 | 4 5 6: both means are 21 / 6; by a length of 5 it is 21 / (2 * 5).
    losses = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    counts = np.array([3, 3])
    expected = {"token mean": 3.5, "sequence mean": 3.5, "constant length": 2.1}
    for name, aggregation in AGGREGATIONS.items():
        total = (aggregation(counts)[:, None] * losses).sum()
        assert total == pytest.approx(expected[name], rel=1e-12)


def test_two_responses_of_which_one_ends_early_by_hand():
    # losses 1 2 3 | 4, two tokens of padding that no weight counts:
    # 10 / 4, (6 / 3 + 4 / 1) / 2, and 10 / (2 * 5).
    losses = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
    counts = np.array([3, 1])
    expected = {"token mean": 2.5, "sequence mean": 3.0, "constant length": 1.0}
    for name, aggregation in AGGREGATIONS.items():
        weights = aggregation(counts)
        assert weights.dtype == np.float64
        assert (weights[:, None] * losses).sum() == pytest.approx(expected[name], rel=1e-12)


RESPONSES = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=7), min_size=1, max_size=8)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(responses=RESPONSES, data=st.data())
def test_micro_batches_and_ranks_add_up_to_the_mean_over_all(name, responses, data):
    weights = AGGREGATIONS[name](np.array([len(response) for response in responses]))
    place = st.tuples(st.integers(0, 2), st.integers(0, 2))  # rank, micro-batch
    places = data.draw(st.lists(place, min_size=len(responses), max_size=len(responses)))
    parts: dict[tuple[int, int], float] = {}
    for where, weight, response in zip(places, weights, responses, strict=True):
        parts[where] = parts.get(where, 0.0) + weight * sum(response)
    assert sum(parts.values()) == pytest.approx(mean_over(name, responses), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(responses=RESPONSES, padding=st.integers(0, 4))
def test_padding_dilutes_nothing(name, responses, padding):
    width = max(map(len, responses)) + padding
    padded = np.zeros((len(responses), width))
    for row, response in zip(padded, responses, strict=True):
        row[: len(response)] = response
    weights = AGGREGATIONS[name](np.array([len(response) for response in responses]))
    total = (weights[:, None] * padded).sum()
    assert total == pytest.approx(mean_over(name, responses), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(responses=RESPONSES, empty=st.integers(0, 5))
def test_a_response_without_a_trained_token_counts_in_s_and_nowhere_else(name, responses, empty):
    """S is the papers' batch size: fixed, whatever becomes of a response."""
    counts = np.array([*[0] * empty, *map(len, responses)])
    weights = AGGREGATIONS[name](counts)
    assert np.isfinite(weights).all()
    total = sum(w * sum(r) for w, r in zip(weights[empty:], responses, strict=True))
    share = 1 if name == "token mean" else len(responses) / len(counts)
    assert total == pytest.approx(share * mean_over(name, responses), rel=1e-9, abs=1e-12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_both_means_weigh_one_in_all(counts):
    for aggregation in (TokenMean(), SequenceMean()):
        weights = aggregation(np.array(counts))
        assert (weights * counts).sum() == pytest.approx(1, rel=1e-12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_constant_length_is_the_token_mean_but_for_one_factor(counts):
    mean_length = sum(counts) / len(counts)
    np.testing.assert_allclose(
        ConstantLength(length=5)(np.array(counts)),
        TokenMean()(np.array(counts)) * mean_length / 5,
        rtol=1e-12,
    )


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "16", None])
def test_a_length_that_is_no_count_is_refused(length):
    with pytest.raises(ValueError, match=r"aggregation\.length"):
        ConstantLength(length=length)
