"""The recipe end to end, by the real `tune`, on real Ray, vLLM, torchrl and torchtune."""

import contextlib
import ipaddress
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import psutil
import pytest
import yaml
from lib.whole_runs import (
    RECIPE,
    SHORT,
    TUNE,
    audit,
    finish,
    metrics,
    receipts,
    records,
    rescore,
    succeed,
    temporary_files,
    wait_for_line,
)

from grpo_components.exchange.books import close_books, reader_of
from grpo_components.twin.fit import fit
from grpo_components.twin.simulation import simulate
from grpo_components.versions.__main__ import main as versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a busy machine may take long


def test_the_main_job_learns(tune):
    """What `make demo` runs."""
    output, output_dir = succeed(tune, new_interpreter=True)
    steps = metrics(output_dir)
    assert steps[0]["step"] == 0
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert 0.25 <= steps[0]["eval/success_rate"] <= 0.5
    assert steps[-1]["eval/success_rate"] >= 0.8
    assert max(record["staleness/max"] for record in steps[1:]) <= 2
    assert all(record.keys() >= KEYS for record in steps[1:])
    assert any(record["staleness/max"] > 0 for record in steps[1:]), "nothing was asynchronous"
    assert all(record["policy_version"] == record["step"] for record in steps)
    code, table = audit(output_dir)
    assert code == 0, table
    for words in ("held-out success", "staleness", "tokens per second", "checkpoint", "try next"):
        assert words in output, words
    heartbeats = records(output_dir / "logs" / "heartbeats.jsonl")
    assert_nothing_grows(output_dir)
    assert_times_add_up(heartbeats)
    assert_its_twin_is_like_it(output_dir)


def assert_times_add_up(heartbeats):
    """The seconds of a role's activities are those between its first heartbeat and its last."""
    for role in ("generator_0", "trainer_0", "replay_buffer", "parameter_server"):
        first, *_, last = (beat for beat in heartbeats if beat["role"] == role)
        counted = sum(last["seconds"].values()) - sum(first["seconds"].values())
        assert counted == pytest.approx(last["time"] - first["time"], rel=0.01, abs=0.5), role
    assert 0 < last_share(heartbeats) <= 1


def assert_its_twin_is_like_it(output_dir):
    """The twin is fitted from the run's files, meets its step time, and keeps its contract."""
    run = fit(output_dir)
    twin = simulate(run.setup, run.times, run.lengths(run.setup, 0))
    assert twin.step_s == pytest.approx(run.step_s, rel=0.2)
    assert 0 < twin.staleness_max <= run.setup.max_staleness


def last_share(heartbeats):
    """Mean share of its sequences that the generator used."""
    return next(b["sequence_share"] for b in reversed(heartbeats) if b["role"] == "generator_0")


def assert_nothing_grows(output_dir):
    """No role uses more in the last 80 steps than in the 80 before them; the first 90 warm up."""
    logs = output_dir / "logs"
    events, heartbeats = (records(logs / f"{name}.jsonl") for name in ("events", "heartbeats"))
    ends = {event["step"]: event["time"] for event in events if event["event"] == "step"}
    for role in ("driver", "generator_0", "trainer_0", "replay_buffer", "parameter_server"):
        beats = [beat for beat in heartbeats if beat["role"] == role]
        settled = [beat for beat in beats if ends[90] <= beat["time"] < ends[170]]
        late = [beat for beat in beats if ends[170] <= beat["time"] <= ends[250]]
        assert min(len(settled), len(late)) >= 3, f"{role}: {len(beats)} heartbeats"
        for what, slack in (("threads", 8), ("open_files", 4), ("processes", 1), ("objects", 40)):
            if what in beats[0]:
                most = max(beat[what] for beat in settled)
                assert max(beat[what] for beat in late) <= most + slack, (role, what)
        # On a busy machine, gRPC starts a few threads more, for some seconds.
        threads = median(beat["threads"] for beat in late)
        assert threads <= max(beat["threads"] for beat in settled) + 2, role
        # Memory goes up and down with the lengths in a batch: what leaks raises its peaks.
        before, after = ([beat["rss_mib"] for beat in part] for part in (settled, late))
        limit = 32
        if role == "generator_0":  # its peaks are short, so that a leak raises its floor
            limit = 256
            growth = min(after) - min(before)
            assert growth < 64, f"{role} never uses less than {growth:.1f} MiB more"
        growth = max(after) - max(before)
        assert growth < limit, f"{role} grew by {growth:.1f} MiB"


