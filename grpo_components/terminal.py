"""Detaches a process from a closed terminal, because writing to it would fail."""

from __future__ import annotations

import os
import stat


def leave_terminal() -> None:
    """Redirect stdin, stdout and stderr to `/dev/null`, unless they are files or pipes."""
    for descriptor in (0, 1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        except OSError:  # it is closed
            continue
        if is_device:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor)
            os.close(null)
