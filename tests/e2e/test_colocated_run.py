"""Trainers and generators that take turns make the split synchronous run, to the bit.

On a CPU vLLM cannot free memory, so the engines' sleep is left out: they pause, keep their weights,
and load the next ones over them. tests/unit/rollout/test_engine_sleep.py makes an engine lose its
memory. Turns, offloaded optimizer state, wake-ups and restarts are those of a GPU.
"""

from lib.whole_runs import assert_audited, assert_same_run, metrics, records

STEPS = 4


def test_it_is_the_split_run_to_the_bit(split_run, colocated_run):
    assert_same_run(split_run.folder, colocated_run.folder, STEPS)
    for record in metrics(colocated_run.folder)[1:]:
        assert {"time/sleep", "time/wake", "time/offload"} <= record.keys()
        assert record["staleness/max"] == 0
    assert "time/sleep" not in metrics(split_run.folder)[1]


def test_turns_follow_each_other_and_no_response_is_cut_off(colocated_run):
    events = records(colocated_run.folder / "receipts.jsonl")
    turns = [event["event"] for event in events if event["event"] in ("sample", "sleep", "push")]
    assert turns == ["sample", "sleep", "push"] * STEPS
    assert not [event for event in events if event["event"] == "abort"]


def test_its_audit_holds(colocated_run):
    assert_audited(colocated_run.folder)