KEYS = {
    "step",
    "attempt",
    "policy_version",
    "rollout/reward_mean",
    "rollout/success_rate",
    "rollout/reward_std",
    "rollout/zero_variance_fraction",
    "rollout/cut_off_fraction",
    "rollout/turns_mean",
    "rollout/turns_max",
    "reward_terms/correctness_mean",
    "reward_terms/correctness_std",
    "time/wall_clock",
    "restarts",
    "rollout/response_tokens_mean",
    "loss/total",
    "loss/policy",
    "loss/kl_reference",
    "ratio/mean",
    "ratio/max",
    "ratio/clip_fraction",
    "ratio/clip_fraction_low",
    "ratio/clip_fraction_high",
    "entropy",
    "mismatch/generator_kl",
    "mismatch/fresh_kl",
    "mismatch/fresh_tokens",
    "mismatch/ratio_p01",
    "mismatch/ratio_p50",
    "mismatch/ratio_p99",
    "mismatch/effective_sample_size",
    "off_policy/masked_fraction",
    "off_policy/correction_mass",
    "staleness/mean",
    "staleness/max",
    "buffer/size",
    "buffer/dropped_stale",
    "grad_norm",
    "lr",
    "time/step",
    "time/wait_for_batch",
    "time/train",
    "time/train_cpu",
    "time/update",
    "time/push",
    "push/bytes",
    "throughput/trained_tokens_per_second",
    "throughput/generated_tokens_per_second",
}


def test_each_half_runs_alone_and_what_they_make_is_evaluated(tune):
    """Generators alone, trainers alone on what those left, and an evaluation of the checkpoint."""
    small = ("num_steps=2", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=4")
    _, rollouts = succeed(tune, *small, "rollout_only=true")
    assert len(records(rollouts / "trajectories.jsonl")) == 4
    assert not (rollouts / "checkpoints").exists()
    recorded = f"train_from={rollouts / 'trajectories.jsonl'}"
    alone = (recorded, "shuffle=false", "max_staleness=1", "push=delta")
    _, trained = succeed(tune, *small, *alone)
    rewards = [sum(r["rollout/reward_mean"] for r in metrics(run)) for run in (rollouts, trained)]
    assert rewards[0] == rewards[1], "the same groups, whatever batch each came into"
    assert [record["policy_version"] for record in metrics(trained)] == [1, 2]
    for output_dir in (rollouts, trained):
        code, table = audit(output_dir)
        assert code == 0, table
    own = (f"eval_only={trained / 'checkpoints/latest'}", "eval.samples_per_prompt=2")
    output, evaluated = succeed(tune, *small, *own)
    (record,) = metrics(evaluated)
    assert (record["eval/policy_version"], record["eval/prompts"]) == (2, 4)
    assert record["eval/success_rate"] <= record["eval/pass_at_2"]
    assert "95 % confidence" in output
    answers = records(evaluated / "logs" / "evaluation_answers.jsonl")
    assert [(line["policy_version"], len(line["responses"])) for line in answers] == [(2, 2)] * 4
    assert (evaluated / "report.html").exists()


def test_two_generators_and_two_trainer_ranks_with_a_reference(tune):
    keys = ("log_token_logprobs=true", "keep_policy_versions=true")
    process, output_dir = tune(*keys, config="tiny_async_grpo_2x2")
    wait_for_line(process)
    assert_loopback_only(process)
    assert_temporary_files_are_the_runs(process, output_dir)
    code, output = finish(process)
    assert code == 0, output
    steps = metrics(output_dir)
    for record in steps[1:]:
        assert record.keys() >= KEYS
        # A step of older responses only has no fresh token to compare.
        assert all(record[key] is not None for key in KEYS if "/fresh_" not in key)
    assert steps[1]["loss/kl_reference"] == pytest.approx(0, abs=1e-6)  # the policy is the base
    assert all(record["loss/kl_reference"] > 1e-7 for record in steps[2:])
    # On the base weights, trainer and generator agree: fp32, < 1e-4 on every token.
    assert steps[1]["staleness/max"] == 0
    assert abs(steps[1]["ratio/max"] - 1) < 1e-4
    roles = {record["role"] for record in records(output_dir / "logs" / "roles.jsonl")}
    assert roles == {
        *("generator_0", "generator_1", "trainer_0", "trainer_1", "reference_0"),
        *("replay_buffer", "parameter_server"),
    }
    saved = sorted(path.name for path in (output_dir / "checkpoints").iterdir())
    assert saved == ["latest", *sorted(f"step_{n}" for n in range(4, len(steps), 4))]
    groups = records(output_dir / "logs" / "rollouts.jsonl")
    assert all(len(group["responses"]) == len(group["advantages"]) for group in groups)
    assert_logprobs_agree(response for group in groups[:1] for response in group["responses"])
    assert "trainer_logprobs" in (output_dir / "report.html").read_text(encoding="utf-8")
    assert "saved" in output
    rebuilt = assert_versions_are_checkpoints(output_dir, steps=range(4, len(steps), 4))
    assert_checkpoint_loads(rebuilt)
    code, table = rescore(output_dir)
    assert code == 0, table
    trained = sum(sum(r["token_versions"].values()) for r in receipts(output_dir))
    assert f"rescored: {trained:,} trained tokens of {len(steps) - 1} steps" in table


def assert_versions_are_checkpoints(output_dir, steps):
    """Versions rebuilt from the base model and the deltas have every byte; returns the last one."""
    for step in steps:
        rebuilt = output_dir.parent / f"version_{step}"
        assert versions([str(output_dir), "--version", str(step), "--to", str(rebuilt)]) == 0
        written, saved = rebuilt, output_dir / "checkpoints" / f"step_{step}"
        names = {path.name for path in saved.iterdir()} - {"state"}
        assert {path.name for path in written.iterdir()} == names
        for name in names:
            assert (written / name).read_bytes() == (saved / name).read_bytes(), name
    return rebuilt


def assert_logprobs_agree(responses):
    """On the base weights those of generator, trainer and reference are the same for each token."""
    for response in responses:
        assert response["response"] == "".join(response["tokens"])
        trainer = response["trainer_logprobs"]
        assert len(trainer) == len(response["tokens"]) == response["response_tokens"]
        for who in ("generator", "reference"):
            assert response[f"{who}_logprobs"] == pytest.approx(trainer, abs=1e-4)


def assert_loopback_only(process):
    """Whatever listens in a run, in any of its processes, cannot be reached from elsewhere."""
    listening = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = each.net_connections("inet")
            listening += [(each.name(), s.laddr.ip) for s in sockets if s.status == "LISTEN"]
    addresses = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for _, ip in listening]
    assert len(addresses) > 5, "Ray, gloo and the roles listen"
    assert all(address.is_loopback for address in addresses), listening


