"""The audit passes valid receipts and names the first rule that corrupted ones break."""

import json

import pytest
from lib.receipts import attempts, insert, of, place, remove, step

from grpo_tools.audit.__main__ import RULES, main


def prompt_of(r, group):
    return of(r, "issue", group=group)[0]["prompt"]


def test_every_rule_is_checked_listed_and_held_by_valid_runs(tmp_path, capsys, write_run):
    checked = set()
    for kind in ({}, {"eta": 0}, {"draws": True}, {"reuse": True}):
        write_run(tmp_path / "receipts.jsonl", **kind)
        assert main([str(tmp_path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert {row[0] for row in rows} >= RULES.keys()
        checked |= {row[0] for row in rows if row[1].isdecimal() and int(row[1])}
    # At staleness 0 a valid run drops nothing; test_one_run.py has the other.
    assert checked == RULES.keys() - {"synchronous", "one_run"}


def a_version_jumps(r):
    for event in (step(r, 5), step(r, 6), r[-1]):
        event["policy_version"] += 1


def a_group_is_issued_twice(r):
    issue = of(r, "issue")[1]
    insert(r, issue, dict(issue))


def a_new_prompt_precedes_one_handed_back(r):
    of(r, "issue", group=3)[0]["prompt"], of(r, "issue", group=4)[0]["prompt"] = 2, 1


def a_group_is_generated_twice(r):
    finish = of(r, "finish", group=5)[0]
    insert(r, finish, dict(finish))


def a_trained_group_was_never_generated(r):
    remove(r, of(r, "finish", group=9)[0])
    step(r, 4)["token_versions"] = {"2": 7}


def a_dropped_group_was_never_living(r):
    drop = {"groups": [0], "reason": "failed", "reissue": False, "tokens": [None]}
    insert(r, step(r, 4), {"event": "drop", "attempt": 0, **drop})


def a_batch_is_too_small(r):
    of(r, "sample", step=4)[0]["groups"].remove(9)
    del step(r, 4)["tokens"]["9"]
    step(r, 4)["token_versions"] = {"2": 7}
    left = {"group": 9, "prompt": 7, "epoch": 0, "state": "buffered", "tokens": 7}
    r[-1]["living"].append(left)


def a_stale_group_is_dropped_at_eta_zero(r):
    r[0]["max_staleness"] = 0
    for event in of(r, "step"):
        event["token_versions"] = {str(event["trained_from"]): 14}
        kind = "trained" if event["trained_from"] < event["policy_version"] else "skipped"
        event["tokens"] = {group: {kind: 7} for group in event["tokens"]}


def a_group_vanishes(r):
    r[0]["num_steps"], r[-1]["finished"] = 7, False
    issue = {"role": "test", "group": 15, "prompt": 500, "epoch": 0, "target_step": 6}
    insert(r, r[-1], {"event": "issue", "attempt": 0, **issue, "needed_version": 3})


def a_handed_back_prompt_vanishes(r):
    a_group_vanishes(r)
    drop = {"groups": [15], "reason": "failed", "reissue": True, "tokens": [None]}
    insert(r, r[-1], {"event": "drop", "attempt": 0, **drop})


def a_buffered_group_was_never_generated(r):
    a_group_vanishes(r)
    group = {"group": 15, "prompt": 500, "epoch": 0, "state": "buffered", "tokens": None}
    r[-1]["living"].append(group)


def another_run_appends(r):
    """Its two events are valid except for the id."""
    r[0] |= {"run": "a" * 32, "incarnation": "b" * 32}
    start = r[0] | {"attempt": 1, "steps_done": 6, "run": "c" * 32}
    start["policy_version"] = r[-1]["policy_version"]
    r += [start, r[-1] | {"attempt": 1}]


def weights(of_what, version=None):
    values = dict.fromkeys(("checksum", "published"), of_what)
    return values if version is None else values | {"version": version}


# (rule, and what else it breaks; how a run of six steps is corrupted)
CORRUPTIONS = [
    ("header", lambda r: r.pop(0)),  # no start
    ("header", lambda r: r.append(step(r, 6))),  # an event after the end
    ("steps", lambda r: remove(r, step(r, 3))),
    ("steps", lambda r: insert(r, step(r, 3), step(r, 2))),
    ("versions", a_version_jumps),
    ("versions acknowledged", lambda r: step(r, 6).update(policy_version=3)),
    ("sampled", lambda r: remove(r, *of(r, "load", version=3))),
    ("acknowledged", lambda r: of(r, "load")[-1].update(weights("weights 1", 1))),  # goes back
    ("acknowledged", lambda r: of(r, "load")[0].update(weights("weights 9", 9))),  # is ahead
    ("checksums", lambda r: of(r, "load")[1].update(weights("something else"))),
    ("issued", a_group_is_issued_twice),
    ("issued prompts accounted", lambda r: insert(r, r[-1], of(r, "issue")[-1] | {"group": 99})),
    ("prompts", lambda r: of(r, "issue", group=10)[0].update(prompt=prompt_of(r, 9))),
    ("reissued", a_new_prompt_precedes_one_handed_back),
    ("generated books", a_group_is_generated_twice),
    ("ended", lambda r: of(r, "sample", step=4)[0]["groups"].append(5)),  # trained again
    ("ended books", a_trained_group_was_never_generated),
    ("ended", a_dropped_group_was_never_living),
    ("batches", a_batch_is_too_small),
    ("synchronous", a_stale_group_is_dropped_at_eta_zero),
    ("tokens books", lambda r: step(r, 5)["token_versions"].update({"3": 11})),
    *(("accounted", vanish) for vanish in (a_group_vanishes, a_handed_back_prompt_vanishes)),
    ("accounted", a_buffered_group_was_never_generated),
    ("complete", lambda r: r.pop()),  # no end
    ("one_run", another_run_appends),
]
# (rule, (event, its number among those of its name), path of one value, its new value)
EDITS = [
    ("parses", ("step", 1), ("extra",), 1),
    ("parses", ("step", 3), ("policy_version",), "3"),
    ("parses", ("step", 0), ("token_versions",), {"x": 4}),
    ("parses", ("step", 4), ("correction_mass",), -0.1),
    ("parses", ("step", 4), ("token_versions",), {"03": 10, "1": 4}),
    ("parses", ("finish", 3), ("response_tokens",), []),
    ("header", ("start", 0), ("attempt",), 1),
    ("header", ("start", 0), ("format",), 3),
    ("header", ("finish", 3), ("attempt",), 1),
    ("steps", ("sample", 2), ("step",), 5),
    ("steps", ("end", 0), ("step",), 5),
    ("versions", ("start", 0), ("policy_version",), 2),
    ("contract", ("start", 0), ("max_staleness",), 1),
    # Version 4 is newer than the step's.
    ("contract", ("step", 4), ("token_versions",), {"1": 4, "4": 10}),
    ("contract", ("step", 4), ("token_versions", "2"), 0),
    ("checksums", ("load", 0), ("checksum",), "something else"),
    ("generated", ("finish", 3), ("response_tokens",), [7]),
    ("hashes", ("step", 4), ("batch_hash",), ""),
    ("hashes", ("step", 4), ("batch_hash",), "hash 2"),
    ("correction", ("step", 4), ("correction_mass",), None),
    ("complete", ("start", 0), ("num_steps",), 7),
]


@pytest.mark.parametrize(("rules", "corrupt"), CORRUPTIONS)
def test_a_corrupted_run_fails_and_the_broken_rule_is_named(events, rules, corrupt, audit):
    corrupt(events)
    code, broken, out = audit(events)
    assert (code, broken.keys()) == (1, {*rules.split()})
    assert out.splitlines()[-1].startswith("broken: ")


@pytest.mark.parametrize(("rule", "which", "where", "value"), EDITS)
def test_one_changed_value_fails_and_its_rule_is_named(events, rule, which, where, value, audit):
    name, number = which
    edited = of(events, name)[number]
    for key in where[:-1]:
        edited = edited[key]
    edited[where[-1]] = value
    code, broken, _ = audit(events)
    assert (code, [*broken]) == (1, [rule])


def test_every_rule_has_a_corruption():
    # Here, in test_books.py, test_chain.py, test_cross_checks.py and test_choices.py.
    elsewhere = {"books", "chain", "config", "metrics", "curriculum", "reused"}
    here = {rules.split()[0] for rules, _ in CORRUPTIONS} | {rule for rule, *_ in EDITS}
    assert here == RULES.keys() - elsewhere


def test_a_resumed_run_is_followed_from_its_checkpoint(events, audit):
    events = attempts(events, kill_after=5, resume_after=3)
    assert audit(events).code == 0
    of(events, "step", step=6)[0]["token_versions"]["4"] += 100
    assert audit(events).broken.keys() == {"tokens", "books"}


def test_a_restarted_group_is_generated_again(events, audit):
    issue, finish = (of(events, name, group=9)[0] for name in ("issue", "finish"))
    lost = {"event": "interrupt", "attempt": 0, "group": 9}
    insert(events, finish, lost, dict(issue))  # lost before it was generated
    assert audit(events).code == 0
    insert(events, of(events, "sample", step=4)[0], lost)  # lost afterwards, never repeated
    assert "ended" in audit(events).broken
    insert(events, of(events, "sample", step=5)[0], lost | {"group": 10**6})
    assert "generated" in audit(events).broken


def test_both_attempts_are_checked_and_a_version_has_the_same_weights_in_both(events, audit):
    events = attempts(events, kill_after=5, resume_after=3)
    mass = step(events, 5)["correction_mass"]
    step(events, 5)["correction_mass"] = None
    assert [*audit(events).broken] == ["correction"]
    step(events, 5)["correction_mass"] = mass
    for load in of(events, "load", attempt=1, version=2):
        load.update(weights("other weights"))
    assert "checksums" in audit(events).broken


@pytest.mark.parametrize("change", [{"steps_done": 7}, {"steps_done": 4}, {"attempt": 2}])
def test_an_attempt_that_resumes_from_an_unknown_step_is_refused(events, change, audit):
    events = attempts(events, kill_after=5, resume_after=3)
    of(events, "start", attempt=1)[0].update(change)
    assert audit(events).broken.keys() & {"steps", "versions", "header"}


def test_a_killed_run_passes_only_as_unfinished(tmp_path, events, audit):
    last = place(events, step(events, 6))
    assert audit(events[:last]).code == 1
    assert audit(events[:last], "--unfinished").code == 0
    (tmp_path / "alone" / "receipts.jsonl").open("a").write(json.dumps(events[last])[:99])
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


@pytest.mark.parametrize("text", ["[", '{"identity"', "\x00"])
@pytest.mark.parametrize("file", ["config.yaml", "checkpoints/step_1/state/driver.json"])
def test_a_damaged_file_is_a_violation(tmp_path, capsys, events, file, text, write_receipts):
    write_receipts(tmp_path, events)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert main([str(tmp_path)]) == 1
    assert "BROKEN: " in capsys.readouterr().out


@pytest.mark.parametrize("line", ["[]", "{}", '{"event": "start"}', "", "[" * 10**5])
def test_a_line_that_is_not_an_event_is_a_violation(tmp_path, capsys, events, line, write_receipts):
    write_receipts(tmp_path, [events[0]])
    (tmp_path / "receipts.jsonl").open("a").write(line + "\n")
    assert main([str(tmp_path)]) == 1
    assert " BROKEN: receipts.jsonl line 2: " in capsys.readouterr().out
