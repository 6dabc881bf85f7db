"""Builds a tiny Qwen2.5-shaped policy and its word problems for the CPU demo and the tests."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

FORMAT_VERSION = 4  # increase it when the same seed and steps give a different model or data
DEFAULT_OUTPUT_DIR = Path("/tmp/torchtune-async-grpo/tiny_policy")
DEFAULT_STEPS = 360
LEAST_GREEDY = 0.92  # CPUs round differently, and about one build in four answers fewer problems
RECORD_FILE = "tiny_policy.json"

console = Console(stderr=True)


def build_tiny_policy(
    output_dir: Path, *, seed: int = 0, steps: int = DEFAULT_STEPS, force: bool = False
) -> dict[str, int | float]:
    """Build the policy, its tokenizer and its data in a folder, unless the same build is there.

    Returns:
        The record of the build, which is also written to `tiny_policy.json`.

    Raises:
        ValueError: the folder contains something else, or `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"--steps: {steps} given; allowed: at least 1")
    output_dir = output_dir.absolute()
    record_path = output_dir / RECORD_FILE
    identity = {"format_version": FORMAT_VERSION, "seed": seed, "steps": steps}
    if record_path.is_file():
        record = json.loads(record_path.read_text())
        if not force and identity.items() <= record.items():
            console.print(f"tiny policy is already in {output_dir}", soft_wrap=True)
            return record
    elif output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(
            f"--output-dir: {output_dir} has other files; allowed: a new or empty folder"
        )
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with console.status("loading torch and transformers"):
        from grpo_components.examples.tiny_policy_model import build_into
    # Build in a temporary folder and rename it, so that `output_dir` is always complete.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=".tiny_policy-") as scratch:
        new = Path(scratch) / "new"
        least_greedy = LEAST_GREEDY if steps >= DEFAULT_STEPS else 0.0
        record = identity | build_into(new, seed, steps, least_greedy, console)
        (new / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        if output_dir.exists():
            output_dir.rename(Path(scratch) / "replaced")
        new.rename(output_dir)
    console.print(
        f"tiny policy in {output_dir}: held-out success {record['held_out_success']:.2f} at"
        f" temperature 1, {record['held_out_success_greedy']:.2f} greedy; {record['seconds']} s",
        soft_wrap=True,
    )
    return record


def main(arguments: list[str] | None = None) -> int:
    """Build the tiny policy; returns 0, or 2 for a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_components.examples.tiny_policy",
        description="Build the tiny policy and its word problems for CPU demos and tests.",
    )
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="supervised training steps"
    )
    parser.add_argument(
        "--force", action="store_true", help="build even if the same build is there"
    )
    options = parser.parse_args(arguments)
    try:
        build_tiny_policy(
            options.output_dir, seed=options.seed, steps=options.steps, force=options.force
        )
    except ValueError as error:
        console.print(str(error), soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
