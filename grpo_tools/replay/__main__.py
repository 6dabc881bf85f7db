"""Repeat a finished run in the recorded order of its events, and compare every batch with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components._tune_run import RECIPE
from grpo_components._tune_run import main as tune
from grpo_components.plain_text import one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `grpo replay OUTPUT_DIR output_dir=NEW_DIR [key=value ...]`, as `tune run` would."""
    parser = argparse.ArgumentParser(
        prog="grpo replay",
        description=__doc__,
        epilog="example: grpo replay /tmp/first output_dir=/tmp/again",
    )
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="of the finished run")
    parser.add_argument(
        "overrides", nargs="+", metavar="key=value", help="output_dir of the replay, and other keys"
    )
    options = parser.parse_args(arguments)
    config = options.output_dir / "config.yaml"
    if not config.is_file():
        sys.stderr.write(f"no replay: {one_line(str(config))} is missing\n")
        return 2
    if not any(each.startswith("output_dir=") for each in options.overrides):
        parser.error("output_dir=... is missing: the folder of the replay")
    replayed = f"replay_events={options.output_dir}"
    sys.argv = ["tune", "run", RECIPE, "--config", str(config), replayed, *options.overrides]
    tune()
    return 0
