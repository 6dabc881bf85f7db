"""The audit passes valid receipts and names the first rule that corrupted ones break."""

import json
import subprocess
import sys

import pytest

from grpo_tools.audit.__main__ import RULES, main


@pytest.fixture
def records(tmp_path, write_run):
    return write_run(tmp_path / "receipts.jsonl")


def events(record, kind):
    return [event for event in record["events"] if kind in event]


def remove(record, kind, number=0):
    record["events"].remove(events(record, kind)[number])


def test_every_rule_is_checked_listed_and_held_by_valid_runs(tmp_path, capsys, write_run):
    checked = set()
    for kind in ({}, {"eta": 0}, {"draws": True}, {"reuse": True}, {"books": True}):
        write_run(tmp_path / "receipts.jsonl", **kind)
        assert main([str(tmp_path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert {row[0] for row in rows} >= RULES.keys()
        checked |= {row[0] for row in rows if row[1].isdecimal() and int(row[1])}
    assert checked == RULES.keys() - {"one_run"}, "test_one_run.py has that"


# Each corrupts a run: start record [0], six steps [1] to [6], end record [7].
def the_file_begins_without_start(r):
    del r[0]


def a_record_after_the_end(r):
    r.append(r[6])


def a_step_is_missing(r):
    del r[3]


def a_step_is_repeated(r):
    r.insert(3, r[2])


def a_version_jumps(r):
    for record in r[5:]:
        record["policy_version"] += 1


def a_version_goes_back(r):
    r[6]["policy_version"] -= 2
    return ("acknowledged",)


def no_generator_acknowledged_a_sampled_version(r):
    r[5]["acknowledged"] = []
    r[5]["generators"] = r[4]["generators"]


def a_generator_goes_back(r):
    r[6]["acknowledged"][0].update(version=1, checksum="weights 1", published="weights 1")
    r[6]["generators"]["generator_0"] = {"version": 1, "checksum": "weights 1"}


def a_generator_is_ahead(r):
    r[2]["acknowledged"][0].update(version=9, checksum="weights 9", published="weights 9")
    r[2]["generators"]["generator_0"] = {"version": 9, "checksum": "weights 9"}


def two_generators_with_different_weights(r):
    pull = r[2]["acknowledged"][1]
    pull["checksum"] = pull["published"] = "something else"


def a_group_is_issued_twice(r):
    issued = events(r[1], "issued")[1]
    r[1]["events"].append(dict(issued))
    r[1]["groups"]["issued"] += 1


def a_group_number_is_skipped(r):
    for event in r[6]["events"]:
        event.update({key: 15 for key in event if event[key] == 14})
    r[6]["trained"][1]["group_id"] = 15
    return ("accounted",)


def a_prompt_is_issued_twice(r):
    first, second = events(r[4], "issued")
    second["prompt_index"] = first["prompt_index"]
    r[4]["trained"][1]["prompt_index"] = first["prompt_index"]


def a_new_prompt_precedes_one_handed_back(r):
    for items in (events(r[1], "issued")[3:], r[1]["trained"]):
        items[0]["prompt_index"], items[1]["prompt_index"] = 2, 1


def a_group_is_generated_twice(r):
    r[2]["events"].insert(2, dict(events(r[2], "generated")[0]))
    r[2]["groups"]["generated"]["count"] += 1


def a_group_is_trained_again(r):
    r[4]["events"].append(dict(events(r[2], "trained")[0]))
    r[4]["groups"]["trained"]["count"] += 1


def a_trained_group_was_never_generated(r):
    remove(r[4], "generated")
    r[4]["groups"]["generated"]["count"] = 1
    r[4]["token_versions"], r[4]["max_staleness"] = {"2": 7}, 0


def a_dropped_group_was_never_living(r):
    r[4]["events"].append({"dropped": 0, "reason": "failed", "reissue": False})
    r[4]["groups"]["dropped"]["failed"]["count"] = 1


def a_batch_is_too_small(r):
    remove(r[4], "trained")
    left = r[4]["trained"].pop(0)
    r[4]["groups"]["trained"]["count"] = 1
    r[4]["token_versions"], r[4]["max_staleness"] = {"2": 7}, 0
    r[7]["living"].append({**left, "state": "buffered"})


def a_stale_group_is_dropped_at_eta_zero(r):
    r[0]["max_staleness"] = 0
    for record in r[1:7]:
        record["token_versions"] = {str(record["trained_from"]): 14}
        record["max_staleness"] = 0
        record["trained_share"] = 1.0


def a_group_vanishes(r):
    r[0]["num_steps"], r[7]["finished"] = 7, False
    r[7]["events"].append({"issued": 15, "prompt_index": 500, "epoch": 0})
    r[7]["groups"]["issued"] += 1


def a_handed_back_prompt_vanishes(r):
    a_group_vanishes(r)
    r[7]["events"].append({"dropped": 15, "reason": "failed", "reissue": True})
    r[7]["groups"]["dropped"]["failed"]["count"] += 1


def a_buffered_group_was_never_generated(r):
    a_group_vanishes(r)
    r[7]["living"].append({"group_id": 15, "prompt_index": 500, "epoch": 0, "state": "buffered"})


def the_end_is_missing(r):
    del r[7]


def another_run_appends(r):
    """Its two records are valid except for the id."""
    r[0] |= {"run": "a" * 32, "incarnation": "b" * 32}
    start = r[0] | {"attempt": 1, "steps_done": 6, "run": "c" * 32}
    start["policy_version"] = r[7]["policy_version"]
    nothing = {"count": 0, "response_tokens_mean": None}
    groups = {"issued": 0, "dropped": {}} | dict.fromkeys(
        ("generated", "filtered", "trained"), nothing
    )
    generators = {name: {"version": 0, "checksum": None} for name in r[7]["generators"]}
    empty = {"events": [], "acknowledged": [], "groups": groups, "generators": generators}
    r += [start, r[7] | empty | {"attempt": 1}]


CORRUPTIONS = {
    "header": [the_file_begins_without_start, a_record_after_the_end],
    "steps": [a_step_is_missing, a_step_is_repeated],
    "versions": [a_version_jumps, a_version_goes_back],
    "sampled": [no_generator_acknowledged_a_sampled_version],
    "acknowledged": [a_generator_goes_back, a_generator_is_ahead],
    "checksums": [two_generators_with_different_weights],
    "issued": [a_group_is_issued_twice, a_group_number_is_skipped],
    "prompts": [a_prompt_is_issued_twice],
    "reissued": [a_new_prompt_precedes_one_handed_back],
    "generated": [a_group_is_generated_twice],
    "ended": [
        a_group_is_trained_again,
        a_trained_group_was_never_generated,
        a_dropped_group_was_never_living,
    ],
    "batches": [a_batch_is_too_small],
    "synchronous": [a_stale_group_is_dropped_at_eta_zero],
    "accounted": [
        a_group_vanishes,
        a_handed_back_prompt_vanishes,
        a_buffered_group_was_never_generated,
    ],
    "complete": [the_end_is_missing],
    "one_run": [another_run_appends],
}
# (rule, path of one value, its new value)
EDITS = [
    ("parses", (2, "extra"), 1),
    ("parses", (4, "policy_version"), "3"),
    ("parses", (1, "token_versions"), {"x": 4}),
    ("parses", (5, "correction_mass"), -0.1),
    ("parses", (5, "token_versions"), {"03": 10, "1": 4}),
    ("parses", (5, "policy_version"), 2**53 + 1),
    ("header", (0, "attempt"), 1),
    ("header", (0, "format"), 3),
    ("header", (3, "attempt"), 1),
    ("steps", (7, "step"), 5),
    ("versions", (0, "policy_version"), 2),
    ("contract", (6, "max_staleness"), 0),
    ("contract", (0, "max_staleness"), 1),
    ("contract", (5, "token_versions"), {"1": 4, "4": 10}),  # version 4 is newer than the step's
    ("contract", (5, "token_versions", "2"), 0),
    ("checksums", (2, "acknowledged", 0, "checksum"), "something else"),
    ("tokens", (5, "token_versions", "3"), 11),
    ("tokens", (5, "trained_share"), 0.5),
    ("hashes", (5, "batch_hash"), ""),
    ("hashes", (5, "batch_hash"), "hash 2"),
    ("correction", (5, "correction_mass"), None),
    ("totals", (1, "groups", "issued"), 4),
    ("totals", (1, "groups", "dropped", "stale", "count"), 0),
    ("totals", (1, "groups", "dropped", "stale", "response_tokens_mean"), 1.0),
    ("totals", (4, "trained", 0, "prompt_index"), 70),
    ("totals", (4, "generators", "generator_1", "version"), 2),
    ("complete", (0, "num_steps"), 7),
]


@pytest.mark.parametrize(
    ("rule", "corrupt"), [(rule, each) for rule, several in CORRUPTIONS.items() for each in several]
)
def test_a_corrupted_run_fails_and_the_broken_rule_is_named(records, rule, corrupt, audit):
    consequences = corrupt(records) or ()
    code, broken, out = audit(records)
    assert (code, broken.keys()) == (1, {rule, *consequences})
    assert out.splitlines()[-1].startswith(f"broken: {rule} ({RULES[rule]}): ")


@pytest.mark.parametrize(("rule", "where", "value"), EDITS)
def test_one_changed_value_fails_and_its_rule_is_named(records, rule, where, value, audit):
    edited = records
    for key in where[:-1]:
        edited = edited[key]
    edited[where[-1]] = value
    code, broken, _ = audit(records)
    assert (code, [*broken]) == (1, [rule])


def test_every_rule_has_a_corruption():
    # In test_books.py, test_chain.py, test_cross_checks.py and test_choices.py.
    elsewhere = {"books", "chain", "config", "metrics", "curriculum", "reused"}
    assert {*CORRUPTIONS, *(rule for rule, _, _ in EDITS)} == RULES.keys() - elsewhere


def resumed(records):
    """A run that was killed after step 5 and resumed from step 3."""
    again = json.loads(json.dumps(records))
    for record in again:
        record["attempt"] = 1
    again[0].update(steps_done=3, policy_version=2)
    acknowledgement = {"version": 2, "checksum": "weights 2", "published": "weights 2"}
    again[4]["acknowledged"] = [{"generator": f"generator_{i}", **acknowledgement} for i in (0, 1)]
    for record in again[4:6]:
        record["generators"]["generator_1"] = {"version": 2, "checksum": "weights 2"}
    return [*records[:6], again[0], *again[4:]]


def test_a_resumed_run_is_followed_from_its_checkpoint(records, audit):
    records = resumed(records)
    assert audit(records).code == 0
    records[-2]["token_versions"]["4"] += 100
    assert [*audit(records).broken] == ["tokens"]


def test_a_restarted_group_is_generated_again(records, audit):
    records = resumed(records)
    (generated, *_) = events(records[7], "generated")
    again = {"restarted": generated["generated"]}
    place = records[7]["events"].index(generated)
    records[7]["events"].insert(place, again)  # lost before it was generated
    assert audit(records).code == 0
    records[7]["events"][place : place + 2] = [generated, again]  # lost afterwards, never repeated
    assert "ended" in audit(records).broken
    records[7]["events"][place + 1] = {"restarted": 10**6}
    assert "generated" in audit(records).broken


def test_the_earlier_attempt_is_checked_too(records, audit):
    records = resumed(records)
    records[5]["correction_mass"] = None
    assert [*audit(records).broken] == ["correction"]


def test_a_version_has_the_same_weights_after_a_resume(records, audit):
    records = resumed(records)
    for pull in records[7]["acknowledged"]:
        pull["checksum"] = pull["published"] = "other weights"
    assert "checksums" in audit(records).broken


@pytest.mark.parametrize("change", [{"steps_done": 7}, {"steps_done": 4}, {"attempt": 2}])
def test_an_attempt_that_resumes_from_an_unknown_step_is_refused(records, change, audit):
    records = resumed(records)
    records[6].update(change)
    assert audit(records).broken.keys() & {"steps", "versions", "header"}


def test_a_killed_run_passes_only_as_unfinished(tmp_path, records, audit):
    incomplete = json.dumps(records[6])[:99]
    assert audit(records[:6]).code == 1
    assert audit(records[:6], "--unfinished").code == 0
    (tmp_path / "alone" / "receipts.jsonl").open("a").write(incomplete)
    assert main([str(tmp_path / "alone"), "--unfinished"]) == 0
    assert main([str(tmp_path / "alone")]) == 1


@pytest.mark.parametrize("content", [None, ""])
def test_missing_receipts_are_one_line_and_exit_code_2(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "receipts.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert str(tmp_path / "receipts.jsonl") in line


@pytest.mark.parametrize("line", ["[]", "{}", '{"record": "start"}', "", "[" * 10**5])
def test_a_line_that_is_not_a_record_is_a_violation(
    tmp_path, capsys, records, line, write_receipts
):
    write_receipts(tmp_path, [records[0]])
    (tmp_path / "receipts.jsonl").open("a").write(line + "\n")
    assert main([str(tmp_path)]) == 1
    assert " BROKEN: receipts.jsonl line 2: " in capsys.readouterr().out


def test_the_module_runs_as_a_command(tmp_path, write_run):
    write_run(tmp_path / "receipts.jsonl")
    command = [sys.executable, "-m", "grpo_components.audit", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("every rule holds\n")
