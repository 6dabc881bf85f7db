"""Rewrites the report of a run while it trains; a child process of the driver.

Run as `python -m grpo_tools.report.live OUTPUT_DIR`; it ends when its standard input is closed.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

_FIRST_S, _SHORTEST_S = 5.0, 20.0
"""Pause before the first page, and shortest pause between two pages, in seconds."""
_MAX_SHARE = 0.02
"""Largest share of a CPU core that writing the pages takes."""


def write_pages(output_dir: Path, ends_within: Callable[[float], bool]) -> None:
    """Write a page after each pause, until the run ends; slow pages make the pauses longer."""
    pause_s, next_s, failed = _FIRST_S, _SHORTEST_S, False
    while not ends_within(pause_s):
        from grpo_tools.report.page import write_report  # not in a short run
        from grpo_tools.report.run_files import NoStepsError

        began = time.process_time()
        try:
            write_report(output_dir, next_page_s=next_s)
        except NoStepsError:
            continue
        except Exception as error:  # e.g. the disk is full: say so once, and try again
            if not failed:
                sys.stderr.write(f"no live report: {type(error).__name__}: {error}\n")
            failed = True
        pause_s = next_s = max(_SHORTEST_S, (time.process_time() - began) / _MAX_SHARE)


if __name__ == "__main__":
    os.nice(10)
    write_pages(Path(sys.argv[1]), lambda s: bool(select.select([sys.stdin], [], [], s)[0]))