def assert_temporary_files_are_the_runs(process, output_dir):
    """Those of a generator, which may be killed at any time, lie in the folder that is removed."""
    started = records(output_dir / "logs" / "roles.jsonl")
    folders = {record["tmp"] for record in started if record["role"].startswith("generator")}
    assert [Path(folder) for folder in folders] == temporary_files(process.pid)[:1]


def assert_checkpoint_loads(folder):
    """transformers and vLLM load a saved folder as it is, and agree on it."""
    code = f"""
import os
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1",
                  TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
ids = tokenizer("Question: Tom has 3 apples and gets 4 more. How many now?\\nAnswer:\\n").input_ids
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}).float()
llm = LLM({str(folder)!r}, dtype="float32", enforce_eager=True, max_model_len=128,
          logprobs_mode="processed_logprobs")
sampling = SamplingParams(temperature=1.0, seed=0, max_tokens=8, logprobs=0)
output = llm.generate({{"prompt_token_ids": ids}}, sampling, use_tqdm=False)[0].outputs[0]
whole = torch.tensor([ids + list(output.token_ids)])
with torch.no_grad():
    expected = torch.log_softmax(model(whole).logits[0], -1)
for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs)):
    assert abs(entry[token].logprob - expected[len(ids) - 1 + i, token].item()) < 1e-4
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


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
        if zlib.crc32(response_text.encode()) % 4 == 0:
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
        *("rewards.correctness._component_=unreliable.Reward", "max_failed_samples=1000"),
        *("object_store_memory=80000000", "user.negative_weight=0", "user.note=mine"),
        recipe="my_grpo.py",
        config="my_config.yaml",
    )
    steps = metrics(output_dir)[1:]
    assert len(steps) == 6
    assert_the_objective_is_as_set(steps)
    filtered = [record["groups"]["filtered"]["count"] for record in receipts(output_dir)]
    assert sum(filtered) > 0
    assert sum(r["curriculum/generated_success"] or 0 for r in steps) > 0
    assert all(record["loss/negative"] == 0 for record in steps)  # by the key's value
    assert all(record["loss/policy"] <= 0 for record in steps)
    user = yaml.safe_load((output_dir / "config.yaml").read_text())["user"]
    assert user == {"negative_weight": 0, "note": "mine"}
    assert re.search(r"failed in .*unreliable\.py:\d+\)", output) and "\x1b" not in output
    assert_failures_cost_their_samples_only(output_dir, steps)
    code, table = audit(output_dir)
    assert code == 0, table
    assert_the_books_close(output_dir, output, table)


def assert_the_books_close(output_dir, output, table):
    """Every cause that such a run can have is there, in the summary and in the audit."""
    rows = {what: pair for what, *pair in close_books(reader_of(output_dir)).table()}
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
    trained = {g["group_id"] for r in receipts(output_dir) for g in r["trained"]}
    assert trained and not trained & {record["group_id"] for record in lost}
