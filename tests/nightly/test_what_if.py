"""A run that is repeated up to a step, and resumed with other keys, differs from there on."""

import pytest
from lib.whole_runs import assert_audited, receipts, records, succeed

pytestmark = pytest.mark.timeout(1800)

SHORT = (
    *("num_steps=4", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=2"),
    *("max_staleness=0", "pull_every_m_rollouts=1", "eval_every_n_steps=9"),
)


def checksums(folder):
    """Policy version -> checksum of its weights, as generators loaded them."""
    pulls = [e for e in records(folder / "receipts.jsonl") if e["event"] == "load"]
    return {pull["version"]: pull["checksum"] for pull in pulls}


def test_another_learning_rate_from_a_step_on_differs_first_in_that_step(tune):
    _, original = succeed(tune, *SHORT)
    output, folder = succeed(tune, *SHORT, f"replay_events={original}", "replay_until=2")
    assert "steps 1 to 2 repeated" in output
    assert [r["step"] for r in receipts(folder)] == [1, 2]
    resume = (f"output_dir={folder}", "resume_from_checkpoint=true", "optimizer.lr=0.01")
    succeed(tune, *SHORT, *resume)
    hashes = [{r["step"]: r["batch_hash"] for r in receipts(each)} for each in (original, folder)]
    assert [hashes[1][step] for step in (1, 2, 3)] == [hashes[0][step] for step in (1, 2, 3)]
    assert hashes[1][4] != hashes[0][4]
    sums = checksums(original), checksums(folder)
    equal = {version for version in sums[0] if sums[0][version] == sums[1].get(version)}
    assert equal == {version for version in sums[0] if version <= 2} < sums[0].keys()
    assert_audited(folder)
