"""What tests of whole runs share: ends a run, and reads what it wrote."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_tools.audit.__main__ import main as audit_main
from lib.chaos import RECIPE, TUNE
from lib.rows import read_rows as records

__all__ = ["RECIPE", "TUNE"]
SHORT = ("num_steps=4", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=16")
SYNCHRONOUS = (
    *SHORT,
    *("num_generators=2", "num_trainers=2", "max_staleness=0", "pull_every_m_rollouts=1"),
    *("eval_every_n_steps=2", "save_every_n_steps=2", "optimizer.lr=1e-3", "reward_workers=1"),
)

AGENTS = (
    "environment._component_=grpo_components.agents.environment.AgentEnvironment",
    *("environment.agent=my_agent.run", "environment.chat_template=plain"),
    "rewards.correctness._component_=grpo_components.agents.rewards.AgentReward",
    "~rewards.correctness.answer_format",
)
LORA = (
    *("num_steps=4", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=4"),
    *("lora.rank=4", "lora.alpha=8", "lora.save_merged=true", "optimizer.lr=1e-2"),
    *("pull_every_m_rollouts=1", "rollouts_in_flight=4", "loss.kl_coeff=0.01", "max_staleness=1"),
    "push=delta",
)


def transformers_policy(path):
    """Return overrides that load the tiny policy as a model of transformers."""
    sizes = "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len"
    return (
        *("checkpointer=null", "model._component_=grpo_components.models.hugging_face"),
        f"model.path={path}",
        *(f"~model.{key}" for key in f"{sizes} norm_eps tie_word_embeddings".split()),
    )


def temporary_files(pid):
    return [*Path("/tmp").glob(f"grpo-{pid}-*"), *Path("/dev/shm").glob(f"sem.grpo-{pid}-*")]


def finish(process, timeout_s=1500):
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def succeed(tune, *overrides, **kwargs):
    process, output_dir = tune(*overrides, **kwargs)
    code, output = finish(process)
    assert code == 0, output
    assert not re.search("^warning: ", output, re.MULTILINE), output  # no false alarm
    return output, output_dir


def audit(output_dir):
    command = [sys.executable, "-m", "grpo_components.audit", str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def assert_audited(output_dir):
    code, table = audit(output_dir)
    assert code == 0, table
    return table


def rescore(output_dir):
    """Return exit code and output of `grpo audit --rescore`, which this process runs."""
    output, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = audit_main([str(output_dir), "--rescore"])
    torch.set_num_threads(threads)
    return code, output.getvalue()


def metrics(output_dir):
    return records(output_dir / "logs" / "metrics.jsonl")


def receipts(output_dir):
    return [r for r in records(output_dir / "receipts.jsonl") if r["event"] == "step"]


def batch_hashes(output_dir):
    """Return step -> hash of its batch, from the last attempt that trained the step."""
    return {step["step"]: step["batch_hash"] for step in receipts(output_dir)}


def wait_for_line(process, pattern=r"step +2/"):
    """Read what a run prints until a line begins with `pattern`; return what was read."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(pattern, line):
            return "".join(lines)
    raise AssertionError("the run ended early:\n" + "".join(lines))


def assert_same_run(original, replay, num_steps):
    """Check that responses, batches and last weights are equal to the bit; return the weights."""
    groups = (records(folder / "logs" / "rollouts.jsonl") for folder in (original, replay))
    assert next(groups) == next(groups)
    hashes = batch_hashes(original)
    assert [*hashes] == [*range(1, num_steps + 1)] and hashes == batch_hashes(replay)
    before, after = (
        load_file(folder / "checkpoints" / f"step_{num_steps}" / "model.safetensors")
        for folder in (original, replay)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after


_KEYS = {
    "rollout": "reward_mean success_rate reward_std zero_variance_fraction cut_off_fraction "
    "turns_mean turns_max response_tokens_mean",
    "reward_terms": "correctness_mean correctness_std",
    "time": "wall_clock step wait_for_batch train train_cpu update push",
    "loss": "total policy kl_reference",
    "ratio": "mean max clip_fraction clip_fraction_low clip_fraction_high",
    "mismatch": "generator_kl fresh_kl fresh_tokens ratio_p01 ratio_p50 ratio_p99 "
    "effective_sample_size",
    "off_policy": "masked_fraction correction_mass",
    "staleness": "mean max",
    "buffer": "size dropped_stale",
    "push": "bytes",
    "throughput": "trained_tokens_per_second generated_tokens_per_second",
}
KEYS = {
    *["step", "attempt", "policy_version", "restarts", "entropy", "grad_norm", "lr"],
    *(f"{group}/{name}" for group, names in _KEYS.items() for name in names.split()),
}
"""Metrics that every step has."""
