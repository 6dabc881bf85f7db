"""The audit repeats the draws of a curriculum, and finds one that is forged."""

import json
from copy import deepcopy

import pytest

from grpo_tools.audit.__main__ import main


@pytest.fixture
def records(tmp_path, write_run):
    return write_run(tmp_path / "receipts.jsonl", draws=True)


@pytest.fixture
def audit(tmp_path, capsys, write_receipts):
    """Audits records, with a valid chain; returns the broken rules and the last line."""

    def audit(records, *options, folder="alone"):
        write_receipts(tmp_path / folder, records)
        main([str(tmp_path / folder), *options])
        out = capsys.readouterr().out.splitlines()
        return [line.split()[0] for line in out if " BROKEN: " in line], out[-1]

    return audit


def events(records, kind):
    return [event for record in records[1:] for event in record["events"] if kind in event]


def test_the_draws_of_a_valid_run_are_repeated(records, audit, tmp_path):
    assert audit(records) == ([], "every rule holds")
    assert audit(records, folder=".") == ([], "every rule holds")  # with config and logs
    issued = [(event["prompt_index"], event["epoch"]) for event in events(records, "issued")]
    assert len(issued) > len({row for row, _ in issued}) and issued != sorted(issued)


def forge_a_draw(records):
    """Another prompt in its place, wherever the receipts name it."""
    event = events(records, "issued")[-2]
    group, other = event["issued"], next(row for row in (3, 4) if row != event["prompt_index"])
    named = [each for record in records for each in record.get("trained", ())]
    for each in [event, *(each for each in named if each["group_id"] == group)]:
        each.update(prompt_index=other, epoch=50)


def forge_a_result(records):
    for event in events(records, "generated")[:4]:
        event["successes"] = 0 if event["successes"] else 2


def forge_the_seed(records):
    records[0]["seed"] += 1


def forge_the_rule(records):
    records[0]["curriculum"]["decay"] = 0.1


def leave_a_row_out(records):
    records[0]["prompts"][0]["rows"] = [[3, 5]]


def give_an_impossible_result(records):
    events(records, "generated")[-1]["scored"] = 3


def leave_a_result_out(records):
    for name in ("successes", "scored"):
        del events(records, "generated")[-1][name]


def deny_the_curriculum(records):
    for name in ("seed", "curriculum", "prompts"):
        del records[0][name]


@pytest.mark.parametrize(
    "forge",
    [
        forge_a_draw,
        forge_a_result,
        forge_the_seed,
        forge_the_rule,
        leave_a_row_out,
        give_an_impossible_result,
        leave_a_result_out,
        deny_the_curriculum,
    ],
)
def test_a_forged_draw_is_found(records, audit, forge):
    forge(records)
    broken, last = audit(records)
    assert broken == ["curriculum"] and last.startswith("broken: curriculum (each new prompt"), last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("curriculum", {"low": 0.9, "high": 0.1, "floor": 0.5, "decay": 0.9}),
        ("curriculum", {"low": 0.1, "high": 0.9, "floor": 0.0, "decay": 0.9}),
        ("prompts", []),
        ("prompts", [{"weight": 1.0, "rows": []}]),
        ("prompts", [{"weight": 0.0, "rows": [[3, 9]]}]),
        ("prompts", [{"weight": 1.0, "rows": [[9, 3]]}]),
        ("prompts", [{"weight": 1.0, "rows": [[3, 9], [5, 5]]}]),
        ("prompts", [{"weight": 1.0, "rows": [[0, 2**53]]}]),
    ],
)
def test_an_impossible_curriculum_is_a_violation(records, audit, name, value):
    records[0][name] = value
    assert audit(records)[0] == ["curriculum"]


def test_a_config_with_another_rule_or_seed_is_found(records, audit, tmp_path):
    config = tmp_path / "config.yaml"
    whole = config.read_text()
    for old, new in (("floor: 0.1", "floor: 0.2"), ("seed: 7", "seed: 8"), ("decay: 0.9", "a: b")):
        config.write_text(whole.replace(old, new))
        assert audit(records, folder=".")[0] == ["config"]
    config.write_text(whole)


def test_a_resume_continues_the_draws_from_its_checkpoint(records, audit):
    again = deepcopy(records)
    for record in again:
        record["attempt"] = 1
    again[0].update(steps_done=3, policy_version=2)
    for record in again[4:6]:  # the new generators have loaded nothing yet
        record["acknowledged"] = []
    start = json.loads(json.dumps(again[0]))
    resumed = [*records[:6], start, *again[4:]]
    assert "curriculum" not in audit(resumed)[0]
    start["seed"] += 1
    assert "curriculum" in audit(resumed)[0]
