"""Write the report of a run as one HTML page, or compare several runs in one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components.plain_text import one_line
from grpo_tools.report.comparison import write_comparison
from grpo_tools.report.page import write_report
from grpo_tools.report.rollouts import MAX_GROUPS
from grpo_tools.report.run_files import DAMAGED


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and print its path: `grpo report OUTPUT_DIR ...`."""
    parser = argparse.ArgumentParser(
        prog="grpo report",
        description=__doc__,
        epilog="example: grpo report /tmp/run_a /tmp/run_b --output both.html",
    )
    what = "output_dir of a run; of several runs, the page overlays the curves"
    parser.add_argument("output_dirs", type=Path, nargs="+", metavar="OUTPUT_DIR", help=what)
    what = "path of the page (default: report.html in OUTPUT_DIR; comparison.html in the current "
    what += "folder for several runs)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=what)
    what = f"show at most N groups, spread over the run (default {MAX_GROUPS})"
    parser.add_argument("--rollouts", type=int, default=MAX_GROUPS, metavar="N", help=what)
    options = parser.parse_args(arguments)
    folders, target = options.output_dirs, options.output
    try:
        if len(folders) > 1:
            page, lines = write_comparison(folders, target or Path("comparison.html"))
            sys.stdout.writelines(f"{line}\n" for line in lines)
        else:
            page = write_report(folders[0], max(0, options.rollouts), target=target)
    except (OSError, *DAMAGED) as error:
        kind = "" if isinstance(error, OSError) else f"a file is damaged: {type(error).__name__}: "
        sys.stderr.write(f"no report: {kind}{one_line(str(error))}\n")
        return 2
    sys.stdout.write(f"{page} ({page.stat().st_size / 1e6:.1f} MB)\n")
    return 0
