"""Reading a run's files: complete lines, and the attempt of each step that counts."""

import math
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from lib.rows import write_rows

from grpo_components.files import records_of
from grpo_tools.report.curves import difficulty_charts
from grpo_tools.report.facts import first_and_last
from grpo_tools.report.run_files import Attempts, read_history, read_metrics


def start_of(attempt, steps_done):
    return {"event": "start", "attempt": attempt, "steps_done": steps_done}


def step_of(attempt, number):
    return {"event": "step", "attempt": attempt, "step": number, "token_versions": {}}


# (steps done at its start, steps it trains) of each attempt.
ATTEMPTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=5)


def play(plan):
    """The attempt that counts for each step; metrics and receipts of a run with these attempts."""
    history, metrics, receipts = [], [], []
    for attempt, (start, steps) in enumerate(plan):
        start = min(start, len(history)) if attempt else 0
        history = history[:start] + [attempt] * steps if steps else history
        receipts.append(start_of(attempt, start))
        for step in range(start + 1, start + steps + 1):
            metrics.append({"step": step, "attempt": attempt})
            receipts.append(step_of(attempt, step))
    return history, metrics, receipts


@given(ATTEMPTS)
def test_the_last_attempt_of_a_step_counts(plan):
    """An attempt that trained no step replaces nothing."""
    history, metrics, receipts = play(plan)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "receipts.jsonl", *receipts)
        attempts = read_history(Path(folder)).attempts
    counted = [record for record in metrics if attempts.counts(record)]
    assert {r["step"]: r["attempt"] for r in counted} == dict(enumerate(history, start=1))
    assert len(counted) == len(history)


@given(st.integers(2, 60))
def test_first_and_last_steps_are_equally_many_and_disjoint(num_steps):
    first, last = first_and_last(range(1, num_steps + 1))
    assert len(first) == len(last) <= 10 and first[-1] < last[0]
    assert (first[0], last[-1]) == (1, num_steps)


def test_metrics_alone_show_where_an_attempt_resumed(tmp_path):
    lines = [{"step": s, "attempt": 0} for s in range(6)] + [{"step": 4, "attempt": 1}]
    found = read_metrics(write_rows(tmp_path / "metrics.jsonl", *lines), Attempts())
    assert [(r["step"], r["attempt"]) for r in found] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)]


def test_incomplete_lines_and_other_values_are_skipped(tmp_path):
    records = [{"a": 1}, [2], {"b": [math.nan, -math.inf, 1.5]}]
    path = write_rows(tmp_path / "a.jsonl", *records, torn='{"a": 4, "b')
    path.write_bytes(b'\xff\xfe{"torn\n' + path.read_bytes())
    assert list(records_of(path)) == [{"a": 1}, {"b": [None, None, 1.5]}]
    assert list(records_of(path, b'"a"')) == [{"a": 1}]
    assert list(records_of(tmp_path / "none.jsonl")) == []


def issue(attempt, group, prompt):
    place = {"group": group, "prompt": prompt, "epoch": 0}
    return {"event": "issue", "attempt": attempt, **place}


def test_dropped_groups_have_their_prompts_and_superseded_drops_are_skipped(tmp_path):
    def drop(group, reason):
        known = {"event": "drop", "attempt": 0, "reissue": True, "tokens": [None]}
        return known | {"groups": [group], "reason": reason}

    events = [
        *(start_of(0, 0), issue(0, 0, 70), issue(0, 1, 71), drop(1, "stale"), step_of(0, 1)),
        *(issue(0, 2, 72), drop(2, "failed"), step_of(0, 2)),
        *(start_of(1, 1), issue(1, 2, 73), step_of(1, 2)),
        {"event": "end", "attempt": 1, "step": 2, "finished": True},
    ]
    write_rows(tmp_path / "receipts.jsonl", *events)
    receipts = read_history(tmp_path)
    place = {"step": 1, "attempt": 0, "group_id": 1, "prompt_index": 71, "epoch": 0}
    assert receipts.drops == [place | {"reason": "stale", "reissue": True}]
    assert receipts.last_steps == {0: 2, 1: 2}
    assert list(receipts.ends) == [1]


def test_the_difficulty_of_each_prompt_counts_by_its_first_and_its_last_group(tmp_path):
    def finish(attempt, prompt, successes, scored=5):
        result = {"successes": successes, "scored": scored}
        return {"event": "finish", "attempt": attempt, "prompt": prompt, **result}

    events = [
        *(start_of(0, 0), finish(0, 70, 0), finish(0, 71, 1), step_of(0, 1)),
        *(finish(0, 70, 5), finish(0, 72, 0, scored=0), step_of(0, 2)),
        *(start_of(1, 1), finish(1, 70, 4), step_of(1, 2)),
    ]
    write_rows(tmp_path / "receipts.jsonl", *events)
    (chart,) = difficulty_charts(read_history(tmp_path).results)
    first, last = chart["figure"]["data"]
    assert first["y"] == [1, 1, 0, 0, 0, 0, 0]
    assert last["y"] == [0, 1, 0, 0, 1, 0, 0]  # the repeated step counts, not the one before
    assert chart["about"].startswith("2 prompts ")
