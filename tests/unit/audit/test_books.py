"""The books close over all attempts, and one token or group that either side lacks is found."""

import json

import pytest

from grpo_components.exchange.books import Amount, close_books, reader_of


@pytest.fixture
def records(tmp_path, write_run):
    return write_run(tmp_path / "receipts.jsonl", books=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "alone" / "logs").mkdir(parents=True)
    return tmp_path / "alone"


def rows(folder):
    table = close_books(reader_of(folder)).table()
    return {what: (groups, tokens) for what, groups, tokens in table}


def events(record, kind):
    return [event for event in record["events"] if kind in event]


def log(folder, *lines):
    """Write events as `EventLog` does."""
    with (folder / "logs" / "events.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            name = {"event": line["event"], "number": number, "attempt": line["attempt"]}
            file.write(json.dumps(name | line) + "\n")


def test_both_sides_are_listed_and_the_audit_prints_them(records, audit, folder):
    code, broken, out = audit(records)
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


def a_token_more_was_generated(r):
    events(r[3], "generated")[0]["response_tokens"] += 0.5
    return {"books", "totals", "tokens"}


def a_token_less_was_trained(r):
    r[3]["tokens"]["7"]["skipped"] -= 1


def a_token_more_is_masked(r):
    r[2]["tokens"]["5"]["stale"] = 1


def a_token_more_failed(r):
    r[2]["tokens"]["5"]["failed"] = 1


def a_group_has_no_count(r):
    del r[2]["tokens"]["5"]


def no_group_of_a_step_has_a_count(r):
    del r[2]["tokens"]


def a_group_is_counted_that_was_not_trained(r):
    r[2]["tokens"]["99"] = {"trained": 7}


def two_groups_are_mixed_up(r):
    r[2]["tokens"]["5"]["trained"], r[2]["tokens"]["6"]["trained"] = 8, 6


def a_dropped_token_is_missing(r):
    events(r[1], "dropped")[2]["tokens"] -= 1


def a_filtered_token_is_missing(r):
    events(r[1], "dropped")[0]["tokens"] = None


def a_failed_group_has_tokens(r):
    events(r[1], "dropped")[1]["tokens"] = 7


def a_trained_token_is_of_no_version(r):
    counts = r[2]["token_versions"]
    counts[min(counts)] -= 1
    r[2]["trained_share"] = 13 / 14


def a_group_is_carried_from_nowhere(r):
    r[0]["carried"] = {"3": 7}


@pytest.mark.parametrize(
    "corrupt",
    [
        a_token_more_was_generated,
        a_token_less_was_trained,
        a_token_more_is_masked,
        a_token_more_failed,
        a_group_has_no_count,
        no_group_of_a_step_has_a_count,
        a_group_is_counted_that_was_not_trained,
        two_groups_are_mixed_up,
        a_dropped_token_is_missing,
        a_filtered_token_is_missing,
        a_failed_group_has_tokens,
        a_trained_token_is_of_no_version,
        a_group_is_carried_from_nowhere,
    ],
)
def test_one_token_or_group_too_many_or_too_few_is_found(records, audit, corrupt):
    expected = corrupt(records) or {"books"}
    code, broken, out = audit(records)
    assert (code, set(broken)) == (1, expected)
    assert "receipts.jsonl line " in out.splitlines()[-1]


def attempts(records, kill_after=6, resume_after=4):
    """A first attempt that is killed after a step, and a second that goes on from a checkpoint."""
    again = json.loads(json.dumps(records))
    for record in again:
        record["attempt"] = 1
    again[0].update(steps_done=resume_after, policy_version=resume_after - 1)
    return [*records[: kill_after + 1], again[0], *again[resume_after + 1 :]]


def reset(record, version):
    """All generators begin with version 0 and load the restored weights."""
    names = ("generator_0", "generator_1")
    weights = {"version": version, "checksum": f"weights {version}"}
    record["acknowledged"] = [
        {"generator": name, **weights, "published": weights["checksum"]} for name in names
    ]
    record["generators"] = {name: dict(weights) for name in names}


@pytest.fixture
def resumed(records):
    records = attempts(records)
    reset(records[8], 3)
    return records


def test_what_a_resume_leaves_behind_is_undone(resumed, audit, folder):
    log(folder, {"event": "start", "attempt": 0})
    code, broken, _ = audit(resumed)
    assert (code, broken) == (0, {})
    found = rows(folder)
    assert found["generated"] == (18, 126) and found["residual"] == (0, 0)
    assert found["undone by a rollback or resume"] == (4, 28)
    assert found["trained"] == (10, 60)


@pytest.mark.parametrize("place", [5, 6])
def test_a_token_of_a_step_that_was_undone_counts_too(resumed, audit, place):
    group = min(resumed[place]["tokens"])
    resumed[place]["tokens"][group]["trained"] += 1
    assert [*audit(resumed).broken] == ["books"]


def test_what_a_killed_attempt_did_after_its_last_record_is_in_the_event_log(
    records, audit, folder
):
    """It trained a batch whose record is missing, dropped a group, and generated two more."""
    start = {"event": "start", "attempt": 0}
    done = {"event": "finish", "attempt": 0, "group": 3, "response_tokens": [3, 4]}
    steps = [{"event": "step", "attempt": 0, "step": n, "version": n} for n in (1, 2)]
    late = [{**done, "group": 6 + n, "response_tokens": [n, 1]} for n in range(6)]
    ended = [
        {"event": "sample", "attempt": 0, "step": 3, "groups": [6, 7]},
        {"event": "step", "attempt": 0, "step": 3, "version": 2},
        {"event": "drop", "attempt": 0, "groups": [8], "reason": "stale", "reissue": True},
    ]
    log(folder, start, done, *steps, *late, *ended, {**done, "attempt": 1})
    code, broken, out = audit(records[:3], "--unfinished")
    assert (code, broken) == (0, {})
    found = rows(folder)
    assert found["residual"] == (0, 0) and found["generated"] == (6 + 6, 6 * 7 + 21)
    assert found["trained, but killed before the record"] == (2, 3)
    assert found["dropped: stale"] == (2, 7 + 3)
    assert found["in flight at the end"] == (3, 15)
    assert "6 of the groups (21 tokens) were generated after the last record of a killed" in out
    path = folder / "logs" / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6] + lines[7:]))  # one end of a generation is gone
    code, broken, out = audit(records[:3], "--unfinished")
    assert (code, [*broken]) == (1, ["books"])
    assert "logs/events.jsonl lacks what follows number 5 of attempt 0" in out
    path.write_text("".join(lines[:2] + lines[3:]))  # the records have what is gone
    assert audit(records[:3], "--unfinished")[0] == 0


