"""A run with adapters whose generator was killed is replayed to the same bits."""

import pytest
from lib.whole_runs import LORA, assert_same_run, rescore, succeed, transformers_policy

pytestmark = pytest.mark.timeout(1800)


def test_its_tokens_are_scored_again_by_the_adapters_of_its_checkpoints(
    lora_run, tune, tiny_policy
):
    kept = (f"replay_events={lora_run.folder}", "save_every_n_steps=1")
    output, replay = succeed(tune, *LORA, *transformers_policy(tiny_policy), *kept)
    assert "events in the recorded order" in output
    code, table = rescore(replay)
    assert code == 0, table
    assert_same_run(lora_run.folder, replay, num_steps=4)
