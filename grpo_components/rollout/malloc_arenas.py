"""Limits what glibc's malloc keeps of the memory that a process's threads have freed."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8
"""Parameter of glibc's `mallopt`."""


def limit_malloc_arenas(count: int) -> None:
    """Let the threads of this process share arenas; does nothing without glibc.

    By default there are eight for each core, and each keeps what its threads once used.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, count)


def give_back_freed() -> None:
    """Return freed memory to the system; does nothing without glibc.

    Otherwise the process stays about as large as its longest batches once made it.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
