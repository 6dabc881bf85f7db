"""Write the report of a run as one HTML page: `python -m grpo_components.report OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components.plain_text import one_line
from grpo_components.report.page import write_report
from grpo_components.report.rollouts import MAX_GROUPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path.

    Args:
        arguments: command-line arguments; None takes them from `sys.argv`.

    Returns:
        Exit code: 0, or 2 if no step is logged or the page cannot be written.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_components.report", description=__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument(
        "--rollouts",
        type=_count,
        default=MAX_GROUPS,
        metavar="N",
        help=f"show at most N groups, spread over the run (default {MAX_GROUPS})",
    )
    options = parser.parse_args(arguments)
    try:
        page = write_report(options.output_dir, options.rollouts)
    except OSError as error:
        sys.stderr.write(f"no report: {one_line(str(error))}\n")
        return 2
    sys.stdout.write(f"{one_line(str(page))} ({page.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def _count(argument: str) -> int:
    if not argument.isdecimal():
        raise argparse.ArgumentTypeError(f"{argument!r} given; allowed: 0 or more")
    return int(argument)


if __name__ == "__main__":
    sys.exit(main())
