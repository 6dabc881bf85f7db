"""Plan a run's memory without GPUs or model: `grpo plan --config NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from grpo_components.config.reading import read_config_file, read_settings
from grpo_components.errors import fail
from grpo_components.plain_text import plain
from grpo_components.settings import Settings, needs_reference
from grpo_tools.memory_plan.plan import plan_run
from grpo_tools.memory_plan.role_memory import GPU_GIB


def longest_prompt(cfg: Settings) -> int:
    """Return the largest `max_prompt_tokens` of the config's data sets."""
    longest = 1
    for key in ("dataset", "eval_dataset"):
        node: Any = getattr(cfg, key) or {"max_prompt_tokens": 1}
        for part in (node.get("parts") or {"": node}).values():
            limit = part.get("max_prompt_tokens") or node.get("max_prompt_tokens")
            if limit is None:
                problem = "not given, and the plan needs the longest prompt"
                fail(f"{key}.max_prompt_tokens", problem, "a number, there or of each part")
            longest = max(longest, limit)
    return longest


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the memory that each role and GPU would need, and what does not fit."""
    parser = argparse.ArgumentParser(
        prog="grpo plan",
        description=__doc__,
        epilog="example: grpo plan --config qwen3B_async_grpo --gpus 8",
    )
    parser.add_argument("--config", required=True, help="name in `tune ls`, or a file")
    parser.add_argument("--gpus", type=int, help="number of GPUs; default: what the config needs")
    parser.add_argument("--gpu-memory", type=float, help="GiB of one GPU; default: 80")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`")
    options = parser.parse_intermixed_args(arguments)
    try:
        cfg = read_settings(read_config_file(options.config, options.overrides))
        if cfg.device != "cuda" and (options.gpus or options.gpu_memory):
            fail("--gpus, --gpu-memory", f"given, with device: {cfg.device}", "none")
        lines, problems = plan_run(
            cfg,
            longest_prompt(cfg),
            needs_reference=any(map(needs_reference, cfg.kl_sections.values())),
            num_gpus=options.gpus,
            gpu_gib=options.gpu_memory or GPU_GIB,
        )
    except ValueError as error:
        sys.stderr.write(f"config error: {plain(str(error))}\n")
        return 2
    lines += [f"does not fit: {problem}" for problem in problems] or ["everything fits"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 2 if problems else 0
