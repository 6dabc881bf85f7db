"""Reading a run's files: complete lines, and the attempt of each step that counts."""

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.files import first_and_last
from grpo_tools.json_lines import records_of
from grpo_tools.report.run_files import Attempts, read_history, read_metrics

# (steps done at its start, steps it trains) of each attempt.
ATTEMPTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=5)


def play(plan):
    """The attempt that counts for each step; metrics and receipts of a run with these attempts."""
    history, metrics, receipts = [], [], []
    for attempt, (start, steps) in enumerate(plan):
        start = min(start, len(history)) if attempt else 0
        history = history[:start] + [attempt] * steps if steps else history
        receipts.append({"record": "start", "attempt": attempt, "steps_done": start})
        for step in range(start + 1, start + steps + 1):
            metrics.append({"step": step, "attempt": attempt})
            receipts.append({"record": "step", "attempt": attempt, "step": step})
    return history, metrics, receipts


def write(path, records, torn=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + torn)
    return path


@given(ATTEMPTS)
def test_the_last_attempt_of_a_step_counts(plan):
    """An attempt that trained no step replaces nothing."""
    history, metrics, receipts = play(plan)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "receipts.jsonl", receipts)
        attempts = read_history(Path(folder)).attempts
    counted = [record for record in metrics if attempts.counts(record)]
    assert {r["step"]: r["attempt"] for r in counted} == dict(enumerate(history, start=1))
    assert len(counted) == len(history)


@given(st.integers(2, 60))
def test_first_and_last_steps_are_equally_many_and_disjoint(num_steps):
    first, last = first_and_last(range(1, num_steps + 1))
    assert len(first) == len(last) <= 10 and first[-1] < last[0]
    assert (first[0], last[-1]) == (1, num_steps)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 9)), st.integers(0, 9))
def test_a_record_counts_if_no_later_attempt_started_before_it(steps_done, step):
    attempts = Attempts(steps_done)
    for attempt in range(10):
        attempts.steps_done.setdefault(attempt, attempt)  # as more attempts become known
        for which in range(11):
            later = [done for a, done in attempts.steps_done.items() if a > which]
            counts = attempts.counts({"step": step, "attempt": which})
            assert counts == all(step <= done for done in later)


def test_metrics_alone_show_where_an_attempt_resumed(tmp_path):
    lines = [{"step": s, "attempt": 0} for s in range(6)] + [{"step": 4, "attempt": 1}]
    found = read_metrics(write(tmp_path / "metrics.jsonl", lines), Attempts())
    assert [(r["step"], r["attempt"]) for r in found] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)]


def test_incomplete_lines_and_other_values_are_skipped(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"a": 1}, [2], {"a": 3}], torn='{"a": 4, "b')
    path.write_bytes(b'\xff\xfe{"torn\n' + path.read_bytes())
    assert list(records_of(path)) == [{"a": 1}, {"a": 3}]
    assert list(records_of(tmp_path / "none.jsonl")) == []


def test_dropped_groups_have_their_prompts_and_superseded_drops_are_skipped(tmp_path):
    def step(attempt, step, *events):
        return {"record": "step", "attempt": attempt, "step": step, "events": events}

    def issued(group_id, prompt_index):
        return {"issued": group_id, "prompt_index": prompt_index, "epoch": 0}

    stale = {"dropped": 1, "reason": "stale", "reissue": True}
    records = [
        {"record": "start", "attempt": 0, "steps_done": 0},
        step(0, 1, issued(0, 70), issued(1, 71), {"trained": 0}, stale),
        step(0, 2, issued(2, 72), {"dropped": 2, "reason": "failed", "reissue": False}),
        {"record": "start", "attempt": 1, "steps_done": 1},
        step(1, 2, issued(2, 73), {"trained": 2}),
        {"record": "end", "attempt": 1, "step": 2, "finished": True, "events": []},
    ]
    write(tmp_path / "receipts.jsonl", records)
    receipts = read_history(tmp_path)
    assert receipts.drops == [
        {
            **{"step": 1, "attempt": 0, "group_id": 1, "prompt_index": 71, "epoch": 0},
            **{"reason": "stale", "reissue": True},
        }
    ]
    assert receipts.last_steps == {0: 2, 1: 2}
    assert list(receipts.ends) == [1]


def test_nan_and_infinity_are_null(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": [NaN, -Infinity, 1.5]}\n')
    assert list(records_of(tmp_path / "a.jsonl")) == [{"a": [None, None, 1.5]}]


def test_only_lines_with_a_word_are_parsed(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"a": 1}, {"b": 2}])
    assert list(records_of(path, b'"b"')) == [{"b": 2}]
