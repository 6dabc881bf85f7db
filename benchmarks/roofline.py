"""Compute the least time of a step of the demo: its matrix products at the measured speed.

    python benchmarks/roofline.py [OUTPUT_DIR]

With the folder of a run, its median step stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from async_speedup import WARM_UP_STEPS, steps_of
from measuring import machine_line, markdown_table
from omegaconf import OmegaConf
from torchtune import config

from grpo_components.models.flops import ModelFlops

CONFIG = Path(__file__).parents[1] / "recipes/configs/tiny_async_grpo.yaml"
GROUPS, GROUP_SIZE, PROMPT, RESPONSE = 8, 8, 40, 11
"""The demo's batch: groups, responses of each, and mean tokens of a prompt and of a response."""
TRIES, CALLS = 20, 20


def gemm_speed(rows: int, width: int, hidden: int) -> float:
    """Operations per second of the layers' largest product on one core, the best of some tries."""
    torch.set_num_threads(1)
    left, right = torch.randn(rows, width), torch.randn(width, hidden)
    best = float("inf")
    for _ in range(TRIES):
        began = time.perf_counter()
        for _ in range(CALLS):
            torch.matmul(left, right)
        best = min(best, (time.perf_counter() - began) / CALLS)
    return 2.0 * rows * width * hidden / best


def operations(flops: ModelFlops) -> dict[str, float]:
    """Operations of a step's parts."""
    samples = GROUPS * GROUP_SIZE
    head = flops.per_logprob * samples * RESPONSE
    shared = GROUPS * flops.layers(PROMPT) + samples * flops.layers(RESPONSE, earlier=PROMPT)
    alone = samples * flops.layers(PROMPT + RESPONSE)
    return {
        "training, each prompt once": 3.0 * (shared + head),
        "training, a row per response": 3.0 * (alone + head),
        "sampling, each prompt once": shared + head,
    }


def table(parts: dict[str, float], training: float, sampling: float, step_s: float | None) -> str:
    """Table of operations and of the seconds that they take at least."""
    seconds = {
        name: count / (sampling if name.startswith("sampling") else training)
        for name, count in parts.items()
    }
    rows = [[name, f"{parts[name] / 1e9:.1f}", f"{seconds[name]:.3f}"] for name in parts]
    least = (seconds["training, each prompt once"] + seconds["sampling, each prompt once"]) / 2
    rows.append(["step, over two cores", "", f"{least:.3f}"])
    if step_s is not None:
        rows.append(["step, measured", "", f"{step_s:.3f} ({step_s / least:.1f} times)"])
    return markdown_table(["", "GFLOP", "seconds on one core"], rows)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path, nargs="?", help="folder of a run of the demo")
    given = parser.parse_args()
    sizes: Any = OmegaConf.load(CONFIG).model
    with torch.device("meta"):
        flops = ModelFlops.of(config.instantiate(sizes))
    tokens = GROUPS * (PROMPT + GROUP_SIZE * RESPONSE)
    width, hidden = sizes.embed_dim, sizes.intermediate_dim
    training = gemm_speed(tokens, width, hidden)
    sampling = gemm_speed(GROUPS * GROUP_SIZE, width, hidden)
    step_s = None
    if given.output_dir is not None:
        steps = list(steps_of(given.output_dir))[WARM_UP_STEPS:]
        step_s = statistics.median(step["time/step"] for step in steps)
    text = table(operations(flops), training, sampling, step_s)
    shown = f"{training / 1e9:.0f} and {sampling / 1e9:.0f}"
    sys.stdout.write(f"{machine_line()}; {shown} GFLOP/s a core (training, sampling)\n\n{text}\n")


if __name__ == "__main__":
    main()
