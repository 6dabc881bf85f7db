"""Measure the two backends of an engine on the same requests: vLLM and transformers.

    python benchmarks/backends.py                # --batches, --repeats, --half-billion

A batch is 64 samples in flight: 8 prompts of the demo, 8 samples each, at most 16 tokens, without
rewards. Each backend runs in a process of its own, in turns, on one thread. CPU seconds are those
of the process. `--half-billion` measures, instead of the demo's policy, random weights of Qwen2.5
0.5B's shape in float32, with 64 tokens for each response.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import in_child, machine_line, markdown_table
from weights_path import SHAPES, write_model

from grpo_components.examples.tiny_policy import DEFAULT_OUTPUT_DIR, build_tiny_policy


def measure(backend: str, path: str, response: int, batches: int) -> tuple[float, float]:
    """Return the mean CPU and wall seconds that one backend takes for a batch of 64 samples."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from grpo_components.quiet import engine_environment

    os.environ.update(engine_environment("cpu", "ERROR"))
    from grpo_components.rollout.engine import open_engine
    from grpo_components.rollout.generator_options import EngineOptions
    from grpo_components.settings import GeneratorSettings

    settings = GeneratorSettings.model_validate(
        {
            "backend": backend,
            "max_response_tokens": response,
            "temperature": 1.0,
            "max_model_len": 128,
            "max_num_seqs": 64,
            "kv_cache_gib": 1.0,
        }
    )
    options = EngineOptions(
        model_path=path, device="cpu", dtype="fp32", recompute_kv_after_pull=False
    )
    engine = open_engine(settings, options, seed=0)

    def batch(number: int) -> None:
        asked = [
            engine.submit(
                [(7 * prompt + i) % 200 + 40 for i in range(14)],
                max_tokens=response,
                temperature=1.0,
                seed=64 * number + 8 * prompt + sample,
                stop_token_ids=[0],
            )
            for prompt in range(8)
            for sample in range(8)
        ]
        for future in asked:
            future.result()

    batch(0)
    cpu, wall = time.process_time(), time.perf_counter()
    for number in range(1, batches + 1):
        batch(number)
    found = (time.process_time() - cpu) / batches, (time.perf_counter() - wall) / batches
    engine.close()
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--half-billion", action="store_true")
    args = parser.parse_args()
    build_tiny_policy(DEFAULT_OUTPUT_DIR)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [("the demo's policy", str(DEFAULT_OUTPUT_DIR), 16, args.batches)]
        if args.half_billion:
            in_child(write_model, Path(folder), SHAPES["500M"])
            cases = [("0.5B, random", folder, 64, 1)]
        for model, path, response, batches in cases:
            found: dict[str, list[tuple[float, float]]] = {"vllm": [], "transformers": []}
            for _ in range(args.repeats):
                for backend, times in found.items():
                    times.append(in_child(measure, backend, path, response, batches))
            median = {
                backend: [statistics.median(each[i] for each in times) for i in (0, 1)]
                for backend, times in found.items()
            }
            for backend, (cpu, wall) in median.items():
                rows.append([model, backend, cpu, wall, median["vllm"][0] / cpu])
    head = ["model", "backend", "CPU s", "wall s", "vLLM's CPU / its own"]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, rows)}\n")


if __name__ == "__main__":
    main()
