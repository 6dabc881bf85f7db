"""Measures `grpo diagnose`: does it name what is wrong with ill runs, and nothing in clean ones?

    nice -n 5 python benchmarks/diagnose_runs.py FOLDER [NAME ...]

Makes each run that FOLDER lacks (the tiny policy, half a minute each), and looks at all of them.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE, DATA = Path(__file__).parent, Path("/tmp/torchtune-async-grpo/tiny_policy/data")
REWARD, LOSS = "rewards.correctness._component_=diagnose_runs.", "loss._component_="
LOSSES = f"{LOSS}grpo_components.objective.losses."


class Reward:
    """A reward with a fault; the trial before a run calls it with the bare answer, and passes."""

    def __init__(self, fault: str = "", answer_format: str = "") -> None:
        self._fault = fault

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response."""
        found, bare = response_text.strip(), response_text.strip() == answer
        if self._fault == "constant":
            return 1.0
        if self._fault == "long":
            return 1.0 if bare else len(found) / 100
        if self._fault == "even":
            return float(bare or found[-1:] in set("02468"))
        if self._fault == "exact":
            return float(bare)
        if self._fault == "raises" and not bare and random.random() < 0.3:
            raise ValueError("no answer in the response")
        if self._fault == "slow" or (self._fault == "slow for long" and len(found) > 11):
            time.sleep(0.1 if self._fault == "slow" else 0.3)
        return float(bare or found.endswith(f"#### {answer}"))


