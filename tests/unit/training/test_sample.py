"""Trajectories of one session weigh as one response, whatever counts responses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.errors import ConfigError
from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean
from grpo_components.training.sample import (
    TrainSample,
    make_samples,
    set_loss_weights,
    split_responses,
    spread_advantages,
)
from grpo_components.trajectory import (
    Trajectory,
    batch_hash,
    concatenate,
    pack,
    response_numbers,
    summarize,
    unpack,
)


def trajectory(tokens, group=0, session=None, reward=1.0):
    return Trajectory(
        prompt_ids=np.array([1, 2]),
        response_ids=np.arange(tokens),
        response_mask=np.ones(tokens, bool),
        generator_logprobs=np.full(tokens, -0.5, np.float32),
        token_versions=np.zeros(tokens, np.int32),
        prompt_index=4,
        epoch=0,
        group_id=group,
        attempt=0,
        finish_reason="stop",
        reward=reward,
        session=session,
    )


def batch_of(sizes):
    """For each response the lengths of its trajectories; two responses to a prompt."""
    return pack(
        [
            trajectory(tokens, number // 2, {"sample": number % 2} if len(parts) > 1 else None)
            for number, parts in enumerate(sizes)
            for tokens in parts
        ]
    )


SIZES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8)


@given(SIZES, st.integers(1, 3))
def test_a_session_weighs_as_one_response_of_all_its_tokens(sizes, num_parts):
    batch = batch_of(sizes)
    joined = pack([trajectory(sum(parts), n // 2) for n, parts in enumerate(sizes)])
    advantages = np.arange(len(sizes), dtype=np.float32)
    for aggregation in (TokenMean(), SequenceMean(), ConstantLength(7)):
        totals = []
        for packed in (batch, joined):
            samples = make_samples(packed, advantages, lambda t: t.response_mask, 0)
            assert [s.response for s in samples] == response_numbers(packed).tolist()
            loss = 0.0
            for part in split_responses(samples, num_parts):
                if part:
                    set_loss_weights(part, aggregation)
                    loss += sum(s.loss_weight * s.num_tokens * s.trajectory.advantage for s in part)
            totals.append(loss)
        assert totals[0] == pytest.approx(totals[1])


@given(SIZES)
def test_every_response_is_in_one_part_and_one_number(sizes):
    samples = make_samples(batch_of(sizes), np.zeros(len(sizes)), lambda t: t.response_mask, 1)
    parts = split_responses(samples, 2)
    where = [{s.response for s in part} for part in parts]
    assert not where[0] & where[1]
    assert sorted(where[0] | where[1]) == list(range(len(sizes)))
    assert {s.number for s in samples} <= {0, 1}
    assert [s.logged for s in samples] == [s is samples[0] for s in samples]


def test_advantages_are_one_number_per_response():
    with pytest.raises(ConfigError, match="for 2 responses; allowed: one number per response"):
        make_samples(batch_of([[1, 2], [3]]), np.zeros(3), lambda t: t.response_mask, 0)


@given(SIZES)
def test_summaries_count_responses(sizes):
    batch = batch_of(sizes[:2])
    summary = summarize(batch)
    assert summary.response_tokens == [sum(parts) for parts in sizes[:2]]
    assert summary.response_lengths == [max(parts) for parts in sizes[:2]]
    assert summary.rewards == [1.0] * len(sizes[:2])
    assert summary.turns == [len(parts) for parts in sizes[:2]]


def test_tokens_that_no_trajectory_has_count_as_sampled():
    facts = {"sample": 0, "sampled_tokens": 50}
    assert summarize(pack([trajectory(3, session=facts)])).response_tokens == [50]


def test_the_hash_tells_sessions_apart_and_is_that_of_older_versions_without_them():
    rows = [trajectory(2), trajectory(3)]
    apart = [replace(row, session={"sample": i}) for i, row in enumerate(rows)]
    together = [replace(row, session={"sample": 0}) for row in rows]
    plain = pack(rows)
    older = {name: column for name, column in plain.items() if name != "session"}
    assert batch_hash(older) == batch_hash(plain)
    assert batch_hash(pack(together)) not in (batch_hash(pack(apart)), batch_hash(plain))
    joined = concatenate([older, pack(apart)])
    assert [t.session for t in unpack(joined)] == [None, None, {"sample": 0}, {"sample": 1}]


def test_rewards_of_calls_add_their_group_normalized_sums_to_the_advantage():
    """DeepSeekMath, section 4.1.3: a token gets the rewards of its call and of later ones."""
    first = [
        {"tokens": [0, 2], "reward": None, "sum": 4.0, "count": 2},
        {"tokens": [3, 4], "reward": 3.0, "sum": 4.0, "count": 2},
        {"tokens": [4, 5], "reward": 1.0, "sum": 1.0, "count": 1},
    ]
    second = [{"tokens": [0, 3], "reward": -1.0, "sum": -1.0, "count": 1}]
    rows = [(first, [1, 1, 0, 1, 1]), (second, [1, 1, 1]), (None, [1, 1])]
    samples = []
    for number, (calls, mask) in enumerate(rows):
        session = {"sample": number, **({"call_rewards": calls} if calls else {})}
        row = replace(trajectory(len(mask), 7, session), advantage=0.5)
        samples.append(TrainSample(row, np.array(mask, bool)))
    spread_advantages(samples, None, 0)
    mean, deviation = 1.0, np.std([3.0, 1.0, -1.0], ddof=1) + 1e-4
    found = [sample.advantages for sample in samples]
    expected = [(4 - 2 * mean) / deviation] * 3 + [0.0]
    np.testing.assert_allclose(found[0], 0.5 + np.array(expected), rtol=1e-6)
    np.testing.assert_allclose(found[1], [0.5 - 2 / deviation] * 3, rtol=1e-6)
    np.testing.assert_allclose(found[2], [0.5, 0.5])


def test_the_rewards_of_calls_are_part_of_a_batchs_fingerprint():
    calls = [{"tokens": [0, 2], "reward": 1.0, "sum": 1.0, "count": 1}]
    other = [{"tokens": [0, 2], "reward": 2.0, "sum": 2.0, "count": 1}]
    hashes = {
        batch_hash(pack([trajectory(2, 0, {"sample": 0, **more})]))
        for more in ({}, {"call_rewards": calls}, {"call_rewards": other}, {"forks": []})
    }
    assert len(hashes) == 3
