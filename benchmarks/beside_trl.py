"""Compare our samples per second with TRL's GRPOTrainer on three jobs, with both of our backends.

    python benchmarks/beside_trl.py              # --jobs, --seeds, --steps, --trl-environment
    python benchmarks/beside_trl.py --until 0.9  # the demo's steps to a success rate

*demo* is the demo's job; *long* has prompts of 200 tokens and responses of up to 128, by a random
model of 20 M parameters; *ragged* has responses of geometric length with mean 40, cut off at 256.
TRL runs in a virtual environment of its own, made at the first use. It may use all cores, as we
may, and generates by transformers.

Model, prompts, groups, lengths, reward, temperature, steps, AdamW (fused), learning rate, clipping
and loss (the mean over tokens, clipped at 0.2, no KL) are the same, in float32; nothing is
evaluated. What cannot be the same: ours is asynchronous, with a staleness of at most 2; prompts and
samples are drawn in other orders; ours trains micro-batches of 4096 tokens, TRL its whole batch.
Waiting threads of OpenMP sleep on both sides: on a busy machine TRL's are slower when they spin.

The first `WARM_UP` steps are left out. So are the last steps of our runs: while they train, nothing
is left to sample. Our runs and TRL's alternate: with each seed, every side runs once.

`--until` counts training steps until the success rate on held-out prompts reaches the goal. It does
not count seconds, which would include evaluations; use the measured speed to turn steps into
seconds. Both sides answer all held-out prompts once every `EVALUATED` steps, at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from measuring import TRAIN_DEMO, finish, in_child, machine_line, markdown_table, spread

from grpo_components.examples.tiny_policy import DEFAULT_OUTPUT_DIR, build_tiny_policy
from grpo_components.examples.tiny_policy_model import ARCHITECTURE
from grpo_components.examples.word_problems import PROMPT_TEMPLATE

TRL = ("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "math-verify==0.9.0")
PACKAGES = (f"torch=={torch.__version__}", *TRL)
TRL_ENVIRONMENT = Path(tempfile.gettempdir(), "torchtune-async-grpo/trl")
WARM_UP, IN_ADVANCE, GROUP_SIZE = 3, 3, 8
EVALUATED, MOST_STEPS = 5, 200
SPEED = "samples per second"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json")
MATHS = {"_component_": "grpo_components.rewards.maths.MathCorrectness", "answer_format": "gsm8k"}
WORDS = {"_component_": "grpo_components.rewards.formats.ResponseLength", "max_words": 5}
LARGER = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}


@dataclass(frozen=True)
class Job:
    """A job for both trainers. Lengths are in tokens; `response` is the maximum of a response."""

    steps: int
    """Measured steps of each run."""
    groups: int
    response: int
    reward: dict[str, Any]
    learning_rate: float = 1e-8
    """The default is so small that a random model's responses keep their lengths."""
    template: str = "{question}"
    prompt: int = 64
    shape: dict[str, int] | None = None
    """Sizes in which a random model differs from the demo's policy; None: that policy itself."""
    mean_response: int | None = None
    """Mean tokens of a random model's response; None: its end token is as probable as others."""


JOBS = {
    "demo": Job(30, 8, 16, MATHS, 1e-4, PROMPT_TEMPLATE),
    "long": Job(4, 4, 128, WORDS, prompt=200, shape=LARGER),
    "ragged": Job(12, 8, 256, WORDS, prompt=40, shape={}, mean_response=40),
}


def trl_environment(folder: Path) -> Path:
    """Create TRL's virtual environment in a folder if needed; return the path of its Python."""
    python, done = folder / "bin/python", folder / ".done"
    if not done.exists() or done.read_text() != " ".join(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *PACKAGES], check=True)
        done.write_text(" ".join(PACKAGES))
    return python


