"""Measures `grpo diagnose`: does it name what is wrong with ill runs, and nothing in clean ones?

    nice -n 5 python benchmarks/diagnose_runs.py FOLDER [NAME ...]

Makes each run that FOLDER lacks (of the tiny policy, about a minute each), and diagnoses them all.
With NAMEs, it takes only runs whose names begin with one of them, such as ill. Some ill runs are
edited copies of clean_default.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from diagnose_faults import edited

HERE = Path(__file__).parent
ILL = """
cut off          | responses are cut off | generator.max_response_tokens=6
too easy         | the reward is flat | {reward}=constant
too hard         | the reward is flat | {reward}=exact
learning rate    | the policy runs away | optimizer.lr=1e-2
reward raises    | samples fail | {reward}=raises
few held out     | the evaluation is too small | eval_dataset.num_rows=12
slow reward      | rewards are slow | {reward}=slow num_steps=20
small steps      | weights move too often | groups_per_step=1 group_size=2
format only      | the format is learned and the answer is not | {reward}=exact optimizer.lr=2e-4 \
                   rewards.even._component_=diagnose_faults.Reward rewards.even.fault=even
entropy          | entropy collapses | {loss}=entropy optimizer.lr=3e-4
pays for length  | length grows with the reward | {reward}=long optimizer.lr=3e-4 num_steps=60 \
                   generator.max_response_tokens=64
other held out   | the reward rises, held-out does not | eval_dataset.source={other} num_steps=60
nan              | gradients are skipped | {loss}=nan
top k            | generator and trainer disagree | generator.backend=vllm generator.top_k=2 \
                   generator.allow_biased_sampling=true max_generator_kl=null
long dropped     | long responses are dropped | --bug=long_ones_dropped num_steps=20
epochs           | clipping is far above usual | ppo_epochs=8 optimizer.lr=2e-4 num_steps=20 \
                   loss.clip_low=0.05 loss.clip_high=0.05
slow training    | generators idle | ppo_epochs=16 optimizer.lr=2e-6 num_steps=20
no learning rate | the policy does not move | optimizer.lr=1e-12
drift            | generator and trainer drift apart |
leak             | memory will not last |
disk             | the disk will not last |
"""
"""Runs with a fault, one per row: name | finding that must come first | overrides of the config.
Without overrides, `edited` plants the fault in a copy of a clean run."""
CLEAN = """
default          | num_steps=60
seed 1           | seed=1
seed 2           | seed=2 num_steps=20
short            | seed=3 num_steps=15
groups of 4      | group_size=4 groups_per_step=16
groups of 16     | group_size=16 groups_per_step=4
synchronous      | max_staleness=0 pull_every_m_rollouts=1
staleness 4      | max_staleness=4 seed=4
wait             | stale_groups=wait max_staleness=1
colocate         | max_staleness=0 pull_every_m_rollouts=1 colocate=true
two updates      | updates_per_batch=2
two epochs       | ppo_epochs=2
gspo             | {losses}.GSPOLoss loss.clip_low=0.05 loss.clip_high=0.05
cispo            | {losses}.CISPOLoss loss.clip_low=1.0 loss.clip_high=4.0
decoupled        | {losses}.DecoupledPPOLoss loss.max_weight=5.0 updates_per_batch=2
reference        | loss.kl_coeff=0.01
lora             | --config=tiny_lora_async_grpo generator.backend=vllm
2x2              | --config=tiny_async_grpo_2x2 num_steps=20
dynamic sampling | dynamic_sampling.enabled=true
push 2           | push_every_n_steps=2 pull_every_m_rollouts=8
lr 3e-4          | optimizer.lr=3e-4
vllm             | generator.backend=vllm
"""
WORDS = {
    "reward": "rewards.correctness._component_=diagnose_faults.Reward rewards.correctness.fault",
    "loss": "loss._component_=diagnose_faults.Loss loss.fault",
    "losses": "loss._component_=grpo_components.objective.losses",
}


def make(run: Path, overrides: list[str]) -> None:
    """Make a run, unless its folder exists."""
    if run.exists():
        return
    config = [each.split("=")[1] for each in overrides if each.startswith("--config=")]
    env = dict(os.environ)
    for bug in (each.split("=")[1] for each in overrides if each.startswith("--bug=")):
        tests = HERE.parent / "tests"  # the museum's, planted into the code
        env |= {"PYTHONPATH": f"{tests / 'planted_bugs/hook'}:{tests}", "GRPO_MUSEUM": bug}
        env |= {"GRPO_MUSEUM_REPORT": f"{run}.planted"}
    given = {"generator.backend": "transformers", "num_steps": "40", "output_dir": str(run)}
    given |= dict(each.split("=", 1) for each in overrides if not each.startswith("--"))
    command = ["tune", "run", "async_grpo_full_finetune_distributed", "--config"]
    command += [*(config or ["tiny_async_grpo"]), *(f"{key}={given[key]}" for key in given)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=env)
    run.mkdir(exist_ok=True)
    (run / "output.txt").write_text(done.stdout + done.stderr)


def look(run: Path) -> list[str]:
    """Run `grpo diagnose` on a run's folder; return the lines of its output."""
    command = [sys.executable, "-m", "grpo_tools", "diagnose", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


def cases(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Map the name of each run's folder to the finding that must come first, and to overrides."""
    words = WORDS | {"other": str(folder / "other.jsonl")}
    clean = CLEAN.strip().replace("|", "| nothing looks wrong |").splitlines()
    found = {}
    for line in [*clean, *ILL.strip().splitlines()]:
        name, first, how = (part.strip() for part in line.split("|"))
        kind = "clean" if line in clean else "ill"
        found[f"{kind} {name}".replace(" ", "_")] = first, shlex.split(how.format(**words))
    return found


def main() -> None:
    """Make all runs, and print a row for each."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    text = "Mia buys {} eggs and finds {}. How many now?"  # numbers that no training prompt has
    pairs = [(i % 80 + 13, i % 70 + 17) for i in range(204)]
    rows = [
        {"question": text.format(a, b), "answer": f"{a}+{b}={a + b}\n#### {a + b}"}
        for a, b in pairs
    ]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {"ill": 0, "clean": 0}
    wanted = tuple(sys.argv[2:]) or ""
    chosen = [each for each in cases(folder).items() if each[0].startswith(wanted)]
    for name, (first, overrides) in chosen:
        kind = name.partition("_")[0]
        if overrides:
            make(folder / name, overrides)
        else:
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(folder / "clean_default", folder / name, symlinks=True)
            edited(name.removeprefix("ill_"), folder / name)
        lines = look(folder / name)
        right[kind] += lines[0].startswith(first)
        mark = "right" if lines[0].startswith(first) else "**wrong**"
        sys.stdout.write(f"| {name.replace('_', ' ')} | {mark} | {len(lines)} | {lines[0]} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"named or clean: {right}\n")


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    main()
