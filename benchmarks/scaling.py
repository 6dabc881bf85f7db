"""Measure what a trained sample costs as the work grows: groups, prompts, generators.

    python benchmarks/scaling.py

The demo's job in turns, each case with as many samples: groups per step x 1, 2, 4, 8 from 4;
prompts x 1, 4, 16, with words before the question; generators 1, 2, 4, which share this machine's
cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from async_speedup import RECIPE, TUNE, steps_of
from measuring import machine_line, markdown_table

POLICY = Path(tempfile.gettempdir(), "torchtune-async-grpo/tiny_policy")
GROUP_SIZE, GROUPS = 8, 8
MAX_TOKENS = 1024
"""Longest prompt and response together, in the copy of the tiny policy."""
PROMPT_TOKENS = 21.7
"""Mean length of the demo's prompts."""


def _longer(times: int) -> str:
    """The key that makes prompts longer; `Question:` and the new line are two tokens."""
    words = "Question:\n" * round(PROMPT_TOKENS * (times - 1) / 2)
    template = words + "Question: {question}\nAnswer:\n"
    return f"dataset.prompt_template={json.dumps(template)}"


CASES: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "groups per step": {
        str(groups): (groups, (f"groups_per_step={groups}",)) for groups in (4, 8, 16, 32)
    },
    "prompt length": {f"x {times}": (GROUPS, (_longer(times),)) for times in (1, 4, 16)},
    "generators": {str(count): (GROUPS, (f"num_generators={count}",)) for count in (1, 2, 4)},
}
"""For each kind and case: groups per step, and keys of the config."""


def long_policy(folder: Path) -> Path:
    """Copy the tiny policy, for sequences of `MAX_TOKENS`."""
    policy = Path(shutil.copytree(POLICY, folder / "policy"))
    config = json.loads((policy / "config.json").read_text())
    config["max_position_embeddings"] = MAX_TOKENS
    (policy / "config.json").write_text(json.dumps(config))
    return policy


def ms_per_sample(folder: Path, policy: Path, samples: int, groups: int, keys: list[str]) -> float:
    """Run one case; return wall milliseconds per trained sample, without its first fifth."""
    steps = samples // (groups * GROUP_SIZE)
    command = [TUNE, "run", RECIPE, "--config", "tiny_async_grpo", f"output_dir={folder}"]
    limits = [f"base_model_path={policy}", f"model.max_seq_len={MAX_TOKENS}"]
    limits += [f"dataset.max_prompt_tokens={MAX_TOKENS - 64}", "eval_dataset.num_rows=8"]
    ends = [f"num_steps={steps}", f"eval_every_n_steps={steps}", f"save_every_n_steps={steps}"]
    done = subprocess.run(
        [*map(str, command), *limits, *ends, *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout)
    timed = list(steps_of(folder))[max(1, steps // 5) :]
    return 1000 * statistics.fmean(step["time/step"] for step in timed) / (groups * GROUP_SIZE)


def plot(kind: str, medians: dict[str, float]) -> str:
    """A Mermaid chart of a kind's cases, as Markdown shows it."""
    names = ", ".join(f'"{name}"' for name in medians)
    values = ", ".join(f"{value:.2f}" for value in medians.values())
    lines = ["```mermaid", "xychart-beta", f'    title "ms per trained sample, by {kind}"']
    lines += [f"    x-axis [{names}]", f"    y-axis 0 --> {1.2 * max(medians.values()):.1f}"]
    return "\n".join([*lines, f"    bar [{values}]", "```"])


def table(measured: dict[tuple[str, str], list[float]]) -> str:
    """Table of all cases, each beside the first of its kind, and a chart of each kind."""
    rows, plots = [], []
    for kind, cases in CASES.items():
        medians = {name: statistics.median(measured[kind, name]) for name in cases}
        first = next(iter(medians.values()))
        for name, median in medians.items():
            low, high = min(measured[kind, name]), max(measured[kind, name])
            spread = f"{median:.2f} ({low:.2f}..{high:.2f})"
            rows.append([f"{kind}: {name}", spread, f"{median / first:.2f}"])
        plots.append(plot(kind, medians))
    head = ["case", "ms per trained sample", "beside the first"]
    return "\n\n".join([markdown_table(head, rows), *plots])


def main() -> None:
    """Run all cases in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    parser.add_argument("--samples", type=int, default=2560, help="trained samples of each run")
    given = parser.parse_args()
    largest = max(groups for cases in CASES.values() for groups, _ in cases.values())
    if given.samples < 5 * largest * GROUP_SIZE or given.repeats < 1:
        parser.error(f"--samples must be at least {5 * largest * GROUP_SIZE}, --repeats 1")
    measured: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = long_policy(Path(folder))
        for repeat in range(given.repeats):
            for kind, cases in CASES.items():
                for number, (name, (groups, keys)) in enumerate(cases.items()):
                    place = Path(folder, f"{kind} {number} {repeat}".replace(" ", "_"))
                    ms = ms_per_sample(place, policy, given.samples, groups, list(keys))
                    measured.setdefault((kind, name), []).append(ms)
    sys.stdout.write(f"{machine_line()}\n\n{table(measured)}\n")


if __name__ == "__main__":
    main()
