"""Trainers and generators that take turns make the split synchronous run, to the bit.

On a CPU vLLM cannot free memory, so the engines' sleep is left out: they pause, keep their weights,
and load the next ones over them. tests/unit/rollout/test_engine_sleep.py makes an engine
lose its memory. Turns, offloaded optimizer state, wake-ups and restarts are those of a GPU.
"""

import re

import pytest
import torch
from lib.chaos import Fault, forked_recipe
from lib.whole_runs import SHORT, assert_same_run, audit, metrics, receipts, records, succeed
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 4
RUN = (
    *SHORT,
    *("num_generators=2", "num_trainers=2", "max_staleness=0", "pull_every_m_rollouts=1"),
    *("eval_every_n_steps=2", "save_every_n_steps=2", "optimizer.lr=1e-3", "reward_workers=1"),
)
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


def last_hashes(output_dir):
    return {receipt["step"]: receipt["batch_hash"] for receipt in receipts(output_dir)}


def test_a_colocated_run_is_the_split_one_to_the_bit(tune):
    _, split = succeed(tune, *RUN)
    _, colocated = succeed(tune, *RUN, "colocate=true")
    assert_same_run(split, colocated, STEPS)
    for record in metrics(colocated)[1:]:
        assert {"time/sleep", "time/wake", "time/offload"} <= record.keys()
        assert record["staleness/max"] == 0
    assert "time/sleep" not in metrics(split)[1]
    events = records(colocated / "logs" / "events.jsonl")
    turns = [event["event"] for event in events if event["event"] in ("sample", "sleep", "push")]
    assert turns == ["sample", "sleep", "push"] * STEPS
    assert not [event for event in events if event["event"] == "abort"], "no response was cut off"
    code, table = audit(colocated)
    assert code == 0, table


@pytest.mark.fault
def test_a_colocated_run_is_its_replay_to_the_bit_and_that_of_kills_in_either_turn(tune, tmp_path):
    _, colocated = succeed(tune, *RUN, "colocate=true")
    output, replay = succeed(tune, *RUN, "colocate=true", f"replay_events={colocated}")
    assert "events in the recorded order" in output
    weights = assert_same_run(colocated, replay, STEPS)

    recipe, environment = forked_recipe(tmp_path, FAULTS)
    survival = ("colocate=true", "max_restarts=20", "timeouts.heartbeat_s=30")
    output, disturbed = succeed(tune, *RUN, *survival, recipe=recipe, env=environment)
    struck = re.findall(r'^chaos: (\w+) \{.*"method": "(\w+)"', output, re.MULTILINE)
    assert sorted(struck) == sorted((fault.role, fault.method) for fault in FAULTS), output
    assert last_hashes(disturbed) == last_hashes(colocated)
    after = load_file(disturbed / "checkpoints" / f"step_{STEPS}" / "model.safetensors")
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    for folder in (replay, disturbed):
        code, table = audit(folder)
        assert code == 0, table
