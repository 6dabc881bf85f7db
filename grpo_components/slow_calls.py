"""Logs what the start of a run waits for, if the wait is long."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_SILENT_S = 5.0
"""Seconds of waiting before a line is logged."""


@contextlib.contextmanager
def told_if_slow(what: str, limit_s: float | None = None) -> Iterator[None]:
    """Context manager: if its body takes long, log what it waits for, and the time limit."""
    line = f"waiting for {what}" + (f", {limit_s:g} s at most" if limit_s else "")
    timer = threading.Timer(_SILENT_S, logging.getLogger(__name__).warning, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