class Loss:
    """REINFORCE with a fault."""

    needs_entropy = True

    def __init__(self, fault: str, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        self._fault, self._calls = fault, 0

    def __call__(self, tokens):
        """Return the losses and metrics of the tokens."""
        self._calls += 1
        ratio = (tokens.trainer_logprobs - tokens.generator_logprobs).detach().exp()
        losses = -ratio * tokens.advantages * tokens.trainer_logprobs
        if self._fault == "entropy":
            losses = losses + 10 * tokens.entropy  # the sign of the bonus is wrong
        if self._fault == "nan" and self._calls > 8 and self._calls % 3 == 0:
            losses = losses * float("nan")
        return losses, {"ratio/mean": ratio, "ratio/max": ratio}


def other_questions(folder: Path) -> Path:
    """Write held-out questions with numbers that the policy has never seen."""
    pairs = [(i % 80 + 13, i % 70 + 17) for i in range(204)]
    text = "Mia buys {} eggs and finds {}. How many now?"
    rows = [
        {"question": text.format(a, b), "answer": f"{a}+{b}={a + b}\n#### {a + b}"}
        for a, b in pairs
    ]
    path = folder / "other.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(path: Path, change) -> None:
    """Rewrite a file of JSON lines; `change` gets the number and the record of a line."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [change(number, record) for number, record in enumerate(records)]
    path.write_text("".join(json.dumps(record) + "\n" for record in found if record))


def drift(run: Path) -> None:
    """Let the logprobs of fresh tokens drift apart from step to step."""
    key = "mismatch/fresh_kl"
    changed(run / "logs/metrics.jsonl", lambda n, each: each | {key: 1e-7 * 1.15**n})


def leak(run: Path) -> None:
    """Let the generator grow by 0.3 GiB between two heartbeats."""
    beat = {"role": "generator_0", "attempt": 0, "seconds": {"sampling": 1.0}}
    beats = [beat | {"time": 5.0 * n, "rss_mib": 500 + 300 * n} for n in range(12)]
    (run / "logs/heartbeats.jsonl").write_text("".join(json.dumps(b) + "\n" for b in beats))


def small_disk(run: Path) -> None:
    """Let the run go on, and keep more checkpoints than any disk has room for."""
    config = (run / "config.yaml").read_text().replace("keep_last_n: 2", "keep_last_n: null")
    (run / "config.yaml").write_text(
        config.replace("save_every_n_steps: 125", "save_every_n_steps: 1")
    )

    def longer(_, event):
        return event["event"] != "end" and event | {"num_steps": 10**9}

    changed(run / "receipts.jsonl", longer)


def ill(folder: Path) -> dict:
    """Return name -> (what must be named first, overrides or a change of a clean run's files)."""
    exact = (f"{REWARD}Reward", "rewards.correctness.fault=exact")
    fault = "rewards.correctness.fault="
    return {
        "cut off": ("responses are cut off", "generator.max_response_tokens=6"),
        "too easy": ("the reward is flat", f"{REWARD}Reward", f"{fault}constant"),
        "too hard": ("the reward is flat", *exact),
        "learning rate": ("the policy runs away", "optimizer.lr=1e-2"),
        "reward raises": ("samples fail", f"{REWARD}Reward", f"{fault}raises"),
        "few held out": ("the evaluation is too small", "eval_dataset.num_rows=12"),
        "slow reward": ("rewards are slow", f"{REWARD}Reward", f"{fault}slow", "num_steps=20"),
        "small steps": ("weights move too often", "groups_per_step=1", "group_size=2"),
        "format only": (
            *("the format is learned", *exact, "rewards.even.weight=1.0", "optimizer.lr=2e-4"),
            *("rewards.even._component_=diagnose_runs.Reward", "rewards.even.fault=even"),
        ),
        "entropy": ("entropy collapses", f"{LOSS}diagnose_runs.Loss", "loss.fault=entropy", "optimizer.lr=3e-4"),
        "pays for length": (
            *("length grows", f"{REWARD}Reward", f"{fault}long", "optimizer.lr=1e-3"),
            *("generator.max_response_tokens=64", "num_steps=60"),
        ),
        "other held out": (
            *("the reward rises, held-out does not", "num_steps=60"),
            f"eval_dataset.source={other_questions(folder)}",
        ),
        "nan": ("gradients are skipped", f"{LOSS}diagnose_runs.Loss", "loss.fault=nan"),
        "top k": (
            *("generator and trainer disagree", "generator.top_k=2", "max_generator_kl=null"),
            "generator.allow_biased_sampling=true",
        ),
        "slow for long": (
            *(
                "long responses are dropped",
                f"{REWARD}Reward",
                "rewards.correctness.fault='slow for long'",
            ),
            *("max_staleness=1", "push_every_n_steps=1", "groups_per_step=4"),
        ),
        "epochs": (
            "clipping is far above usual",
            "ppo_epochs=8",
            "optimizer.lr=4e-4",
            "num_steps=20",
        ),
        "slow training": ("generators idle", "ppo_epochs=16", "optimizer.lr=2e-6", "num_steps=20"),
        "no learning rate": ("the policy does not move", "optimizer.lr=1e-12"),
        "drift": ("generator and trainer drift", drift),
        "leak": ("memory will not last", leak),
        "disk": ("the disk will not last", small_disk),
    }


def clean() -> dict:
    """Return name -> overrides."""
    sync = ("max_staleness=0", "pull_every_m_rollouts=1")
    mean = "aggregation=grpo_components.objective.aggregation.SequenceMean"
    return {
        "default": ("num_steps=60",),
        "seed 1": ("seed=1",),
        "seed 2": ("seed=2", "num_steps=20"),
        "short": ("seed=3", "num_steps=15"),
        "groups of 4": ("group_size=4", "groups_per_step=16"),
        "groups of 16": ("group_size=16", "groups_per_step=4"),
        "synchronous": sync,
        "staleness 4": ("max_staleness=4", "seed=4"),
        "wait": ("stale_groups=wait", "max_staleness=1"),
        "colocate": (*sync, "colocate=true"),
        "two updates": ("updates_per_batch=2",),
        "two epochs": ("ppo_epochs=2",),
        "gspo": (f"{LOSSES}GSPOLoss", "loss.clip_low=0.05", "loss.clip_high=0.05", mean),
        "cispo": (f"{LOSSES}CISPOLoss", "loss.clip_low=1.0", "loss.clip_high=4.0"),
        "decoupled": (f"{LOSSES}DecoupledPPOLoss", "loss.max_weight=5.0", "updates_per_batch=2"),
        "reference": ("loss.kl_coeff=0.01",),
        "lora": ("--config=tiny_lora_async_grpo",),
        "2x2": ("--config=tiny_async_grpo_2x2", "num_steps=20"),
        "dynamic sampling": ("dynamic_sampling.enabled=true",),
        "push 2": ("push_every_n_steps=2", "pull_every_m_rollouts=8"),
        "lr 3e-4": ("optimizer.lr=3e-4",),
        "vllm": ("generator.backend=vllm",),
    }


def make(run: Path, overrides) -> None:
    """Make a run unless it is there."""
    if run.exists():
        return
    config = [each.split("=")[1] for each in overrides if each.startswith("--")]
    given = {"generator.backend": "transformers", "num_steps": "40", "output_dir": str(run)}
    given |= dict(each.split("=", 1) for each in overrides if "=" in each and each[0] != "-")
    command = ["tune", "run", "async_grpo_full_finetune_distributed", "--config"]
    command += [*(config or ["tiny_async_grpo"]), *(f"{key}={given[key]}" for key in given)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    run.mkdir(exist_ok=True)
    (run / "output.txt").write_text(done.stdout + done.stderr)


def look(run: Path) -> list[str]:
    """Return the lines of a diagnosis."""
    command = [sys.executable, "-m", "grpo_tools", "diagnose", str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()


def main() -> None:
    """Make all runs, and print a row for each."""
    folder, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    wells = {name: ("nothing looks wrong", *overrides) for name, overrides in clean().items()}
    cases, right = ill(folder), {"ill": 0, "clean": 0}
    for kind, group in (("ill", cases), ("clean", wells)):
        for name, (expected, *how) in group.items():
            run = folder / f"{kind} {name}".replace(" ", "_")
            if names and name not in names:
                continue
            if callable(how[0]):
                source = folder / "clean_default"
                make(source, wells["default"][1:])
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(source, run, symlinks=True)
                how[0](run)
            else:
                make(run, how)
            lines = look(run)
            is_right = lines[0].startswith(expected)
            right[kind] += is_right
            mark = "right" if is_right else "WRONG"
            sys.stdout.write(f"{kind} | {name} | {mark} | {len(lines)} | {lines[0]}\n")
            sys.stdout.flush()
    sys.stdout.write(f"right: {right} of {len(cases)} ill and {len(wells)} clean\n")


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    main()
