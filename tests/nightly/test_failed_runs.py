"""Runs that end with an error: without a role, or with every step skipped."""

import os
import re
import signal

from lib.whole_runs import SHORT, assert_audited, finish, metrics, records, wait_for_line


def test_a_run_whose_every_step_is_skipped_ends(tune, tmp_path):
    """And its profiler has traced the one step that it was told to."""
    (tmp_path / "my_losses.py").write_text(
        "class Nothing:\n"
        "    def __call__(self, inputs):\n"
        "        losses = -inputs.trainer_logprobs * inputs.advantages\n"
        "        spoiled = losses.new_zeros(len(losses))\n"
        "        spoiled[100:] = float('nan')  # longer than any made batch\n"
        "        return losses + spoiled, {}\n"
    )
    process, output_dir = tune(
        *SHORT,
        *("loss._component_=my_losses.Nothing", "~loss.clip_low", "~loss.clip_high"),
        *("~loss.kl_coeff", "max_skipped_steps=2", "profiler.enabled=true"),
        *(f"profiler.{key}={n}" for key, n in (("wait_steps", 0), ("warmup_steps", 0))),
        *(f"profiler.{key}=1" for key in ("active_steps", "num_cycles")),
    )
    returncode, output = finish(process)
    assert returncode == 1, output
    last = output.splitlines()[-1]
    assert last.startswith("error: max_skipped_steps: 2 given, and the 2 steps 1 to 2 in a row")
    assert re.search(r"step 1 is skipped: loss/total is nan", output)
    assert "Traceback" not in output
    steps = metrics(output_dir)[1:]
    assert [record["skipped_steps"] for record in steps] == [1, 2]
    assert [record["policy_version"] for record in steps] == [0, 0]
    assert list((output_dir / "profile").glob("iteration_*/*.pt.trace.json.gz"))
    assert_audited(output_dir)


def test_a_dead_role_ends_a_run_without_restarts_with_its_name(tune):
    """Here before its first step."""
    role = "generator_0"
    process, output_dir = tune(*SHORT, "num_steps=1000", "max_restarts=0")
    wait_for_line(process, "evaluating the policy")
    roles = records(output_dir / "logs" / "roles.jsonl")
    os.kill(next(r["pid"] for r in roles if r["role"] == role), signal.SIGKILL)
    returncode, output = finish(process)
    assert returncode == 1, output
    assert f"error: {role} died" in output
    assert "Traceback" not in output
