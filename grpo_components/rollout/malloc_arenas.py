"""Limits the arenas of glibc's malloc, from which a process's threads take their memory."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
"""Parameter of glibc's `mallopt`."""


def limit_malloc_arenas(count: int) -> None:
    """Let the threads of this process share arenas; does nothing without glibc.

    By default there are eight for each core, and each keeps what its threads once used.

    Args:
        count: number of arenas, unless there are more already.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, count)
