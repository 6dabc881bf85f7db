"""The histogram of difficulty has each tried prompt once, first and last, by success rate."""

import json

from grpo_tools.report.curves import difficulty_charts
from grpo_tools.report.run_files import read_history


def test_each_prompt_counts_by_its_first_and_its_last_group(tmp_path):
    def issued(group, prompt):
        return {"issued": group, "prompt_index": prompt, "epoch": 0}

    def generated(group, successes, scored=5):
        result = {"successes": successes, "scored": scored}
        return {"generated": group, "response_tokens": 2.0, **result}

    def step(attempt, number, *events):
        return {"record": "step", "attempt": attempt, "step": number, "events": list(events)}

    records = [
        {"record": "start", "attempt": 0, "steps_done": 0},
        step(0, 1, issued(0, 70), issued(1, 71), generated(0, 0), generated(1, 1)),
        step(0, 2, issued(2, 70), generated(2, 5), issued(3, 72), generated(3, 0, scored=0)),
        {"record": "start", "attempt": 1, "steps_done": 1},
        step(1, 2, issued(2, 70), generated(2, 4), generated(9, 1)),
    ]
    path = tmp_path / "receipts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (chart,) = difficulty_charts(read_history(tmp_path).results)
    first, last = chart["figure"]["data"]
    assert first["y"] == [1, 1, 0, 0, 0, 0, 0]
    assert last["y"] == [0, 1, 0, 0, 1, 0, 0]  # the repeated step counts, not the one before
    assert chart["about"].startswith("2 prompts ")


def test_a_run_without_results_has_no_histogram(tmp_path):
    path = tmp_path / "receipts.jsonl"
    event = {"generated": 0, "response_tokens": 2.0}
    path.write_text(json.dumps({"record": "step", "attempt": 0, "step": 1, "events": [event]}))
    assert difficulty_charts(read_history(tmp_path).results) == ()
