"""A what-if repeats a run to the bit, and differs from it first in the step that it names."""

import re

import pytest
from whole_runs import audit, metrics, receipts, records, succeed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a busy machine may take long

ASYNCHRONOUS = (
    *("num_steps=4", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=2"),
    *("num_generators=2", "max_staleness=2", "pull_every_m_rollouts=1", "eval_every_n_steps=9"),
)


def checksums(folder):
    """Policy version -> checksum of its weights, as generators loaded them."""
    pulls = [p for r in records(folder / "receipts.jsonl") for p in r.get("acknowledged", ())]
    return {pull["version"]: pull["checksum"] for pull in pulls}


def compared(original, folder):
    """Steps that trained the same batch, and versions that are equal or differ."""
    hashes = [{r["step"]: r["batch_hash"] for r in receipts(f)} for f in (original, folder)]
    sums = [checksums(each) for each in (original, folder)]
    both = sums[0].keys() & sums[1].keys()
    assert len(hashes[0]) == len(hashes[1])
    same_batches = {step for step in hashes[0] if hashes[0][step] == hashes[1][step]}
    return same_batches, {v for v in both if sums[0][v] == sums[1][v]}, both


def test_another_learning_rate_from_a_step_on_differs_first_in_that_step(tune):
    _, original = succeed(tune, *ASYNCHRONOUS)
    changed = (f"replay_events={original}", "replay_until=2", "optimizer.lr=0.01")
    output, folder = succeed(tune, *ASYNCHRONOUS, *changed)
    same_batches, equal, both = compared(original, folder)
    assert {1, 2, 3} <= same_batches, "step 3 trains the recorded batch, from the same weights"
    assert equal == {version for version in both if version <= 2} < both
    assert re.search("first difference in step 3: .*lr 0.01", output), output
    steps = [[m for m in metrics(f) if "loss/total" in m] for f in (original, folder)]
    losses = [[m["loss/total"] for m in each] for each in steps]
    assert losses[0][:3] == losses[1][:3] and losses[0][3] != losses[1][3]
    code, table = audit(folder)
    assert code == 0, table
