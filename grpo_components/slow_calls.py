"""Says what a start waits for, if it takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_SILENT_S = 5.0
"""Seconds that a wait may take without a word."""


@contextlib.contextmanager
def told_if_slow(what: str, limit_s: float | None = None) -> Iterator[None]:
    """Context manager: say after some seconds what is waited for, and for how long at most."""
    line = f"waiting for {what}" + (f", {limit_s:g} s at most" if limit_s else "")
    timer = threading.Timer(_SILENT_S, logging.getLogger(__name__).warning, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
