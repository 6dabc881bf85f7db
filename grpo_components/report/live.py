"""Rewrites the report of a run while the run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from grpo_components.report.page import Live, NoStepsError, write_report

_FIRST_S, _SHORTEST_S = 5.0, 20.0
"""Pause before the first page, and shortest pause between two pages, in seconds."""
_MAX_SHARE = 0.02
"""Largest share of a CPU core that writing the pages takes."""
_STOP_S = 60.0


class LiveReport:
    """Rewrites a run's `report.html` on a clock, in a thread; the page reloads itself.

    A page takes longer the longer the run is. The pauses grow with that.
    """

    def __init__(
        self, output_dir: Path, note: Callable[[str], None], first_s: float = _FIRST_S
    ) -> None:
        self._output_dir, self._note, self._first_s = output_dir, note, first_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to write pages, unless started already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_pages, name="report", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write no more pages; return once the page that is being written is finished."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                self._note(f"the live report is still being written after {_STOP_S:g} s")

    def _write_pages(self) -> None:
        pause_s, next_s, failed = self._first_s, _SHORTEST_S, False
        while not self._ended.wait(pause_s):
            began = time.thread_time()
            try:
                write_report(self._output_dir, live=Live(next_s))
            except NoStepsError:
                continue
            except Exception as error:  # a failed report must not change how the run goes on
                if not failed:  # e.g. the disk is full: say so once, and try again
                    self._note(f"no live report: {type(error).__name__}: {error}")
                failed = True
            pause_s = next_s = max(_SHORTEST_S, (time.thread_time() - began) / _MAX_SHARE)
