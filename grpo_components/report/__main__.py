"""The report of a run, one page: `python -m grpo_components.report OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components.plain_text import one_line
from grpo_components.report.page import write_report
from grpo_components.report.rollouts import MOST_GROUPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and say where it is.

    Returns:
        The exit code: 0, or 2 where there is nothing to report, or no place for it.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_components.report", description=__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="of the run")
    parser.add_argument(
        "--rollouts",
        type=_count,
        default=MOST_GROUPS,
        metavar="N",
        help=f"groups to show at most, spread over the run (default {MOST_GROUPS})",
    )
    options = parser.parse_args(arguments)
    try:
        page = write_report(options.output_dir, options.rollouts)
    except OSError as error:
        sys.stderr.write(f"no report: {one_line(str(error))}\n")
        return 2
    sys.stdout.write(f"{one_line(str(page))} ({page.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def _count(said: str) -> int:
    if not said.isdecimal():
        raise argparse.ArgumentTypeError(f"{said!r} given; allowed: 0 or more")
    return int(said)


if __name__ == "__main__":
    sys.exit(main())
