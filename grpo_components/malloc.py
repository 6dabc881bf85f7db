"""Tunes glibc's malloc for this process; does nothing without glibc."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_arenas(count: int) -> None:
    """Limit malloc's arenas (memory pools of threads), because each one keeps its freed memory."""
    _call("mallopt", _M_ARENA_MAX, count)


def keep_freed() -> None:
    """Keep freed memory for reuse: else a training step spends a tenth of its time on new pages."""
    limit_arenas(1)
    _call("mallopt", _M_TRIM_THRESHOLD, 2**30)
    _call("mallopt", _M_MMAP_THRESHOLD, 2**25)  # glibc's limit: larger buffers are given back


def give_back_freed() -> None:
    """Return freed memory to the system; else the process stays at the size of its peak."""
    _call("malloc_trim", 0)


def _call(name: str, *numbers: int) -> None:
    getattr(ctypes.CDLL(None), name, lambda *_: None)(*numbers)
