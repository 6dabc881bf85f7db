"""A run with adapters whose generator was killed is replayed to the same bits."""

import pytest
from lib.whole_runs import LORA, assert_same_run, rescore, succeed, transformers_policy

pytestmark = pytest.mark.timeout(1800)


def test_its_tokens_are_scored_again_by_adapters_that_were_kept(lora_run, tune, tiny_policy):
    """The new generator gets its adapter from the files of `keep_policy_versions`."""
    kept = (f"replay_events={lora_run.folder}", "keep_policy_versions=true")
    output, replay = succeed(tune, *LORA, *transformers_policy(tiny_policy), *kept)
    assert "events in the recorded order" in output
    code, table = rescore(replay)
    assert code == 0, table
    assert_same_run(lora_run.folder, replay, num_steps=4)
