"""Tells whether a process is alive, and waits until a condition holds."""

import contextlib
import time

import psutil


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def until(condition, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not (came := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(came)
