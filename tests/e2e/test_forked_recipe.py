"""The documented fork of the recipe, every part of the objective, and parts that fail."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from lib.whole_runs import RECIPE, SHORT, TUNE, assert_audited, metrics, records, succeed

from grpo_tools.books import close_books

UNRELIABLE = """
import zlib

from grpo_components.rollout.environments import SingleTurnEnvironment


class Environment(SingleTurnEnvironment):
    def _step(self, tensordict):
        if self._prompts[0]["prompt_index"] % 5 == 3 and len(self._prompts) > 1:
            raise RuntimeError("no such level")
        return super()._step(tensordict)


class Reward:
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        if zlib.crc32(response_text.encode()) % 4 == 1:  # not the empty one
            raise ValueError(f"cannot read \\x1b[2J{response_text!r}")
        return float(answer in response_text)
"""
OBJECTIVES = Path(__file__).parents[2] / "docs" / "objectives.md"
FORK = re.search(r"```diff\n(.*?)```", OBJECTIVES.read_text(), re.DOTALL)


def forked(source: str) -> str:
    """The recipe with the changes that docs/objectives.md prints."""
    assert FORK is not None
    for hunk in FORK[1].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        assert source.count(before) == 1, before
        source = source.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    return source


LINEAR = "{schedule: linear, start: %s, end: %s, num_steps: 6, warmup_steps: %s}"
OBJECTIVE = (
    f"loss.clip_high={LINEAR % (0.3, 0.2, 0)}",
    "loss.kl_coeff=0.01",
    "loss.entropy_coeff=0.001",
    "aggregation._component_=grpo_components.objective.aggregation.SequenceMean",
    "off_policy._component_=grpo_components.objective.off_policy.MaskedIS",
    f"reward_shaping.kl_coeff={LINEAR % (0.02, 0.0, 0)}",
    "reward_shaping.overlong_tokens=4",
    "mask_overlong=true",
    "dynamic_sampling.enabled=true",
    "curriculum.floor=0.2",
    "stale_tokens=mask",
    "replay_generation.share=0.5",
    "max_staleness=1",
    "push_every_n_steps=2",
    "stale_groups=wait",
    "ppo_epochs=2",
    "updates_per_batch=2",
    f"optimizer.lr={LINEAR % (1e-4, 1e-5, 2)}",
    f"generator.temperature={LINEAR % (1.0, 0.7, 0)}",
)
"""Every part of the objective, each with another setting than the demo's."""


def test_a_copied_recipe_with_an_edited_loss_every_part_of_the_objective_and_parts_that_fail(
    tune, tmp_path
):
    """The documented fork: its own loss and key. What its own environment and reward raise costs
    their samples only.

    What each part of the objective computes is tested apart; here they meet on the real stack, in
    an object store that holds no more than a few snapshots of the weights.
    """
    subprocess.run([TUNE, "cp", RECIPE, "my_grpo.py"], cwd=tmp_path, check=True)
    subprocess.run([TUNE, "cp", "tiny_async_grpo", "my_config.yaml"], cwd=tmp_path, check=True)
    recipe = tmp_path / "my_grpo.py"
    recipe.write_text(forked(recipe.read_text()))
    (tmp_path / "unreliable.py").write_text(UNRELIABLE)
    output, output_dir = succeed(
        tune,
        *(*SHORT, *OBJECTIVE, "num_steps=6"),
        *("pull_every_m_rollouts=100", "rollouts_in_flight=3"),
        *("environment=unreliable.Environment", "~rewards.correctness.answer_format"),
        *("rewards.correctness._component_=unreliable.Reward", "max_failed_samples=1"),
        *("object_store_memory=80000000", "user.negative_weight=0", "user.note=mine"),
        recipe="my_grpo.py",
        config="my_config.yaml",
    )
    steps = metrics(output_dir)[1:]
    assert len(steps) == 6
    assert_the_objective_is_as_set(steps)
    events = records(output_dir / "receipts.jsonl")
    assert [event for event in events if event.get("reason") == "filtered"]
    assert sum(r["curriculum/generated_success"] or 0 for r in steps) > 0
    assert all(record["loss/negative"] == 0 for record in steps)  # by the key's value
    assert all(record["loss/policy"] <= 0 for record in steps)
    user = yaml.safe_load((output_dir / "config.yaml").read_text())["user"]
    assert user == {"negative_weight": 0, "note": "mine"}
    assert re.search(r"failed in .*unreliable\.py:\d+\)", output) and "\x1b" not in output
    assert_failures_cost_their_samples_only(output_dir, steps)
    table = assert_audited(output_dir)
    assert_the_books_close(output_dir, output, table)


def assert_the_books_close(output_dir, output, table):
    """Every cause that such a run can have is there, in the summary and in the audit."""
    rows = {what: pair for what, *pair in close_books(output_dir).table()}
    assert rows["residual"] == [0, 0]
    causes = {"trained", "filtered", "dropped: failed", "in failed samples of trained groups"}
    assert rows.keys() > causes, rows
    groups, tokens = rows["generated"]
    assert f"{groups}/{tokens:,} generated = " in table and "; residual 0/0\n" in table
    assert re.search(rf"{groups} +{tokens:,}  generated\n", output), output
    assert " trained again\n" in table


def assert_the_objective_is_as_set(steps):
    assert [record["lr"] for record in steps[:3]] == pytest.approx([5e-5, 1e-4, 1e-4])
    assert all(record["staleness/max"] <= 1 for record in steps)
    assert all(record["buffer/dropped_stale"] == 0 for record in steps)
    # In the second step, all groups of the first are a version old, and none is without variance.
    assert [record["reuse/share"] for record in steps[:2]] == [0, 0.5]
    assert (steps[1]["reuse/age_mean"], steps[1]["reuse/uses_mean"]) == (1, 1.5)
    assert all(record["loss/kl_reference"] >= 0 for record in steps)
    # Temperatures differ over the groups of a batch, and the trainer uses each one's own.
    assert all(record["mismatch/ratio_p50"] == pytest.approx(1, abs=0.05) for record in steps)


def assert_failures_cost_their_samples_only(output_dir, steps):
    failed = records(output_dir / "logs" / "failed_samples.jsonl")
    assert all(record["prompt"].startswith("Question: ") for record in failed)
    groups = [record for record in failed if "group_id" in record]
    lost = [record for record in groups if any("no such level" in e for e in record["errors"])]
    assert lost and all(list(record["errors"].values()) == [4] for record in lost)
    place = rf"reward correctness: ValueError \({output_dir.parent}/unreliable.py:\d+\): "
    unread = [(r, e) for r in groups for e in r["errors"] if re.match(place, e)]
    assert unread
    for record, error in unread:
        trace = record["tracebacks"][error].splitlines()
        assert trace[0].startswith("Traceback") and "unreliable.py" in trace[1]
        assert not any("grpo_components" in line for line in trace), "the user's frames only"
    assert "unreliable.py" in (output_dir / "logs" / "generator_0.log").read_text()
    assert len(groups) < len(failed), "evaluations' failures are there, too"
    counted = sum(record["rollout/failed_samples"] for record in steps)
    assert 0 < counted <= sum(sum(record["errors"].values()) for record in failed)
    events = records(output_dir / "receipts.jsonl")
    trained = {group for e in events if e["event"] == "sample" for group in e["groups"]}
    assert trained and not trained & {record["group_id"] for record in lost}
