"""Say what looks wrong in a run, from the files it leaves: at most ten lines, worst first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components.plain_text import one_line
from grpo_tools.diagnose.evidence import read
from grpo_tools.diagnose.rules import lines_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `grpo diagnose OUTPUT_DIR`; return 2 if the folder is not that of a run."""
    parser = argparse.ArgumentParser(
        prog="grpo diagnose", description=__doc__, epilog="example: grpo diagnose /tmp/run"
    )
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="a run's output_dir")
    folder = parser.parse_args(arguments).output_dir
    try:
        run = read(folder)
    except OSError as error:
        sys.stderr.write(f"no diagnosis: {one_line(str(error))}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in lines_of(run))
    return 0
