"""Roles die or freeze at chosen moments of a real run: it completes, exactly once, in bounds."""

import re
from collections import Counter

from lib.chaos import Fault, forked_recipe
from lib.classifier import random_classifier
from lib.whole_runs import assert_audited, finish, records

FAULTS = [
    Fault("replay_buffer", "add", 3),  # while buffering
    Fault("generator_0", "generate_group", 4, delay_s=0.05),
    Fault("parameter_server", "push", 3),
    Fault("reference_0", "add_logprobs", 10),
    Fault("reward_model", "add_scores", 6),
    Fault("trainer_0", "write_state", 1),  # while saving
    Fault("generator_1", "load_weights", 3),  # while pulling
    Fault("trainer_0", "gather_weights", 6),  # while pushing
    Fault("generator_0", "generate_group", 16, stop=True),
]


def test_every_role_dies_and_nothing_is_lost(tune, tiny_policy, tmp_path):
    recipe, environment = forked_recipe(tmp_path, FAULTS)
    process, output_dir = tune(
        *("groups_per_step=4", "group_size=4", "eval_dataset.num_rows=4", "loss.kl_coeff=0.001"),
        *("num_steps=12", "num_generators=2", "rollouts_in_flight=4", "save_every_n_steps=3"),
        # A busy machine restarts slowly: steps wait for groups that would become too old.
        *("max_restarts=20", "timeouts.heartbeat_s=15", "stale_groups=wait"),
        # Small steps change few bytes: a new generator or server needs a chain of deltas.
        *("push=delta", "optimizer.lr=1e-9", "reward_model.weight=0.1"),
        f"reward_model.path={random_classifier(tmp_path / 'classifier', tiny_policy)}",
        recipe=recipe,
        env=environment,
    )
    code, output = finish(process)
    assert code == 0, output
    struck = [line for line in output.splitlines() if line.startswith("chaos: ")]
    assert len(struck) == len(FAULTS), output
    told = re.findall(
        r"^(\w+) (?:died|did not answer a heartbeat).* \(restart \d+ of at most 20\)$", output, re.M
    )
    # A busy machine may be silent long enough for one restart more.
    assert Counter(told) >= Counter(fault.role for fault in FAULTS), output
    assert "Traceback" not in output and "raylet" not in output
    steps = {r["step"]: r for r in records(output_dir / "logs" / "metrics.jsonl")}  # last attempts
    assert sorted(steps) == list(range(13))
    assert steps[12]["attempt"] >= 2, "the trainer was killed twice"
    events = records(output_dir / "receipts.jsonl")
    restarts = [i for i, e in enumerate(events) if e["event"] in ("restart", "rollback")]
    last = max(i for i, e in enumerate(events) if e["event"] == "step" and e["step"] == 12)
    assert len(restarts) >= len(FAULTS)
    # The last one may come after the last step.
    assert sum(i < last for i in restarts) <= steps[12]["restarts"] <= len(restarts)
    table = assert_audited(output_dir)
    assert "= 48 trained + 0 dropped or filtered + 0 living" in table
    assert "; residual 0/0\n" in table and "undone by a rollback or resume" in table