def build_random_model(job: Job, folder: Path) -> None:
    """Write a random model, the demo's tokenizer, and prompts of digits (one token each)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {**ARCHITECTURE, **(job.shape or {}), "eos_token_id": 0, "pad_token_id": 0}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**sizes))
    if job.mean_response is not None:
        embeddings = model.get_input_embeddings().weight.data  # tied with those of the output
        embeddings[:, 0] = 1.0  # so that the first of all hidden states is about a constant
        tokens = torch.randint(1, 256, (16, 64))
        with torch.no_grad():
            for _ in range(5):
                constant = model.model(tokens).last_hidden_state[..., 0].mean()
                probability = model(tokens).logits.softmax(-1)[..., 0].mean()
                embeddings[0, 0] -= torch.log(probability * job.mean_response) / constant
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(DEFAULT_OUTPUT_DIR / name, folder)
    (folder / "data").mkdir()
    prompts = ("".join(map(str, digits)) for digits in torch.randint(10, (64, job.prompt)).tolist())
    rows = (json.dumps({"question": text, "answer": "#### 0"}) + "\n" for text in prompts)
    (folder / "data/train.jsonl").write_text("".join(rows))


def run_ours(
    backend: str, job: Job, base: Path, folder: Path, seed: int, every: int | None = None
) -> list[dict[str, Any]]:
    """Run a job with one of our backends, evaluated `every` steps; return each step's metrics."""
    sizes, steps = {**ARCHITECTURE, **(job.shape or {})}, WARM_UP + job.steps + IN_ADVANCE
    keys: dict[str, Any] = {
        **{"output_dir": folder, "base_model_path": base, "seed": seed, "num_steps": steps},
        **{"model.embed_dim": sizes["hidden_size"], "model.num_layers": sizes["num_hidden_layers"]},
        **{"model.intermediate_dim": sizes["intermediate_size"], "optimizer.lr": job.learning_rate},
        "dataset.prompt_template": json.dumps(job.template),
        "dataset.max_prompt_tokens": job.prompt,
        **{"eval_every_n_steps": every or steps, "save_every_n_steps": steps},
        **({} if every else {"eval_dataset": "null"}),
        **{"groups_per_step": job.groups, "group_size": GROUP_SIZE},
        **{"generator.backend": backend, "generator.max_response_tokens": job.response},
        **{"generator.stop_token_ids": "[0]", "generator.kv_cache_gib": 1},
        **{f"rewards.correctness.{key}": value for key, value in job.reward.items()},
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    if job.reward is not MATHS:
        given.append("~rewards.correctness.answer_format")
    return run([*TRAIN_DEMO, *given], folder / "logs/metrics.jsonl")[:-IN_ADVANCE]


def run_trl(
    python: Path, job: Job, base: Path, folder: Path, seed: int, every: int | None = None
) -> list[dict[str, Any]]:
    """Run a job with TRL, evaluated `every` steps; return each step's metrics, named as ours."""
    given = {"base": str(base), "steps": WARM_UP + job.steps, "seed": seed, "evaluated": every}
    file, log = folder / "job.json", folder / "steps.jsonl"
    folder.mkdir()
    file.write_text(json.dumps({**vars(job), "group_size": GROUP_SIZE, **given}))
    return run([python, Path(__file__).with_name("trl_job.py"), file, log], log)


def run(command: list[Any], log: Path) -> list[dict[str, Any]]:
    """Run a command and return the JSON lines of its log; exit with its output if it fails."""
    finish(command)
    return [json.loads(line) for line in log.open()]


def measured_of(steps: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """Return speed, length and reward of a run that trained `samples` samples in each step."""
    timed = steps[WARM_UP:]
    seconds = timed[-1]["time/wall_clock"] - steps[WARM_UP - 1]["time/wall_clock"]
    return {
        SPEED: len(timed) * samples / seconds,
        "tokens of a response": fmean(step["rollout/response_tokens_mean"] for step in timed),
        "mean reward": fmean(step["rollout/reward_mean"] for step in timed),
    }


def rows_of(job: str, runs: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return the table's rows of one job; each ratio of speeds is that of two runs of one seed."""
    rows = []
    for side, found in runs.items():
        pairs = [(ours[SPEED], trl[SPEED]) for ours, trl in zip(found, runs["TRL"], strict=True)]
        values = [spread([one[name] for one in found]) for name in found[0]]
        rows.append([job, side, spread([ours / trl for ours, trl in pairs]), *values])
    return rows


def measure(python: Path, job: Job, seeds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Run one job with both of our backends and TRL; return the measured runs of each, by name."""
    base = DEFAULT_OUTPUT_DIR
    if job.shape is not None:
        in_child(build_random_model, job, base := folder / "base")
    sides = {name: partial(run_ours, name) for name in ("transformers", "vllm")}
    sides["TRL"] = partial(run_trl, python)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for seed in range(seeds):
        for side, train in sides.items():
            steps = train(job, base, folder / f"{side}_{seed}", seed)
            runs[side].append(measured_of(steps, job.groups * GROUP_SIZE))
            sys.stderr.write(f"{side}, seed {seed}: {runs[side][-1]}\n")
    return runs


def measure_until(goal: float, python: Path, seeds: int, folder: Path) -> list[list[str]]:
    """Count the demo's steps until held-out success reaches `goal`; return a row for each side."""
    job, rows = replace(JOBS["demo"], steps=MOST_STEPS), []
    for side, train in (
        ("ours", partial(run_ours, "transformers")),
        ("TRL", partial(run_trl, python)),
    ):
        found = []
        for seed in range(seeds):
            steps = train(job, DEFAULT_OUTPUT_DIR, folder / f"{side}_{seed}", seed, EVALUATED)
            evaluated = [
                (s.get("eval/policy_version", s["step"]), s["eval/success_rate"])
                for s in steps
                if "eval/success_rate" in s
            ]
            sys.stderr.write(f"{side}, seed {seed}: {evaluated}\n")
            found.append(
                min((step for step, rate in evaluated if rate >= goal), default=MOST_STEPS)
            )
        rows.append([side, spread(found), str(found)])
    return rows


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seeds", type=int, default=3, help="turns of each job")
    parser.add_argument("--steps", type=int, help="measured steps, instead of each job's own")
    parser.add_argument("--trl-environment", type=Path, default=TRL_ENVIRONMENT, help="folder")
    parser.add_argument("--until", type=float, help="held-out success that ends the count of steps")
    given = parser.parse_args()
    python, rows, head = trl_environment(given.trl_environment), list[list[str]](), ()
    build_tiny_policy(DEFAULT_OUTPUT_DIR)
    if given.until:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_until(given.until, python, given.seeds, Path(folder))
        head = ("side", f"steps to {given.until}", "each seed")
    for name in () if given.until else given.jobs:
        job = replace(JOBS[name], steps=given.steps or JOBS[name].steps)
        with tempfile.TemporaryDirectory() as folder:
            runs = measure(python, job, given.seeds, Path(folder))
        rows += rows_of(name, runs)
        head = ("job", "side", "beside TRL", *runs["TRL"][0])
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, rows)}\n")


if __name__ == "__main__":
    main()
