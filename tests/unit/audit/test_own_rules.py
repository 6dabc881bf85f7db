"""The audit's own draws and choices equal those of a sound run, and differ from a faulty one's."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from lib.prompts import Mix, next_index
from lib.properties import many
from lib.trajectories import summary

from grpo_components.data import curriculum as of_runs
from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.data.prompt_stream import PartTurns
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger_entry import LedgerEntry
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.settings import CurriculumSettings
from grpo_tools.audit import curriculum, reuse


@st.composite
def curricula(draw):
    low, high = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    floor, decay = draw(st.floats(1e-3, 1)), draw(st.floats(0.01, 1))
    rule = CurriculumSettings(low=low, high=high, floor=floor, decay=decay)
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    rows = random.Random(draw(st.integers(0, 9))).sample(range(300), sum(sizes))
    parts = []
    for size in sizes:
        parts.append((rows[:size], draw(st.floats(0.01, 99))))
        rows = rows[size:]
    return Mix(parts), rule, draw(st.integers(0, 2**31 - 1))


NARROW = (Mix([([5, 6, 7, 1], 1.0)]), CurriculumSettings(low=0, high=0, floor=0.5, decay=0.3), 3)
WIDE = (Mix([([5, 6], 1e300), ([7], 1e-300)]), CurriculumSettings(low=1, high=1), 2**31 - 1)


@settings(max_examples=many(100), deadline=None)
@given(curricula(), st.integers(0, 2**32))
@example(NARROW, 0)
@example(WIDE, 1)
def test_the_audit_draws_what_a_run_draws_to_the_bit(built, number):
    """From its receipts, with any results, over checkpoints and attempts that go back to them."""
    run, chance = PromptCurriculum(*built), random.Random(number)
    own = curriculum.first_draws(json.loads(json.dumps(run.describe())))
    drawn, kept = [], (run.state_dict(), copy.deepcopy(own), [])
    for _ in range(40):
        for _ in range(chance.choice((1, 3, 9, 60))):  # also more than there are prompts
            drawn.append(next_index(run)[0])
            row, epoch = curriculum.draw(own)
            assert (row, epoch) == (drawn[-1], drawn.count(row) - 1)
        for row in chance.choices(drawn, k=chance.randint(0, 6)):
            scored = chance.randint(0, 9)
            result = row, chance.choice((0, scored, chance.randint(0, scored))), scored
            run.add_result(*result)
            own.results.append(result)
        run.end_step()
        curriculum.end_step(own)
        state = run.state_dict()
        ends = [part.prompts for part in own.data_sets]
        for part, saved in zip(ends, state["parts"], strict=True):
            places = saved["places"]
            assert own.epochs[part][places].tolist() == saved["draws"]
            of_each = own.counts[:, part][:, places].tolist()
            assert of_each == [saved["successes"], saved["responses"]]
        if chance.random() < 0.1:
            kept = json.loads(json.dumps(state)), copy.deepcopy(own), list(drawn)
        elif chance.random() < 0.1:
            run, own, drawn = PromptCurriculum(*built), copy.deepcopy(kept[1]), list(kept[2])
            run.load_state_dict(kept[0])


@settings(max_examples=many(100))
@given(st.floats(1e-3, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_the_audit_weighs_prompts_as_a_run_does_to_the_bit(floor, low, high, seed):
    rule = CurriculumSettings(low=min(low, high), high=max(low, high), floor=floor)
    chance = np.random.default_rng(seed)
    scored = chance.integers(0, 9, 500) * chance.choice([1.0, 0.1, 1e-9], 500)
    counts = np.array([scored * chance.choice([0.0, 1 / 3, 1.0], 500), scored])
    middle = (rule.low + rule.high) / 2
    rates = (counts[0] + middle * 0.25) / (counts[1] + 0.25)
    own = curriculum._weights(counts, rule.model_dump())
    assert own.tobytes() == of_runs.weights_of(rule, rates).tobytes()


@st.composite
def reuses(draw):
    return draw(st.integers(2, 9)), draw(st.floats(0.5, 0.9)), draw(st.integers(2, 4))


RULES = st.lists(st.tuples(st.integers(1, 3), reuses()), min_size=1, max_size=3)


@settings(max_examples=many(100))
@given(RULES, st.integers(0, 2**32))
def test_the_audit_chooses_the_groups_that_a_run_chooses(rules, seed):
    """With skipped steps, equal priorities, and attempts that resume with another rule."""
    chance, version, number = random.Random(seed), 0, 0
    state, kept, pool = {}, (0, {}, {}), {}
    for eta, (batch, share, max_uses) in rules:
        run = GroupReuse(StalenessContract(eta, batch), share, max_uses)
        version, state, pool = kept
        run.load_state_dict(state, version)
        start = {"max_staleness": eta, "groups_per_step": batch, **run.describe()}
        pool = reuse.reusable(pool, start, version)
        for _ in range(chance.randint(1, 12)):
            assert reuse.most_reused(start) == run.most
            groups = [
                summary(
                    chance.choices((0.0, 1.0, 0.3), k=chance.randint(1, 4)),
                    group_id=number + n,
                    oldest_version=max(0, version - chance.randint(0, eta)),
                )
                for n in range(batch - len(run.chosen))
            ]
            number += len(groups)
            entries = [LedgerEntry(g.group_id, {}, 0, 0, 0, 0, "in_training") for g in groups]
            said = json.loads(json.dumps(run.begin_step(entries, groups)))
            own = reuse.chosen(pool, start, version)
            assert said["reused"] == [{"group": n, "use": pool[n].uses + 1} for n in own]
            event("reused" if own else "nothing reused")
            numbers = [group.group_id for group in groups]
            new = dict(zip(numbers, (reuse.Trained(**w) for w in said["worths"]), strict=True))
            before, version = version, version + (chance.random() < 0.7)
            run.end_step(before, version)
            again = {n: pool[n] for n in own}
            pool = reuse.after_step(pool, again, new, skipped=version == before)
            pool = reuse.reusable(pool, start, version)
            assert sorted(pool) == sorted(run.candidates)
            if chance.random() < 0.5:
                kept = version, json.loads(json.dumps(run.state_dict())), pool


def briefly(name, change):
    """A fault: during the call, an attribute has another value."""

    def around(whole):
        def faulty(self, *arguments):
            before = getattr(self, name)
            setattr(self, name, change(before))
            whole(self, *arguments)
            setattr(self, name, before)

        return faulty

    return around


def without_new_turns(whole):
    def faulty(self, results):
        blocked = self._blocked.copy()
        whole(self, results)
        self._blocked[:] = blocked

    return faulty


def with_the_last_result_only(_):
    def faulty(self, index, *result):
        self._results = {index: result}

    return faulty


def without_removals(whole):
    def faulty(self, before, after):
        kept = {each.group_id: replace(each) for each in self.chosen}
        whole(self, before, after)
        if before == after:
            self.candidates |= kept
            self.choose(after)

    return faulty


RATES, FASTER = of_runs._Rates, briefly("_rule", lambda r: r.model_copy(update={"decay": 0.8}))
FAULTS_OF_DRAWS = {
    "results fade faster": (RATES, "end_step", FASTER),
    "a new prompt weighs more": (of_runs, "_PRIOR_RESPONSES", lambda weight: 2 * weight),
    "the floor is lower": (of_runs, "weights_of", lambda f: lambda r, x: f(r, x) - r.floor / 2),
    "a step counts the last result": (PromptCurriculum, "add_result", with_the_last_result_only),
    "a step gives no new turns": (RATES, "end_step", without_new_turns),
    "a turn counts twice": (PartTurns, "next", lambda f: lambda self: (f(self), f(self))[0]),
}
FAULTS_OF_REUSE = {
    "the age is forgotten": (GroupReuse, "_priority", lambda _: lambda _s, g, _v: g.spread),
    "of equal groups, the younger goes first": (
        GroupReuse,
        "_priority",
        lambda f: lambda self, g, version: f(self, g, version) * (1 + g.group_id * 1e-9),
    ),
    "groups are used too often": (GroupReuse, "choose", briefly("max_uses", lambda n: n + 1)),
    "too old groups are used": (StalenessContract, "may_train", lambda _: lambda *_: True),
    "fewer groups are used": (GroupReuse, "choose", briefly("most", lambda _: 0)),
    "a skipped step removes nothing": (GroupReuse, "end_step", without_removals),
}


@pytest.mark.parametrize("fault", FAULTS_OF_DRAWS.values(), ids=FAULTS_OF_DRAWS)
def test_a_fault_in_the_runs_curriculum_is_found(tmp_path, write_run, audit, monkeypatch, fault):
    plant(monkeypatch, *fault)
    records = write_run(tmp_path / "receipts.jsonl", num_steps=60, draws=True)
    assert [*audit(records).broken] == ["curriculum"]


@pytest.mark.parametrize("fault", FAULTS_OF_REUSE.values(), ids=FAULTS_OF_REUSE)
def test_a_fault_in_the_runs_reuse_is_found(tmp_path, write_run, audit, monkeypatch, fault):
    plant(monkeypatch, *fault)
    found = set()
    for eta, uses in ((1, 9), (3, 2), (3, 3)):
        rule = {"eta": eta, "reuse": True, "max_uses": uses}
        found |= audit(write_run(tmp_path / "receipts.jsonl", num_steps=12, **rule)).broken.keys()
    assert "reused" in found and found <= {"reused", "contract"}


def plant(monkeypatch, owner, name, around):
    monkeypatch.setattr(owner, name, around(getattr(owner, name)))
