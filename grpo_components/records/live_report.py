"""Has a child process rewrite the report of a run while the run goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_STOP_S = 60.0


class LiveReport:
    """Rewrites a run's `report.html` on a clock; the page reloads itself.

    The child ends when its standard input is closed, also by the driver's death. What goes wrong
    is in `logs/report.log`, and does not disturb the run.
    """

    def __init__(self, output_dir: Path, note: Callable[[str], None]) -> None:
        self._output_dir, self._note = output_dir, note
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to write pages, unless started already."""
        if self._child is not None:
            return
        command = [sys.executable, "-m", "grpo_tools.report.live", str(self._output_dir)]
        with (self._output_dir / "logs" / "report.log").open("ab") as log:
            self._child = subprocess.Popen(  # Ctrl-C reaches the driver, which stops it
                command, stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )

    def stop(self) -> None:
        """Write no more pages; return once the page that is being written is finished."""
        if self._child is None or self._child.stdin is None:
            return
        self._child.stdin.close()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._note(f"the live report is still being written after {_STOP_S:g} s: it is stopped")
            self._child.kill()
            self._child.wait()
