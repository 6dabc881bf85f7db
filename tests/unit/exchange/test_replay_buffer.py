"""The replay buffer on a real event loop: consume-once, bounded, blocking, never stale."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.trajectories import response

from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.state_files import read_state
from grpo_components.trajectory import batch_hash, pack, summarize, unpack

pytestmark = pytest.mark.anyio


def group(group_id, version=0, size=2):
    identity = {"prompt_index": group_id}
    members = [response(group_id, [version] * 3, **identity, reward=float(i)) for i in range(size)]
    return pack(members), summarize(pack(members))


def make(eta=2, groups_per_step=2, timeout_s=5.0, **options):
    """A buffer with room for (eta + 1) * groups_per_step groups."""
    contract = StalenessContract(eta, groups_per_step)
    return ReplayBuffer(contract=contract, timeout_s=timeout_s, **options)


def mixed_group(group_id, oldest, newest):
    """A group whose weights were swapped while its second response was sampled."""
    members = unpack(group(group_id, oldest)[0])
    members[1].token_versions = np.array([oldest, newest, newest], np.int32)
    return pack(members), summarize(pack(members))


def ids(batch):
    return [t.group_id for t in unpack(batch)]


async def test_every_group_is_handed_out_once_whole_and_sorted_the_oldest_weights_first():
    buffer = make()
    for group_id, version in ((5, 1), (2, 0), (9, 1), (0, 0), (1, 3)):
        await buffer.add(*group(group_id, version))
    first, second = await buffer.take(2, 1), await buffer.take(2, 1)
    assert ids(first[0]) == [0, 0, 2, 2]
    assert ids(second[0]) == [5, 5, 9, 9]
    assert [g.group_id for g in second[1].groups] == [5, 9]
    assert second[1].buffered == 1


async def test_a_stale_group_is_reported_and_never_handed_out():
    buffer = make(eta=1)
    await buffer.add(*group(0, version=0))
    await buffer.add(*group(1, version=2))
    batch, summary = await buffer.take(2, 2)
    assert [g.group_id for g in summary.dropped] == [0]
    assert (summary.groups, ids(batch)) == ([], [])  # at once, so that it is replaced
    await buffer.add(*group(2, version=2))
    assert ids((await buffer.take(2, 2))[0]) == [1, 1, 2, 2]


@pytest.mark.parametrize(("stale_tokens", "kept"), [("drop", [2, 3]), ("mask", [1, 2])])
async def test_a_group_is_stale_by_its_oldest_token_or_by_its_newest_where_old_ones_are_masked(
    stale_tokens, kept
):
    buffer = make(eta=1, stale_tokens=stale_tokens)
    for number, versions in enumerate([(0, 1), (1, 2), (2, 3), (3, 3)]):
        await buffer.add(*mixed_group(number, *versions))
    batch, summary = await buffer.take(2, 3)
    assert sorted(set(ids(batch))) == kept
    assert [g.group_id for g in summary.dropped] == list(range(kept[0]))


async def test_a_replay_takes_and_drops_the_groups_of_the_recorded_run():
    """Whatever their versions; it waits until they are there."""
    buffer = make()
    for group_id, version in ((0, 9), (1, 0), (2, 5), (3, 9)):
        await buffer.add(*group(group_id, version))
    _, taken = await buffer.take(2, 9, ([], [1]))
    assert not taken.groups and [g.group_id for g in taken.dropped] == [1]
    waiting = asyncio.create_task(buffer.take(2, 9, ([3, 7], [])))
    await buffer.add(*group(7))
    batch, taken = await waiting
    assert ids(batch) == [3, 3, 7, 7] and taken.batch_hash == batch_hash(batch)
    assert not taken.dropped and taken.buffered == 2
    assert ids((await buffer.take(2, 9, ([0, 2], [])))[0]) == [0, 0, 2, 2]


async def test_groups_to_train_again_follow_the_new_ones():
    """Live and in a replay; not if all groups that are found are stale."""
    buffer = make(eta=1)
    for group_id in range(2, 6):
        await buffer.add(*group(group_id, version=1))
    batch, taken = await buffer.take(1, 1, None, *group(1, version=1))
    assert ids(batch) == [2, 2, 1, 1] and taken.batch_hash == batch_hash(batch)
    assert [[g.group_id for g in part] for part in (taken.groups, taken.reused)] == [[2], [1]]
    batch, _ = await buffer.take(1, 1, ([5], []), *group(0), *group(6))
    assert ids(batch) == [5, 5, 0, 0, 6, 6]
    batch, taken = await buffer.take(1, 3, None, *group(1))
    assert (ids(batch), taken.groups, taken.reused, len(taken.dropped)) == ([], [], [], 2)


async def test_a_full_buffer_holds_producers_back_until_the_consumer_takes():
    buffer = make(eta=0)
    await buffer.add(*group(0))
    await buffer.add(*group(1))
    adding = asyncio.create_task(buffer.add(*group(2)))
    await asyncio.sleep(0)
    assert not adding.done()
    await buffer.take(1, 0)
    assert await adding == 2


async def test_each_wait_ends_with_an_error_that_says_who_waited():
    buffer = make(eta=0, groups_per_step=1, timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"training loop .* 2 groups .*timeouts\.batch_s"):
        await buffer.take(2, 0)
    await buffer.add(*group(0))
    with pytest.raises(TimeoutError, match=r"group 1 .* replay_buffer"):
        await buffer.add(*group(1))
    with pytest.raises(TimeoutError, match=r"replay: .* groups \[8\]"):
        await buffer.take(2, 9, ([0, 8], []))


DRAWN = st.tuples(st.integers(0, 3), st.booleans(), st.booleans())
"""Version of a group, and whether it is held and wanted again."""


@settings(max_examples=many(50), deadline=None)
@given(st.lists(DRAWN, max_size=6))
async def test_held_groups_are_written_as_they_were_whatever_happens_meanwhile(
    tmp_path_factory, drawn
):
    """And restored bit for bit, beyond the capacity of another buffer if there are more."""
    folder = str(tmp_path_factory.mktemp("state"))
    versions = [version for version, *_ in drawn]
    held = {i for i, (_, is_held, _) in enumerate(drawn) if is_held}
    wanted = {i for i in held if drawn[i][2]}

    buffer, restored = make(), make(eta=0, groups_per_step=1)
    groups = [mixed_group(i, version, version + 1) for i, version in enumerate(versions)]
    parts = [part for group_id in held for part in groups[group_id]]
    batch, _ = group(7)
    assert buffer.write_state(folder, batch, *parts) is None
    assert batch_hash(read_state(Path(folder), "batch")) == batch_hash(batch)
    *parts, _, _ = buffer.read_state(folder, sorted(wanted))
    await restored.add(*group(99))  # its own groups are replaced
    await restored.refill(*parts)
    for group_id in sorted(wanted, key=lambda i: (versions[i], i)):
        expected, summary = mixed_group(group_id, versions[group_id], versions[group_id] + 1)
        batch, taken = await restored.take(1, 0)
        assert batch_hash(batch) == batch_hash(expected)
        assert (taken.groups, taken.dropped) == ([summary], [])


def test_a_folder_that_cannot_be_written_is_an_answer_not_an_error(tmp_path):
    (tmp_path / "file").touch()
    assert "file" in (make().write_state(str(tmp_path / "file"), None) or "")
