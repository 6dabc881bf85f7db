"""The books of a run close over all attempts, whatever was killed, rolled back and resumed."""

import os
import signal
import time

from lib.chaos import Fault, forked_recipe
from lib.whole_runs import assert_audited, audit, finish, records, wait_for_line

from grpo_tools.books import close_books

FAULTS = [
    Fault("replay_buffer", "add", 5),
    Fault("generator_0", "generate_group", 7, delay_s=0.05),
    Fault("trainer_0", "train_step", 6),  # rolls back to step 4
]


def test_they_close_over_killed_roles_a_rollback_a_killed_driver_and_a_resume(tune, tmp_path):
    """A generator, the buffer and a trainer are killed, then the driver, and the run is resumed."""
    recipe, environment = forked_recipe(tmp_path, FAULTS)
    knobs = (
        *("num_steps=12", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=4"),
        *("num_generators=2", "rollouts_in_flight=4", "save_every_n_steps=4", "max_restarts=20"),
        *("dynamic_sampling.enabled=true", "stale_tokens=mask", "mask_overlong=true"),
        *("generator.max_response_tokens=12", "pull_every_m_rollouts=1", "max_staleness=1"),
    )
    process, output_dir = tune(*knobs, recipe=recipe, env=environment.items())
    wait_for_line(process, r"step +10/")
    time.sleep(0.3)  # any moment will do
    os.kill(process.pid, signal.SIGKILL)
    code, _ = finish(process)
    assert code == -signal.SIGKILL
    killed, _ = audit(output_dir)
    assert killed == 1, "a killed attempt has no end"
    again = ("resume_from_checkpoint=true", f"output_dir={output_dir}")
    process, _ = tune(*knobs, *again, recipe=recipe, env={**environment, "CHAOS": "[]"}.items())
    code, output = finish(process)
    assert code == 0, output
    assert_audited(output_dir)
    books = close_books(output_dir)
    rows = {what: pair for what, *pair in books.table()}
    assert rows["residual"] == [0, 0]
    assert rows["undone by a rollback or resume"][0] > 0 < rows["filtered"][0]
    events = records(output_dir / "receipts.jsonl")
    tokens = [sum(e["response_tokens"]) for e in events if e["event"] == "finish"]
    assert rows["generated"] == [len(tokens), sum(tokens)]
