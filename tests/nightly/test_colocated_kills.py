"""A colocated run is its replay, and that of kills in either turn, to the bit."""

import re

import pytest
import torch
from lib.chaos import Fault, forked_recipe
from lib.whole_runs import SYNCHRONOUS, assert_audited, assert_same_run, batch_hashes, succeed
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(1800)

FAULTS = [
    Fault("generator_0", "generate_group", 3),  # the generators' turn
    Fault("generator_1", "sleep", 1, delay_s=0.2),  # the trainers' turn, or a little before
    Fault("trainer_0", "train_step", 2, delay_s=0.1),  # the trainers' turn: attempt 1
    Fault("generator_0", "load_weights", 4),  # while it wakes
    Fault("trainer_1", "gather_weights", 5),  # between the turns: attempt 2
    Fault("generator_1", "evaluate", 2),
    Fault("replay_buffer", "add", 14),
    Fault("parameter_server", "push", 6),
]


def test_a_colocated_run_is_its_replay_to_the_bit_and_that_of_kills_in_either_turn(
    tune, tmp_path, colocated_run
):
    colocated = colocated_run.folder
    output, replay = succeed(tune, *SYNCHRONOUS, "colocate=true", f"replay_events={colocated}")
    assert "events in the recorded order" in output
    weights = assert_same_run(colocated, replay, 4)

    recipe, environment = forked_recipe(tmp_path, FAULTS)
    survival = ("colocate=true", "max_restarts=20", "timeouts.heartbeat_s=30")
    output, disturbed = succeed(tune, *SYNCHRONOUS, *survival, recipe=recipe, env=environment)
    struck = re.findall(r'^chaos: (\w+) \{.*"method": "(\w+)"', output, re.MULTILINE)
    assert sorted(struck) == sorted((fault.role, fault.method) for fault in FAULTS), output
    assert batch_hashes(disturbed) == batch_hashes(colocated)
    after = load_file(disturbed / "checkpoints" / "step_4" / "model.safetensors")
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    for folder in (replay, disturbed):
        assert_audited(folder)
