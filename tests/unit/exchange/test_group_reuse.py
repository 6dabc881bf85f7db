"""Which trained groups are trained again: by priority, while fresh, the same after a resume."""

import json
import math

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from lib.trajectories import summary

from grpo_components.exchange.group_reuse import (
    Candidate,
    GroupReuse,
    reused_per_step,
    spread,
)
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.staleness import Reused, StalenessContract


def entry(group_id):
    found = LedgerEntry(group_id, {"prompt_index": group_id}, 0, 0, 0, 0, "in_training")
    found.tokens, found.parts = 8, (f"group {group_id}", "summary")
    return found


def ids_of(groups):
    return [each.group_id for each in groups]


RULES = st.tuples(st.integers(1, 3), st.integers(2, 6), st.floats(0.5, 0.9), st.integers(2, 4))
GROUP = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.integers(0, 3))
STEPS = st.lists(st.tuples(st.booleans(), st.lists(GROUP, max_size=6)), max_size=7)
"""For each step: whether it is skipped, and rewards and age of the groups that finish."""


def played(reuse, steps, version=0, first=0):
    """Play steps; return what each reused, and the version and the next group id after them."""
    chosen = []
    for skipped, groups in steps:
        ids = range(first, first + len(groups))
        first += len(groups)
        summaries = [
            summary([*map(float, rewards)], group_id=number, oldest_version=max(0, version - age))
            for number, (rewards, age) in zip(ids, groups, strict=True)
        ]
        reuse.begin_step([entry(number) for number in ids], summaries)
        chosen.append(ids_of(reuse.chosen))
        before, version = version, version + (not skipped)
        reuse.end_step(before, version)
    return chosen, version, first


@given(RULES, STEPS)
def test_a_step_reuses_the_best_fresh_groups_that_were_not_used_up(rule, steps):
    eta, batch, share, max_uses = rule
    reuse = GroupReuse(StalenessContract(eta, batch), share, max_uses)
    uses, known, version, number = {}, {}, 0, 0
    for skipped, groups in steps:
        (chosen,), after, end = played(reuse, [(skipped, groups)], version, number)
        fresh = {k for k, (_, oldest) in known.items() if version - oldest <= eta}
        ready = {k for k in fresh if known[k][0] > 0 and uses[k] < max_uses}
        assert chosen == sorted(set(chosen)) and set(chosen) <= ready
        most = reused_per_step(share, batch)
        assert len(chosen) == min(len(ready), most)

        priority = {k: worth / 2 ** (version - oldest) for k, (worth, oldest) in known.items()}
        worst = min((priority[k] for k in chosen), default=math.inf)
        assert all(priority[k] <= worst for k in ready - set(chosen))
        for k in chosen:
            event("reused")
            uses[k] += 1
        if skipped:
            known = {k: known[k] for k in known if k not in chosen}
        for k, (rewards, age) in zip(range(number, end), groups, strict=True):
            if not skipped:
                known[k], uses[k] = (spread(rewards), max(0, version - age)), 1
        version, number = after, end
        assert reuse.counts == Reused(len(reuse.chosen), most)
        assert ids_of(reuse.kept) == sorted(reuse.candidates)


@given(RULES, STEPS, STEPS)
def test_a_saved_and_restored_choice_goes_on_as_if_nothing_had_happened(rule, before, after):
    eta, batch, share, max_uses = rule
    contract = StalenessContract(eta, batch)
    whole, saved, again = (GroupReuse(contract, share, max_uses) for _ in range(3))
    chosen, version, number = played(whole, before)
    assert played(saved, before)[0] == chosen
    played(again, before[:2])  # it was at another place
    state = json.loads(json.dumps(saved.state_dict()))
    again.load_state_dict(state, version)
    kept = ([vars(e) | {"parts": ()} for e in each.kept] for each in (whole, again))
    assert next(kept) == next(kept)
    assert played(again, after, version, number) == played(whole, after, version, number)


def test_what_was_saved_follows_the_rule_of_the_resume():
    steps = [(False, [([0, 1], 0), ([0, 2], 0), ([0, 0], 0)])]
    before = GroupReuse(StalenessContract(3, 4), 0.5, 3)
    _, version, _ = played(before, [*steps, (False, [])])
    state = before.state_dict()
    for contract, rule, chosen in (
        (StalenessContract(3, 4), (0.5, 3), [0, 1]),
        (StalenessContract(3, 4), (0.25, 3), [1]),  # the better one
        (StalenessContract(3, 4), (0.5, 2), []),  # used twice
        (StalenessContract(1, 4), (0.5, 3), []),  # too old
        (StalenessContract(3, 4), (0.0, 1), []),
    ):
        after = GroupReuse(contract, *rule)
        after.load_state_dict(state, version)
        assert ids_of(after.chosen) == chosen
        after.load_state_dict({}, version)  # a checkpoint of a run without reuse
        assert not after.kept and not after.chosen


def test_a_step_says_what_it_reuses_and_what_later_choices_depend_on():
    reuse = GroupReuse(StalenessContract(2, 4), 0.5, 2)
    assert reuse.describe() == {"replay_generation": {"share": 0.5, "max_uses": 2}}
    assert reuse.begin_step([entry(5)], [summary([0.0, 1.0, math.nan], group_id=5)]) == {
        "worths": [{"spread": 0.5, "oldest_version": 0}],
        "reused": [],
    }
    reuse.end_step(0, 1)
    assert reuse.metrics.pop("reuse/age_mean") is math.nan
    assert reuse.metrics == {"reuse/share": 0.0, "reuse/uses_mean": 1.0}
    said = reuse.begin_step([], [])
    assert said == {"worths": [], "reused": [{"group": 5, "use": 2}]}
    assert ids_of(reuse.chosen) == ids_of(reuse.kept) == [5]
    reuse.end_step(1, 2)
    assert reuse.metrics == {"reuse/share": 0.25, "reuse/uses_mean": 1.25, "reuse/age_mean": 1.0}
    assert not reuse.chosen and not reuse.kept


def test_without_a_share_nothing_is_kept_or_said():
    reuse = GroupReuse(StalenessContract(2, 4))
    assert played(reuse, [(False, [([0, 1], 0)])] * 3)[0] == [[], [], []]
    assert (reuse.begin_step([], []), reuse.state_dict(), reuse.describe()) == ({}, {}, {})
    assert (reuse.kept, reuse.metrics, reuse.counts) == ([], {}, Reused())


def test_among_equals_the_older_group_goes_first_and_a_version_halves_the_priority():
    reuse = GroupReuse(StalenessContract(4, 4), 0.25, 2)
    reuse.candidates = {n: Candidate(n, worth, oldest, entry(n)) for n, worth, oldest in
                        ((7, 0.5, 3), (3, 0.5, 3), (1, 1.0, 2), (2, 1.9, 1))}  # fmt: skip
    for chosen in (1, 3, 7, 2):
        reuse.choose(4)
        assert ids_of(reuse.chosen) == [chosen]
        del reuse.candidates[chosen]


@pytest.mark.parametrize(
    ("share", "batch", "count"), [(0.25, 8, 2), (0.29, 100, 29), (0.1, 8, 0), (0.999, 9, 8)]
)
def test_a_share_is_rounded_down_to_groups(share, batch, count):
    assert reused_per_step(share, batch) == count


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=9))
def test_the_spread_is_the_deviation_of_the_scored_rewards(rewards):
    known = [reward for reward in rewards if not math.isnan(reward)]
    assert spread(rewards) == pytest.approx(np.std(known) if known else 0.0)
    assert (spread(rewards) == 0) == (len(set(known)) < 2 or np.std(known) == 0)
