"""Spaces the requests of many processes evenly in time, through a file that they share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

_SECONDS_PER_MINUTE = 60.0
_MAX_AHEAD_S = 3600.0
"""A next request that is further ahead than this comes from a clock that was set back."""


class RateLimit:
    """Hands out the times at which requests may begin, at equal distances.

    The file holds the time of the next free request. Processes of one machine, or of all that see
    the file, share the limit.
    """

    def __init__(self, path: Path, per_minute: float) -> None:
        self._path, self._distance_s = path, _SECONDS_PER_MINUTE / per_minute

    def reserve(self, longest_s: float) -> float | None:
        """Take the next free time."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self._path, flags, 0o600), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or its process has ended
            now, free = time.time(), 0.0
            with contextlib.suppress(ValueError):  # empty: the first request
                free = float(file.read())
            begin = now if free - now > _MAX_AHEAD_S else max(now, free)
            if begin - now > longest_s:
                return None
            file.seek(0)
            file.write(f"{begin + self._distance_s:.6f}\n")
            file.truncate()
            return begin - now
