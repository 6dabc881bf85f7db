"""Tells what this process may use of its machine, on any system."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """Return how many CPUs this process may run on; where the system cannot tell (macOS), all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
