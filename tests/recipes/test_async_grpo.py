"""The recipe end to end, by the real `tune`, on real Ray, vLLM, torchrl and torchtune."""

import contextlib
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from chaos import Fault, forked_recipe
from classifier import random_classifier
from safetensors.torch import load_file

from grpo_components.training.skipped_steps import load_batch
from grpo_components.trajectory import batch_hash

TUNE = Path(sys.executable).with_name("tune")
RECIPE = "async_grpo_full_finetune_distributed"
pytestmark = pytest.mark.timeout(1800)  # a busy machine may take long
REPOSITORY = Path(__file__).parents[2]
REWARDS = REPOSITORY / "docs" / "rewards.md"


@pytest.fixture
def tune(tiny_policy, tmp_path):
    """Start `tune run`; returns the process and the run's folder. Checks that nothing is left."""
    mark, running, before = uuid.uuid4().hex, [], []

    def start(*overrides, recipe=RECIPE, config="tiny_async_grpo", cwd=tmp_path, env=()):
        output_dir = tmp_path / f"run{len(running)}"
        command = [str(TUNE), "run", recipe, "--config", config, f"output_dir={output_dir}"]
        process = subprocess.Popen(
            [*command, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
            env={**os.environ, "GRPO_TEST": mark, **dict(env)},
        )
        running.append(process)
        before.extend(temporary_files(process.pid))  # of an earlier process with this pid
        return process, output_dir

    yield start
    for process in running:
        if process.poll() is None:  # the test failed: let the run clean up
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    _, left = psutil.wait_procs(processes_of(mark), timeout=10)  # killed, maybe not gone yet
    assert [command_line(process) for process in left] == []
    left = [path for process in running for path in temporary_files(process.pid)]
    assert set(left) <= set(before)


def processes_of(mark):
    """The processes that a run started, at any depth."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("GRPO_TEST") == mark:
                found.append(process)
    return found


def command_line(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()


def temporary_files(pid):
    return [*Path("/tmp").glob(f"grpo-{pid}-*"), *Path("/dev/shm").glob(f"sem.grpo-{pid}-*")]


def finish(process, timeout_s=1500):
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def succeed(tune, *overrides, **kwargs):
    process, output_dir = tune(*overrides, **kwargs)
    code, output = finish(process)
    assert code == 0, output
    return output, output_dir


def records(path):
    return [json.loads(line) for line in path.open()]


def audit(output_dir):
    """Exit code and output of the audit of a run's receipts."""
    command = [sys.executable, "-m", "grpo_components.audit", str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def metrics(output_dir):
    return records(output_dir / "logs" / "metrics.jsonl")


@pytest.mark.slow
def test_the_main_job_learns(tune):
    """What `make demo` runs, as it is."""
    output, output_dir = succeed(tune)
    steps = metrics(output_dir)
    assert steps[0]["step"] == 0
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert 0.25 <= steps[0]["eval/success_rate"] <= 0.5
    assert steps[-1]["eval/success_rate"] >= 0.9
    assert max(record["staleness/max"] for record in steps[1:]) <= 2
    assert all(record.keys() >= KEYS for record in steps[1:])
    assert any(record["staleness/max"] > 0 for record in steps[1:]), "nothing was asynchronous"
    assert all(record["policy_version"] == record["step"] for record in steps)
    code, table = audit(output_dir)
    assert code == 0, table
    for words in ("held-out success", "staleness", "tokens per second", "checkpoint", "try next"):
        assert words in output, words
    assert_nothing_grows(records(output_dir / "logs" / "heartbeats.jsonl"))


def assert_nothing_grows(heartbeats):
    """No role uses more in the second half of a run than in the quarter before it."""
    for role in ("driver", "generator_0", "trainer_0", "replay_buffer", "parameter_server"):
        beats = [beat for beat in heartbeats if beat["role"] == role]
        assert len(beats) >= 12, f"{role}: {len(beats)} heartbeats"
        quarter = len(beats) // 4
        settled, late = beats[quarter : 2 * quarter], beats[2 * quarter :]
        for what, slack in (("threads", 2), ("open_files", 4), ("processes", 1), ("objects", 40)):
            if what in beats[0]:
                most = max(beat[what] for beat in settled)
                assert max(beat[what] for beat in late) <= most + slack, (role, what)
        # Memory goes up and down with the lengths in a batch: what leaks raises its peaks.
        growth = max(b["rss_mib"] for b in late) - max(b["rss_mib"] for b in settled)
        # vLLM touches the pages of its KV cache (1 GiB) one after the other.
        limit = 256 if role == "generator_0" else 32
        assert growth < limit, f"{role} grew by {growth:.1f} MiB"


KEYS = {
    "step",
    "attempt",
    "policy_version",
    "rollout/reward_mean",
    "rollout/success_rate",
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
    "time/push",
    "throughput/trained_tokens_per_second",
    "throughput/generated_tokens_per_second",
}


@pytest.mark.slow
def test_each_half_runs_alone_and_what_they_make_is_evaluated(tune):
    """Generators alone, trainers alone on what those left, and an evaluation of the checkpoint."""
    small = ("num_steps=2", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=4")
    _, rollouts = succeed(tune, *small, "rollout_only=true")
    assert len(records(rollouts / "trajectories.jsonl")) == 4
    assert not (rollouts / "checkpoints").exists()
    recorded = f"train_from={rollouts / 'trajectories.jsonl'}"
    _, trained = succeed(tune, *small, recorded, "shuffle=false", "max_staleness=1")
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


@pytest.mark.slow
def test_two_generators_and_two_trainer_ranks_with_a_reference(tune):
    process, output_dir = tune("log_token_logprobs=true", config="tiny_async_grpo_2x2")
    wait_for_step(process)
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
    assert_checkpoint_loads(output_dir / "checkpoints" / "latest")
    assert "saved" in output


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
    pids = [record["pid"] for record in started if record["role"].startswith("generator")]
    folders = {psutil.Process(pid).environ()["TMPDIR"] for pid in pids}
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


SHORT = ("num_steps=4", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=16")


@pytest.mark.slow
def test_every_part_of_the_objective_at_once(tune):
    """What each of them computes is tested apart; here they meet on the real stack.

    The knobs are others than the demo's, too: pushes every other step, and waiting for groups.
    """
    linear = "{schedule: linear, start: %s, end: %s, num_steps: 6, warmup_steps: %s}"
    _, output_dir = succeed(
        tune,
        *SHORT,
        "num_steps=6",
        f"loss.clip_high={linear % (0.3, 0.2, 0)}",
        "loss.kl_coeff=0.01",
        "loss.entropy_coeff=0.001",
        "aggregation._component_=grpo_components.objective.aggregation.SequenceMean",
        "off_policy._component_=grpo_components.objective.off_policy.MaskedIS",
        f"reward_shaping.kl_coeff={linear % (0.02, 0.0, 0)}",
        "reward_shaping.overlong_tokens=4",
        "mask_overlong=true",
        "dynamic_sampling.enabled=true",
        "stale_tokens=mask",
        "max_staleness=1",
        "push_every_n_steps=2",
        "stale_groups=wait",
        "ppo_epochs=2",
        "updates_per_batch=2",
        f"optimizer.lr={linear % (1e-4, 1e-5, 2)}",
        f"generator.temperature={linear % (1.0, 0.7, 0)}",
    )
    steps = metrics(output_dir)[1:]
    assert [record["lr"] for record in steps[:3]] == pytest.approx([5e-5, 1e-4, 1e-4])
    assert all(record["staleness/max"] <= 1 for record in steps)
    assert all(record["buffer/dropped_stale"] == 0 for record in steps)
    assert all(record["loss/kl_reference"] >= 0 for record in steps)
    # Temperatures differ over the groups of a batch, and the trainer uses each one's own.
    assert all(record["mismatch/ratio_p50"] == pytest.approx(1, abs=0.05) for record in steps)
    assert sum(record["groups"]["filtered"]["count"] for record in receipts(output_dir)) > 0
    code, table = audit(output_dir)
    assert code == 0, table


@pytest.mark.slow
def test_a_run_whose_every_step_is_skipped_keeps_the_batches_and_ends(tune, tmp_path):
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
    assert re.search(
        r"step 1 is skipped: the loss is nan at group \d+, response \d, token ", output
    )
    assert last.endswith(str(output_dir / "skipped")) and "Traceback" not in output
    steps = metrics(output_dir)[1:]
    assert [record["skipped_steps"] for record in steps] == [1, 2]
    assert [record["policy_version"] for record in steps] == [0, 0]
    hashes = [r["batch_hash"] for r in records(output_dir / "receipts.jsonl") if "batch_hash" in r]
    for number, expected in enumerate(hashes, start=1):
        batch, advantages, _ = load_batch(output_dir / "skipped" / f"step_{number}")
        assert batch_hash(batch) == expected and len(advantages) == len(batch["group_id"])
    assert list((output_dir / "profile").glob("iteration_*/*.pt.trace.json.gz"))
    code, table = audit(output_dir)
    assert code == 0, table


def assert_same_run(original, replay, num_steps):
    """Responses, batches and last weights, to the bit; returns the weights."""
    logs = "logs/rollouts.jsonl"
    assert records(replay / logs) == records(original / logs)
    hashes = [
        [r["batch_hash"] for r in records(folder / "receipts.jsonl") if "batch_hash" in r]
        for folder in (original, replay)
    ]
    assert len(hashes[0]) == num_steps and hashes[0] == hashes[1]
    before, after = (
        load_file(folder / "checkpoints" / f"step_{num_steps}" / "model.safetensors")
        for folder in (original, replay)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return after


TALKATIVE = """
from grpo_components.rollout.multi_turn import Reply


class Talkative:
    def __call__(self, prompt, seed):
        left = 20 if prompt["prompt_index"] in (6, 7) else 0

        def respond(text):
            nonlocal left
            left -= 1
            return Reply("And? ", done=left < 0, rewards={"odd": len(text) % 2})

        return respond
"""


@pytest.mark.slow
def test_a_finished_run_is_replayed_to_the_same_bits(tune, tmp_path):
    """With new weights within responses; later a generator and the buffer are killed.

    Groups 6 and 7 start after the first step and have 21 turns, all others have one. Steps 2 and 3
    have their groups in the buffer already. The rollouts that start after them are on the same
    generators, and pull.
    """
    (tmp_path / "my_worlds.py").write_text(TALKATIVE)
    faults = [Fault("generator_0", "generate_group", 7), Fault("replay_buffer", "add", 9)]
    recipe, environment = forked_recipe(tmp_path, faults)
    knobs = (
        *("num_steps=10", "groups_per_step=2", "group_size=2", "eval_dataset.num_rows=2"),
        *("num_generators=2", "rollouts_in_flight=3", "pull_every_m_rollouts=1", "shuffle=false"),
        *("generator.max_response_tokens=400", "generator.temperature=2", "eval_every_n_steps=5"),
        "stale_groups=wait",
        "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
        "environment.max_turns=21",
        "environment.world._component_=my_worlds.Talkative",
        "rollouts_logged_per_step=2",
    )
    output, original = succeed(tune, *knobs, recipe=recipe, env=environment)
    assert all(f"{role} is back" in output for role in ("generator_0", "replay_buffer"))
    code, table = audit(original)
    assert code == 0, table
    output, replay = succeed(tune, *knobs, f"replay_events={original}")
    assert "events in the recorded order" in output
    assert "generator_0 is back" in output and "replay_buffer" not in output
    groups = records(original / "logs" / "rollouts.jsonl")
    responses = [response for group in groups for response in group["responses"]]
    assert any(oldest < newest for oldest, newest in (r["versions"] for r in responses))
    assert max(record["staleness/max"] for record in metrics(original)[1:]) > 0
    after = assert_same_run(original, replay, num_steps=10)
    base = load_file(Path("/tmp/torchtune-async-grpo/tiny_policy/model.safetensors"))
    assert any(not torch.equal(base[name], after[name]) for name in base), "nothing was trained"


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
FORK = re.search(
    r"```diff\n(.*?)```", (REPOSITORY / "docs" / "objectives.md").read_text(), re.DOTALL
)


def forked(source: str) -> str:
    """The recipe with the changes that docs/objectives.md prints."""
    assert FORK is not None
    for hunk in FORK[1].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        assert source.count(before) == 1, before
        source = source.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))
    return source


@pytest.mark.slow
def test_a_copied_recipe_with_an_edited_loss_and_parts_that_fail(tune, tmp_path):
    """The documented fork: its own loss and key. What its own environment and reward raise costs
    their samples only.

    In an object store that holds no more than a few snapshots of the weights.
    """
    subprocess.run([TUNE, "cp", RECIPE, "my_grpo.py"], cwd=tmp_path, check=True)
    subprocess.run([TUNE, "cp", "tiny_async_grpo", "my_config.yaml"], cwd=tmp_path, check=True)
    recipe = tmp_path / "my_grpo.py"
    recipe.write_text(forked(recipe.read_text()))
    (tmp_path / "unreliable.py").write_text(UNRELIABLE)
    output, output_dir = succeed(
        tune,
        *SHORT,
        *("max_staleness=3", "pull_every_m_rollouts=100", "rollouts_in_flight=3", "num_steps=8"),
        *("environment=unreliable.Environment", "~rewards.correctness.answer_format"),
        *("rewards.correctness._component_=unreliable.Reward", "max_failed_samples=1000"),
        *("object_store_memory=80000000", "user.negative_weight=0", "user.note=mine"),
        recipe="my_grpo.py",
        config="my_config.yaml",
    )
    steps = metrics(output_dir)[1:]
    assert len(steps) == 8
    assert all(record["loss/negative"] == 0 for record in steps)  # by the key's value
    assert all(record["loss/policy"] <= 0 for record in steps)
    user = yaml.safe_load((output_dir / "config.yaml").read_text())["user"]
    assert user == {"negative_weight": 0, "note": "mine"}
    assert all(record["staleness/max"] <= 3 for record in steps)
    assert "failed in" in output and "\x1b" not in output
    failed = records(output_dir / "logs" / "failed_samples.jsonl")
    assert all(record["prompt"].startswith("Question: ") for record in failed)
    groups = [record for record in failed if "group_id" in record]
    lost = [record for record in groups if any("no such level" in e for e in record["errors"])]
    assert lost and all(list(record["errors"].values()) == [4] for record in lost)
    place = rf"reward correctness: ValueError \({tmp_path}/unreliable.py:\d+\): "
    unread = [(r, e) for r in groups for e in r["errors"] if re.match(place, e)]
    assert unread
    for record, error in unread:
        trace = record["tracebacks"][error].splitlines()
        assert trace[0].startswith("Traceback") and "unreliable.py" in trace[1]
        assert not any("grpo_components" in line for line in trace), "the user's frames only"
    assert re.search(r"failed in .*unreliable\.py:\d+\)", output)
    assert "unreliable.py" in (output_dir / "logs" / "generator_0.log").read_text()
    assert len(groups) < len(failed), "evaluations' failures are there, too"
    counted = sum(record["rollout/failed_samples"] for record in steps)
    assert 0 < counted <= sum(sum(record["errors"].values()) for record in failed)
    trained = {g["group_id"] for r in receipts(output_dir) for g in r["trained"]}
    assert trained and not trained & {record["group_id"] for record in lost}
    code, table = audit(output_dir)
    assert code == 0, table


TUTOR = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
    "environment.max_turns=3",
    "environment.world._component_=grpo_components.rollout.tutor.Tutor",
    "rewards.correctness.answer_format=plain",
    "generator.stop_token_ids=[0,2,220]",
    "generator.max_response_tokens=64",
)


@pytest.mark.slow
def test_several_turns_with_a_learned_reward_and_one_of_the_users_own(tune, tmp_path):
    """And their replay. The user's reward is the one in docs/rewards.md, as printed.

    With a reference, whose logprobs of what the tutor said are nobody's.
    """
    (source,) = re.findall(r"```python\n(# my_rewards.py\n.*?)```", REWARDS.read_text(), re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(source)
    knobs = (
        *(*SHORT, "num_steps=3", *TUTOR, "loss.kl_coeff=0.01", "rollouts_logged_per_step=4"),
        "rewards.brevity._component_=my_rewards.Brevity",
        "rewards.brevity.max_words=4",
        "rewards.brevity.weight=0.1",
        f"reward_model.path={random_classifier(tmp_path / 'classifier')}",
        "reward_model.weight=0.5",
        "dynamic_sampling.enabled=true",  # of groups that have no two scores alike, none is dropped
    )
    _, output_dir = succeed(tune, *knobs)
    groups = records(output_dir / "logs" / "rollouts.jsonl")
    assert len(groups) == 3 * 4
    responses = [response for group in groups for response in group["responses"]]
    turns = [[turn["by"] for turn in response.get("turns", [])] for response in responses]
    assert ["policy", "environment"] * 2 + ["policy"] in turns
    assert {response["finish_reason"] for response in responses} >= {"stop", "length"}
    terms = [response["reward_terms"] for response in responses]
    weights = {"correctness": 1.0, "brevity": 0.1, "reward_model": 0.5}
    assert all(t.keys() - {"wrong_lines"} == weights.keys() for t in terms)
    assert any(t.get("wrong_lines", 0) < 0 for t in terms)
    assert any(t["correctness"] == 1 for t in terms)
    for response, own in zip(responses, terms, strict=True):
        total = sum(weights.get(name, 1.0) * term for name, term in own.items())
        assert response["reward"] == pytest.approx(total)
    steps = metrics(output_dir)[1:]
    # In the first step the policy is the base: a token in the wrong place would show here.
    assert steps[0]["loss/kl_reference"] == pytest.approx(0, abs=1e-6)
    # Later, one token of 170 that became 30 times less likely is 0.2 alone.
    assert all(0 <= record["loss/kl_reference"] < 1 for record in steps)
    # The first step's weights are the generator's: turn for turn, the two read the same context.
    assert abs(steps[0]["mismatch/generator_kl"]) < 1e-6
    assert all(record["groups"]["filtered"]["count"] == 0 for record in receipts(output_dir))
    code, table = audit(output_dir)
    assert code == 0, table
    _, replay = succeed(tune, *knobs, f"replay_events={output_dir}")
    assert_same_run(output_dir, replay, num_steps=3)


TOOLS = """
import json

from grpo_components.rewards.code_tests import CodeTests
from grpo_components.rollout.tools import shipped_tools


class Calls:
    \"\"\"The policy's first line, such as 3+4=8, becomes a call of the Python tool.\"\"\"

    def __init__(self):
        self._tools = shipped_tools(tools=["python"], call_format="hermes")

    def __call__(self, prompt, seed):
        respond, turns = self._tools(prompt, seed), []

        def called(text):
            turns.append(text)
            if len(turns) > 1:
                return respond(text)
            arguments = {"code": f"print({text.partition('=')[0]})"}
            call = json.dumps({"name": "python", "arguments": arguments})
            return respond(f"<tool_call>{call}</tool_call>")

        return called


class Printed:
    \"\"\"1 if a program that prints the response passes the test that wants the answer.\"\"\"

    def __init__(self):
        self._tests = CodeTests()

    def __call__(self, *, response_text, answer, **sample):
        program = f"```python\\nprint({response_text!r})\\n```"
        tests = json.dumps({"stdin_stdout": [{"input": "", "output": answer}]})
        return self._tests(response_text=program, answer=tests, **sample)
"""


@pytest.mark.slow
def test_a_tool_and_a_reward_that_run_programs_in_the_sandbox(tune, tmp_path):
    (tmp_path / "my_tools.py").write_text(TOOLS)
    _, output_dir = succeed(
        tune,
        *(*SHORT, *TUTOR, "environment.world._component_=my_tools.Calls", "num_steps=3"),
        *("generator.max_response_tokens=120", "rollouts_logged_per_step=4"),
        *("rewards.printed._component_=my_tools.Printed", "rewards.printed.weight=0.5"),
    )
    groups = records(output_dir / "logs" / "rollouts.jsonl")
    said = [(group["answer"], each) for group in groups for each in group["responses"]]
    assert len(said) == 3 * 4 * 4 and all(response["error"] is None for _, response in said)
    worked_out = 0
    for answer, response in said:
        _, result, last = (turn["text"] for turn in response["turns"])
        told = re.search(r"<tool_response>\n(.*)\n</tool_response>", result, re.DOTALL)[1]
        worked_out += told == answer
        assert response["reward_terms"]["printed"] == (last.rstrip() == answer)
    assert worked_out > len(said) / 2, "the tiny policy mostly knows what to add up"
    code, table = audit(output_dir)
    assert code == 0, table


def receipts(output_dir):
    """The records of its steps."""
    return [r for r in records(output_dir / "receipts.jsonl") if r["record"] == "step"]


def wait_for_step(process, step=2):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(rf"step +{step}/", line):
            return
    raise AssertionError("the run ended early:\n" + "".join(lines))


@pytest.mark.slow
def test_an_interrupted_run_ends_and_leaves_nothing(tune):
    process, output_dir = tune("num_steps=1000")
    wait_for_step(process)
    (output_dir.parent / "link").symlink_to(output_dir)
    refused = finish(tune("output_dir=link/")[0])  # while the first run goes on
    in_use = f"output_dir: {output_dir} is in use by pid {process.pid} on "
    assert refused[0] == 2 and refused[1].startswith(f"config error: {in_use}"), refused
    process.send_signal(signal.SIGINT)
    returncode, output = finish(process)
    assert returncode == 130, output
    assert not (output_dir / "run.lock").exists() and not output_dir.with_name("run0-1").exists()
    assert "Traceback" not in output
    assert f"report: {output_dir / 'report.html'}" in output


@pytest.mark.slow
def test_a_dead_role_ends_a_run_without_restarts_with_its_name(tune):
    role = "generator_0"
    process, output_dir = tune("num_steps=1000", "max_restarts=0")
    wait_for_step(process)
    roles = records(output_dir / "logs" / "roles.jsonl")
    os.kill(next(r["pid"] for r in roles if r["role"] == role), signal.SIGKILL)
    returncode, output = finish(process)
    assert returncode == 1, output
    assert f"error: {role} died" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_an_error_inside_a_role_is_the_runs_error(tune, tmp_path):
    """A reward whose module breaks in the reward process, found through the user's own file."""
    (tmp_path / "my_rewards.py").write_text(
        "class Broken:\n"
        "    def __init__(self):\n"
        "        import os\n"
        "        if 'RAY_RAYLET_PID' in os.environ:\n"
        "            raise RuntimeError('no licence key')\n"
        "    def __call__(self, *, prompt_text, response_text, answer, finish_reason):\n"
        "        return 0.0\n"
    )
    process, _ = tune(
        "rewards.correctness._component_=my_rewards.Broken", "~rewards.correctness.answer_format"
    )
    returncode, output = finish(process)
    assert returncode == 1, output
    assert "error: generator_0 failed" in output
    assert "no licence key; failed the same way again after a restart" in output