def test_without_the_event_log_the_end_of_a_killed_attempt_is_said_to_be_unknown(resumed, audit):
    _, broken, out = audit(resumed)
    assert not broken
    assert "note: books: attempt 0 was killed: what it generated after its last" in out


def carried(records, groups, restarted=()):
    """The first attempt ends after step 4 with group 11 buffered, and the second takes it over."""
    records = attempts(records, kill_after=4)
    moved = [e for e in records[6]["events"] if e.get("issued", e.get("generated")) == 11]
    del records[6]["events"][:2]
    records[4]["events"] += moved
    records[4]["groups"]["issued"] += 1
    records[4]["groups"]["generated"]["count"] += 1
    records[6]["groups"]["issued"] -= 1
    records[6]["groups"]["generated"]["count"] -= 1
    records[5]["carried"] = groups
    reset(records[6], 3)
    return records


def test_a_buffered_group_is_carried_into_the_next_attempt(records, audit, folder):
    records = carried(records, {"11": 7})
    code, broken, out = audit(records)
    assert (code, broken) == (0, {}), out
    assert "undone by a rollback or resume" not in rows(folder)


@pytest.mark.parametrize("groups", [{}, {"11": 6}, {"11": 7, "13": 7}])
def test_the_ledger_has_to_carry_every_token(records, audit, groups):
    assert "books" in audit(carried(records, groups))[1]


def test_a_group_that_the_checkpoint_did_not_keep_is_generated_again(records, audit, folder):
    records = carried(records, {})
    records[6]["events"][:0] = [{"restarted": 11}, {"generated": 11, "response_tokens": 3.5}]
    records[6]["groups"]["generated"]["count"] += 1
    code, broken, out = audit(records)
    assert (code, broken) == (0, {}), out
    assert rows(folder)["lost in a restart, generated again"] == (1, 7)


def test_what_is_in_flight_at_the_end_is_what_the_ledger_counts(records, audit, folder):
    records[0]["num_steps"], records[7]["finished"] = 7, False
    group = {"group_id": 15, "prompt_index": 500, "epoch": 0}
    issued = {"issued": 15, "prompt_index": 500, "epoch": 0}
    records[7]["events"] += [issued, {"generated": 15, "response_tokens": 4.0}]
    records[7]["groups"]["issued"] = 1
    records[7]["groups"]["generated"] = {"count": 1, "response_tokens_mean": 4.0}
    records[7]["living"] = [{**group, "state": "buffered", "tokens": 8}]
    assert audit(records).code == 0
    assert rows(folder)["in flight at the end"] == (1, 8)
    records[7]["living"][0]["tokens"] = 7
    assert [*audit(records).broken] == ["books"]
    del records[7]["living"][0]["tokens"]
    assert [*audit(records).broken] == ["books"]


def test_uses_of_trained_groups_are_beside_the_balance(tmp_path, write_run, audit, folder):
    records = write_run(tmp_path / "receipts.jsonl", reuse=True, books=True)
    code, broken, out = audit(records)
    assert (code, broken) == (0, {})
    books, uses = (
        close_books(reader_of(folder)),
        [
            record["tokens"][str(event["reused"])].get("trained", 0)  # 0 in the skipped step
            for record in records[1:7]
            for event in events(record, "reused")
        ],
    )
    assert uses and books.again == Amount(len(uses), sum(uses)) and books.residual == Amount()
    assert f" living, {len(uses)} trained again\n" in out
