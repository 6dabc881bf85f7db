"""Divides a process's wall and CPU time among its activities, such as starting or being idle."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

STARTING, IDLE = "starting", "idle"


class TimeUse:
    """Adds up the seconds of each activity; a process has one activity at a time. Thread-safe."""

    def __init__(self, activity: str) -> None:
        self._lock = threading.RLock()
        self._activity, self._since = activity, time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._cpu_since = time.process_time()
        self._cpu_seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, activity: str) -> float:
        """End the current activity and begin another; return seconds since the last method call."""
        with self._lock:
            now, cpu = time.perf_counter(), time.process_time()
            passed = now - self._since
            self._seconds[self._activity] += passed
            self._cpu_seconds[self._activity] += cpu - self._cpu_since
            self._activity, self._since, self._cpu_since = activity, now, cpu
            return passed

    def totals(self) -> dict[str, dict[str, float]]:
        """Return `seconds` and `cpu_seconds` (of all the process's threads) of each activity."""
        with self._lock:
            self.begin(self._activity)
            return {"seconds": dict(self._seconds), "cpu_seconds": dict(self._cpu_seconds)}
