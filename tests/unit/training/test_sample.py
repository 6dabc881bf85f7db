"""A session weighs as one response; an update's supervised examples depend on its number alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.trajectories import trajectory as record

from grpo_components.errors import ConfigError
from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean
from grpo_components.training.sample import (
    SupervisedExamples,
    make_samples,
    set_loss_weights,
    split_responses,
)
from grpo_components.trajectory import (
    SESSION_COUNTS,
    batch_hash,
    concatenate,
    pack,
    response_numbers,
    summarize,
    unpack,
)


def trajectory(tokens, group=0, session=None, reward=1.0):
    session = session and {**dict.fromkeys(SESSION_COUNTS, 0), "forks": [], **session}
    return record(tokens, group_id=group, reward=reward, session=session)


def session(number, **facts):
    return {"sample": number, **dict.fromkeys(SESSION_COUNTS, 1), **facts}


def batch_of(sizes):
    """For each response the lengths of its trajectories; two responses to a prompt."""
    return pack(
        [
            trajectory(tokens, number // 2, session(number % 2) if len(parts) > 1 else None)
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


def test_the_hash_tells_sessions_apart():
    rows = [trajectory(2), trajectory(3)]
    apart = [replace(row, session={"sample": i}) for i, row in enumerate(rows)]
    together = [replace(row, session={"sample": 0}) for row in rows]
    plain = pack(rows)
    assert batch_hash(pack(together)) not in (batch_hash(pack(apart)), batch_hash(plain))
    joined = concatenate([plain, pack(apart)])
    assert [t.session for t in unpack(joined)] == [None, None, {"sample": 0}, {"sample": 1}]


def ptx(size, per_update, seed=3):
    examples = [([number], [number, number]) for number in range(size)]
    return SupervisedExamples(examples, coeff=0.1, examples_per_update=per_update, seed=seed)


def rows(examples, update):
    return [sample.trajectory.prompt_index for sample in examples.batch(update)]


@given(size=st.integers(1, 9), per_update=st.integers(1, 20), epochs=st.integers(1, 3))
def test_every_epoch_has_each_example_once(size, per_update, epochs):
    examples = ptx(size, per_update)
    updates = -(-size * epochs // per_update)
    drawn = [row for update in range(updates) for row in rows(examples, update)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_resumed_run_has_the_examples_that_it_would_have_had():
    assert rows(ptx(7, 3), 5) == rows(ptx(7, 3), 5)
    assert [rows(ptx(50, 50), epoch) for epoch in (0, 1)] != [rows(ptx(50, 50), 0)] * 2
    assert rows(ptx(50, 50), 0) != rows(ptx(50, 50, seed=4), 0)
