"""A group survives packing, and a broken record is noticed."""

import dataclasses
import math
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.trajectories import trajectory as record

from grpo_components.trajectory import (
    batch_hash,
    concatenate,
    pack,
    split,
    summarize,
    unpack,
)


@st.composite
def trajectories(draw, with_reference):
    prompt_length = draw(st.integers(1, 5))
    length = draw(st.integers(0, 7))
    mask = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)), dtype=bool)
    logprobs = draw(st.lists(st.floats(-20, 0, width=32), min_size=length, max_size=length))
    return record(
        np.arange(length) + 100,
        mask,
        prompt_ids=np.arange(prompt_length),
        generator_logprobs=np.array(logprobs, dtype=np.float32),
        token_versions=np.where(mask, draw(st.integers(0, 9)), -1).astype(np.int32),
        prompt_index=draw(st.integers(0, 10**6)),
        epoch=draw(st.integers(0, 3)),
        group_id=draw(st.integers(0, 10**6)),
        attempt=draw(st.integers(0, 3)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
        temperature=draw(st.floats(0.1, 2)),
        reward=draw(st.floats(-2, 2) | st.just(math.nan)),
        reward_terms=draw(st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=2)),
        success=draw(st.booleans()),
        error=draw(st.none() | st.text(max_size=9)),
        reference_logprobs=np.full(length, -0.5, np.float32) if with_reference else None,
    )


def groups(with_reference):
    return st.lists(trajectories(with_reference), max_size=5)


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name, value in vars(a).items():
            np.testing.assert_equal(getattr(b, name), value, err_msg=name)


@given(groups(with_reference=False) | groups(with_reference=True))
def test_unpack_is_the_inverse_of_pack(group):
    assert_same(group, unpack(pack(group)))


@pytest.mark.parametrize("with_reference", [False, True])
@settings(max_examples=many(40))
@given(st.data())
def test_joined_packs_are_the_pack_of_all_records_bit_for_bit(with_reference, data):
    """Arrays, dtypes and hash; a group may be empty, and so may a response."""
    batch = data.draw(st.lists(groups(with_reference), max_size=3))
    joined = concatenate(pack(group) for group in batch)
    whole = pack([trajectory for group in batch for trajectory in group])
    assert list(joined) == list(whole)
    for name, column in whole.items():
        assert_same_bits(joined[name], column, name)
    assert batch_hash(joined) == batch_hash(whole)


def assert_same_bits(left, right, name):
    assert type(left) is type(right), name
    if isinstance(left, tuple):
        for part in zip(left, right, strict=True):
            assert_same_bits(*part, name)
    elif isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), name
        assert left.tobytes() == right.tobytes(), name
    else:
        assert left == right, name


def test_a_group_with_reference_logprobs_is_not_joined_to_one_without():
    with_reference = make([0])
    with_reference.reference_logprobs = np.zeros(1, np.float32)
    with pytest.raises(AssertionError, match="reference_logprobs"):
        concatenate([pack([make([0])]), pack([with_reference])])


@given(groups(with_reference=True))
def test_a_field_is_split_into_views_of_each_trajectory(group):
    packed = pack(group)
    for name in ("prompt_ids", "response_mask", "reference_logprobs"):
        parts = split(packed, name)
        assert [part.tolist() for part in parts] == [getattr(t, name).tolist() for t in group]
        assert all(np.shares_memory(part, packed[name][0]) for part in parts if len(part))


def make(versions, mask=None, reward=1.0):
    own = {"token_versions": np.array(versions, np.int32), "prompt_ids": np.arange(3)}
    return record(len(versions), mask, **own, reward=reward)


def test_summary_counts_only_tokens_that_the_policy_sampled():
    summary = summarize(pack([make([3, -1, 5], mask=[True, False, True]), make([4])]))
    assert (summary.oldest_version, summary.newest_version) == (3, 5)
    assert (summary.response_tokens, summary.response_lengths) == ([2, 1], [3, 1])
    assert make([3, -1, 5], mask=[True, False, True]).oldest_version == 3


def test_summary_counts_the_turns_that_the_environments_tokens_separate():
    """Tokens of the environment at the beginning or the end do not add one."""
    masks = [[1], [1, 1, 1], [1, 0, 1], [1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0]]
    group = [make([0] * len(mask), mask=[bool(own) for own in mask]) for mask in masks]
    summary = summarize(pack(group))
    assert summary.turns == [1, 1, 2, 2, 3, 0]
    assert summary.reward_terms == [t.reward_terms for t in group]


def test_a_failed_sample_keeps_its_nan_reward_through_the_summary():
    summary = summarize(pack([make([0], reward=math.nan), make([0], reward=0.5)]))
    assert math.isnan(summary.rewards[0])
    assert summary.rewards[1] == 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_ids", np.empty(0, np.int64)),
        ("response_mask", np.ones(2, bool)),
        ("generator_logprobs", np.array([-np.inf], np.float32)),
        ("token_versions", np.array([-1], np.int32)),
        ("reference_logprobs", np.zeros(2, np.float32)),
    ],
)
def test_check_names_the_broken_field(field, value):
    made = make([0])
    made.check()
    with pytest.raises(AssertionError, match=field):
        dataclasses.replace(made, **{field: value}).check()


@given(groups(with_reference=False) | groups(with_reference=True))
def test_the_batch_hash_depends_only_on_the_content(group):
    copies = [dataclasses.replace(t, attempt=t.attempt + 1) for t in deepcopy(group)]
    assert batch_hash(pack(copies)) == batch_hash(pack(group))
    assert batch_hash(concatenate([pack(group)])) == batch_hash(pack(group))


CHANGES = {
    **{"prompt_index": 8, "epoch": 1, "group_id": 5, "temperature": 0.5, "reward": 1.5},
    **{"reward_terms": {"format": 1.0}, "success": True, "finish_reason": "length"},
    **{"prompt_ids": np.array([0, 1, 3]), "response_ids": np.array([0, 2])},
    "response_mask": np.array([True, False]),
    "generator_logprobs": np.array([0, np.nextafter(np.float32(0), -1)], np.float32),
    "token_versions": np.array([3, 5], np.int32),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_content_changes_the_batch_hash(field):
    same = make([3, 4])
    other = dataclasses.replace(same, **{field: CHANGES[field]})
    assert batch_hash(pack([same, other])) != batch_hash(pack([same, same]))


def test_the_batch_hash_depends_on_where_responses_end_and_on_their_order():
    batches = [[make([0, 0]), make([0])], [make([0]), make([0, 0])]]
    assert len({batch_hash(pack(batch)) for batch in batches}) == 2
    assert batch_hash(pack([])) != batch_hash(pack(batches[0]))
