"""The books close over all attempts, and one token or group that either side lacks is found."""

import pytest
from lib.receipts import attempts, insert, of, remove, step

from grpo_tools.books import Amount, close_books


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "alone"


def rows(folder):
    return {what: (groups, tokens) for what, groups, tokens in close_books(folder).table()}


def test_both_sides_are_listed_and_the_audit_prints_them(events, audit, folder):
    code, broken, out = audit(events)
    assert (code, broken) == (0, {})
    assert rows(folder) == {
        "generated": (14, 98),
        "trained": (10, 60),
        "masked: older than max_staleness": (0, 10),
        "in skipped steps and updates": (2, 14),
        "filtered": (1, 7),
        "dropped: stale": (1, 7),
        "residual": (0, 0),
    }
    assert "books, in groups/tokens: 14/98 generated = 10/60 trained + 0/10 masked: older " in out
    assert "; residual 0/0\n" in out
    assert "note: books: 1 groups were dropped before their generation ended" in out


CORRUPTIONS = {
    "a token more was generated": lambda r: of(r, "finish", group=7)[0].update(
        response_tokens=[3, 5]
    ),
    "a token less was trained": lambda r: step(r, 3)["tokens"]["7"].update(skipped=6),
    "a token more is masked": lambda r: step(r, 2)["tokens"]["5"].update(stale=1),
    "a group has no count": lambda r: step(r, 2)["tokens"].pop("5"),
    "a group is counted that was not trained": lambda r: step(r, 2)["tokens"].update(
        {"99": {"trained": 7}}
    ),
    "a group of an earlier step is counted": lambda r: step(r, 3)["tokens"].update(
        {"5": {"skipped": 2}}
    ),
    "two groups are mixed up": lambda r: step(r, 2)["tokens"].update(
        {"5": {"trained": 8}, "6": {"trained": 6}}
    ),
    "a filtered token is missing": lambda r: of(r, "drop")[0].update(tokens=[None]),
    "a failed group has tokens": lambda r: of(r, "drop")[1].update(tokens=[7]),
    "a trained token is of no version": lambda r: step(r, 2).update(
        token_versions={"0": 3, "1": 10}
    ),
    "a group is carried from nowhere": lambda r: r[0].update(carried={"3": 7}),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_one_token_or_group_too_many_or_too_few_is_found(events, audit, corrupt):
    corrupt(events)
    code, broken, out = audit(events)
    assert (code, set(broken)) == (1, {"books"})
    assert "receipts.jsonl line " in out.splitlines()[-1]


@pytest.fixture
def resumed(events):
    return attempts(events, kill_after=6, resume_after=4)


def test_what_a_resume_leaves_behind_is_undone(resumed, audit, folder):
    code, broken, out = audit(resumed)
    assert (code, broken) == (0, {}), out
    found = rows(folder)
    assert found["generated"] == (18, 126) and found["residual"] == (0, 0)
    assert found["undone by a rollback or resume"] == (4, 28)
    assert found["trained"] == (10, 60)


def carried(events, *groups):
    """The first attempt ends after step 4 with group 11 buffered, and the second takes it over."""
    early = [of(events, name, group=11)[0] for name in ("issue", "finish", "buffer")]
    for event in early:
        remove(events, event)
    insert(events, step(events, 4), *early)
    return attempts(events, 4, 4, *groups)


def test_a_buffered_group_is_carried_into_the_next_attempt(events, audit, folder):
    code, broken, out = audit(carried(events, 11))
    assert (code, broken) == (0, {}), out
    assert "undone by a rollback or resume" not in rows(folder)


@pytest.mark.parametrize("tokens", [{}, {"11": 6}, {"11": 7, "13": 7}])
def test_the_ledger_has_to_carry_every_token(events, audit, tokens):
    events = carried(events, 11)
    of(events, "start", attempt=1)[0]["carried"] = tokens
    assert "books" in audit(events)[1]


def test_what_is_in_flight_at_the_end_is_what_the_ledger_counts(events, audit, folder):
    events[0]["num_steps"], events[-1]["finished"] = 7, False
    group = {"group": 15, "prompt": 500, "epoch": 0}
    issue = {"event": "issue", "role": "test", **group, "target_step": 6, "needed_version": 3}
    finish = {"event": "finish", "group": 15, "response_tokens": [4, 4]}
    insert(events, events[-1], *({**each, "attempt": 0} for each in (issue, finish)))
    events[-1]["living"] = [{**group, "state": "buffered", "tokens": 8}]
    assert audit(events).code == 0
    assert rows(folder)["in flight at the end"] == (1, 8)
    for tokens in (7, None):
        events[-1]["living"][0]["tokens"] = tokens
        assert [*audit(events).broken] == ["books"]


def test_uses_of_trained_groups_are_beside_the_balance(tmp_path, write_run, audit, folder):
    events = write_run(tmp_path / "receipts.jsonl", reuse=True)
    code, broken, out = audit(events)
    assert (code, broken) == (0, {})
    books = close_books(folder)
    uses = [
        step(events, sample["step"])["tokens"][str(again["group"])].get("trained", 0)
        for sample in of(events, "sample")
        for again in sample["reused"]
    ]
    assert uses and books.again == Amount(len(uses), sum(uses)) and books.residual == Amount()
    assert f" living, {len(uses)} trained again\n" in out
