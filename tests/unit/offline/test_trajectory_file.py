"""Groups survive a trajectory file unchanged, and what no run could have written is refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.trajectories import trajectory

from grpo_components.offline.trajectory_file import (
    RecordedGroups,
    TrajectoryWriter,
    group_line,
    read_groups,
)
from grpo_components.trajectory import batch_hash, pack, summarize, unpack


def make(group_id, logprobs, reward=1.0, mask=None):
    failed, size = math.isnan(reward), len(logprobs)
    return trajectory(
        np.arange(size),
        **{"prompt_ids": np.array([7, group_id]), "prompt_index": group_id + 10},
        **{"group_id": group_id, "temperature": 0.7, "reward": reward, "success": reward == 1.0},
        response_mask=np.array([True] * size if mask is None else mask, bool),
        generator_logprobs=np.array(logprobs, np.float32),
        finish_reason="error" if failed else "stop",
        reward_terms={} if failed else {"correctness": reward},
        error="it failed" if failed else None,
    )


def written(path, *batches, first=0):
    writer = TrajectoryWriter(rank=0, path=str(path))
    return [
        writer.train_step(pack(batch), np.zeros(len(batch), np.float32), number)
        for number, batch in enumerate(batches, start=first)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trajectories.jsonl"


@given(
    logprobs=st.lists(st.floats(-50, 0, width=32), min_size=1, max_size=5),
    reward=st.sampled_from([1.0, 0.1 + 0.2, math.nan]),
)
def test_a_group_is_the_same_bit_for_bit(tmp_path_factory, logprobs, reward):
    path = tmp_path_factory.mktemp("file") / "trajectories.jsonl"
    group = [make(0, logprobs, reward), make(0, [-1.0, -2.0], mask=[True, False])]
    path.write_text(group_line(group) + "\n")
    (again,) = read_groups(path)
    assert batch_hash(pack(again)) == batch_hash(pack(group))
    assert [t.error for t in again] == [t.error for t in group]


def test_written_batches_are_the_recorded_groups_of_another_run(path):
    groups = [[make(number, [-0.1 * number - 0.1] * 2)] * 2 for number in range(4)]
    answers = written(path, groups[0] + groups[1], groups[2] + groups[3])
    assert answers[0].token_versions == {0: 8} and answers[1].policy_version == 0
    recorded = RecordedGroups(number=1, path=str(path))
    packed, summary, text = recorded.generate_group({"prompt_index": 2}, 3, 40, 5, 1.0)
    for each, before in zip(unpack(packed), groups[2], strict=True):
        identity = (each.prompt_index, each.epoch, each.group_id, each.attempt)
        assert (*identity, each.temperature) == (2, 3, 40, 5, before.temperature)
        assert np.array_equal(each.prompt_ids, before.prompt_ids)
        assert np.array_equal(each.generator_logprobs, before.generator_logprobs)
    assert summary == summarize(packed) and text is None


def test_the_first_responses_return_the_known_logprobs_of_their_tokens(path):
    batch = [make(7, [-0.5, -1.5], mask=[True, False]), make(7, [-2.0]), make(8, [-3.0])]
    writer = TrajectoryWriter(rank=0, path=str(path), logged_responses=2)
    answer = writer.train_step(pack(batch), np.zeros(3, np.float32), 0)
    unknown = {"trainer_logprobs": None, "reference_logprobs": None}
    known = ([-0.5, None], [-2.0])
    assert answer.token_logprobs == {7: [{"generator_logprobs": each, **unknown} for each in known]}


def test_only_rank_0_writes(path):
    TrajectoryWriter(rank=1, path=str(path)).train_step(pack([make(0, [-1.0])]), np.zeros(1), 0)
    assert not path.exists()


@pytest.mark.parametrize("torn", [0, 1, 9])
def test_a_restarted_writer_keeps_earlier_steps_and_writes_a_repeated_one_once(path, torn):
    groups = [[make(number, [-1.0])] * 2 for number in range(6)]
    batches = [groups[at] + groups[at + 1] for at in (0, 2, 4)]
    written(path, *batches)
    whole = path.read_bytes()
    path.unlink()
    written(path, *batches[:2])  # it was killed before its second answer
    path.write_bytes(path.read_bytes()[: -torn or None])
    written(path)
    written(path, *batches[1:], first=1)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", '{"prompt_index": 0, "prompt_ids": [1], "responses": []}'])
def test_an_invalid_line_is_named(path, line):
    path.write_text(group_line([make(0, [-1.0])]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"trajectories.jsonl, line 2: "):
        list(read_groups(path))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"generator_logprobs": [math.nan, -1.0]}, "generator_logprobs"),
        ({"generator_logprobs": [-1.0]}, "generator_logprobs: .* 2"),
        ({"response_ids": ["a", 2]}, "ValueError"),
        ({"response_mask": [False, False]}, "response_mask"),
        ({"reward": None}, "reward: "),
        ({"finish_reason": "error", "error": "it failed", "reward": 1.0}, "reward: "),
    ],
)
def test_a_response_that_no_run_could_have_written_is_refused(path, changes, problem):
    """Training on it would be wrong, and nobody would notice."""
    record = json.loads(group_line([make(0, [-1.0, -2.0])]))
    path.write_text(json.dumps(record))
    assert len(list(read_groups(path))) == 1
    record["responses"][0] |= changes
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"trajectories.jsonl, line 1: .*{problem}"):
        list(read_groups(path))


def test_a_missing_field_is_named_and_an_unknown_one_is_ignored(path):
    record = json.loads(group_line([make(0, [-1.0])] * 2)) | {"more": 1}
    record["responses"][0]["more"] = [[]]
    path.write_text(json.dumps(record))
    assert len(next(read_groups(path))) == 2
    del record["responses"][1]["success"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"line 1: .*'success'"):
        list(read_groups(path))
