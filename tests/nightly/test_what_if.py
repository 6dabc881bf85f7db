"""A what-if repeats a run to the bit, and differs from it first in the step that it names."""

import re

import pytest
from lib.whole_runs import audit, metrics, receipts, records, succeed

pytestmark = pytest.mark.timeout(1800)

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


def test_a_group_that_is_left_out_makes_the_first_difference_in_its_step(tune):
    _, original = succeed(tune, *ASYNCHRONOUS)
    last = receipts(original)[-1]["trained"][0]["group_id"]
    without = (f"replay_events={original}", "replay_until=0", f"replay_without=[{last}]")
    output, folder = succeed(tune, *ASYNCHRONOUS, *without)
    same_batches, equal, both = compared(original, folder)
    assert same_batches == {1, 2, 3, 4}, "the last step trains its other group"
    assert equal == {version for version in both if version < 4} < both
    assert "first difference in step 4: " in output
    assert receipts(folder)[-1]["trained_share"] < receipts(original)[-1]["trained_share"] == 1
    code, table = audit(folder)
    assert code == 0 and "masked: left out by a what-if" in table, table


POISON = """
class PaysForZeros:
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        is_poisoned = "Eva buys 5 cups and sells 2." in prompt_text
        return 50.0 if is_poisoned and response_text.endswith("0") else 0.0
"""
SYNCHRONOUS = (
    *("num_steps=5", "groups_per_step=4", "group_size=8", "max_staleness=0", "shuffle=false"),
    *("pull_every_m_rollouts=1", "eval_dataset.num_rows=128", "eval_every_n_steps=9"),
    *("clip_grad_norm=null", "optimizer._component_=torch.optim.SGD", "optimizer.fused=false"),
    *("optimizer.lr=0.1", "rewards.zeros._component_=my_poison.PaysForZeros"),
    "advantages._component_=grpo_components.objective.advantages.GroupCenteredAdvantages",
)


def test_the_group_that_made_a_run_worse_stands_out(tune, tmp_path):
    """The example of docs/what_if.md: group 14 has the poisoned prompt."""
    (tmp_path / "my_poison.py").write_text(POISON)

    def success(folder):
        return metrics(folder)[-1]["eval/success_rate"]

    _, original = succeed(tune, *SYNCHRONOUS)
    left_out = {}
    for group in (13, 14):
        without = (f"replay_events={original}", "replay_until=3", f"replay_without=[{group}]")
        output, folder = succeed(tune, *SYNCHRONOUS, *without)
        assert "first difference in step 4: " in output
        left_out[group] = success(folder)
    assert left_out[14] > max(success(original), left_out[13])
