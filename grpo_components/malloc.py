"""Settings of glibc's malloc for this process; without glibc they do nothing."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def limit_arenas(count: int) -> None:
    """Let all threads share arenas; by default there are many, and each keeps what it once used."""
    _call("mallopt", _M_ARENA_MAX, count)


def keep_freed() -> None:
    """Keep freed buffers for the next ones: new pages cost a training step a tenth of its time."""
    limit_arenas(1)
    _call("mallopt", _M_TRIM_THRESHOLD, 2**30)
    _call("mallopt", _M_MMAP_THRESHOLD, 2**25)  # glibc's limit: larger buffers are given back


def give_back_freed() -> None:
    """Return freed memory; else the process stays as large as its longest batches made it."""
    _call("malloc_trim", 0)


def _call(name: str, *numbers: int) -> None:
    getattr(ctypes.CDLL(None), name, lambda *_: None)(*numbers)
