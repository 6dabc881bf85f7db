"""The audit repeats the choice of reused groups, and finds each reuse that breaks the rule."""

import pytest

from grpo_tools.audit.__main__ import main


@pytest.fixture
def records(tmp_path, write_run):
    """Two groups a step; from the second step on, one of the two may be reused once."""
    return write_run(tmp_path / "receipts.jsonl", reuse=True)


@pytest.fixture
def audit(tmp_path, capsys, write_receipts):
    """Audits records, with a valid chain; returns the lines of broken rules, and the last line."""

    def audit(records, folder="alone"):
        write_receipts(tmp_path / folder, records)
        main([str(tmp_path / folder)])
        out = capsys.readouterr().out.splitlines()
        return {line.split()[0]: line for line in out if " BROKEN: " in line}, out[-1]

    return audit


def step(records, number):
    return next(r for r in records if r["record"] == "step" and r["step"] == number)


def reuses(records):
    return {
        record["step"]: [(e["reused"], e["use"]) for e in record["events"] if "reused" in e]
        for record in records
        if record["record"] == "step"
    }


def test_a_valid_run_says_each_reuse_and_passes(records, audit):
    """Step 3 is skipped: what it reused is not reused again, and what it trained never is."""
    found = reuses(records)
    assert [len(each) for each in found.values()] == [0, 1, 1, 1, 1, 1]
    assert {use for each in found.values() for _, use in each} == {2}
    for folder in ("alone", "."):  # and with config and logs
        assert audit(records, folder) == ({}, "every rule holds")
    amount = {"count": 1, "response_tokens_mean": 3.5}
    assert step(records, 2)["groups"]["reused"] == step(records, 2)["groups"]["trained"] == amount
    assert step(records, 2)["trained_share"] == 1.0


def again(records, number, group, use, replaces=True):
    """Let a step reuse another group."""
    events = step(records, number)["events"]
    kept = [e for e in events if not (replaces and "reused" in e)]
    events[:] = [*kept, {"reused": group, "use": use}]


def first_reused(records):
    return reuses(records)[2][0][0]


def use_a_group_too_often(r):
    again(r, 3, first_reused(r), 3)
    return "more than max_uses 2"


def reuse_a_group_that_is_too_old(r):
    left = next(e["trained"] for e in step(r, 1)["events"] if "trained" in e) + 1
    again(r, 6, left, 2)
    return "4 versions old, more than 2"


def reuse_a_group_of_the_skipped_step(r):
    again(r, 5, next(e["trained"] for e in step(r, 3)["events"] if "trained" in e), 2)
    return "but the priority chooses"


def do_not_record_a_reuse(r):
    events = step(r, 2)["events"]
    events[:] = [e for e in events if "reused" not in e]
    del step(r, 2)["groups"]["reused"]
    return "reuses the groups []"


def count_a_use_wrongly(r):
    again(r, 2, first_reused(r), 1)
    return "use 1 of group"


def reuse_a_group_twice_in_a_step(r):
    again(r, 2, first_reused(r), 3, replaces=False)
    return "twice in a step"


def reuse_what_was_never_trained(r):
    again(r, 2, 99, 2)
    return "reused before it is trained"


def reuse_the_worse_group(r):
    for event in step(r, 1)["events"]:
        if event.get("trained") == first_reused(r):
            event["spread"] /= 4
    return "but the priority chooses"


def make_a_group_younger_than_its_tokens(r):
    for event in step(r, 5)["events"]:
        if "trained" in event:
            event["oldest_version"] += 1
    return ""


def leave_the_worth_of_a_group_out(r):
    del next(e for e in step(r, 6)["events"] if "trained" in e)["spread"]
    return None  # its shape is another


def deny_the_rule(r):
    del r[0]["replay_generation"]
    return "is trained with its spread"


def state_a_rule_that_reuses_nothing(r):
    r[0]["replay_generation"]["share"] = 0.1
    return "can reuse nothing"


def state_a_rule_of_more_uses(r):
    r[0]["replay_generation"]["max_uses"] = 3
    return "but the priority chooses"


@pytest.mark.parametrize(
    "plant",
    [
        use_a_group_too_often,
        reuse_a_group_that_is_too_old,
        reuse_a_group_of_the_skipped_step,
        do_not_record_a_reuse,
        count_a_use_wrongly,
        reuse_a_group_twice_in_a_step,
        reuse_what_was_never_trained,
        reuse_the_worse_group,
        make_a_group_younger_than_its_tokens,
        deny_the_rule,
        state_a_rule_that_reuses_nothing,
        state_a_rule_of_more_uses,
    ],
)
def test_a_wrong_reuse_is_found(records, audit, plant):
    text = plant(records)
    broken, _ = audit(records)
    assert text in broken["reused"], broken


def test_a_shape_of_half_a_worth_is_no_record(records, audit):
    leave_the_worth_of_a_group_out(records)
    assert "parses" in audit(records)[0]


def test_a_config_with_another_rule_is_found(records, audit, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("max_uses: 2", "max_uses: 3"))
    assert [*audit(records, ".")[0]] == ["config"]
