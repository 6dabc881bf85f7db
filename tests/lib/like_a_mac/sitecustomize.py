"""Hides vLLM and what only Linux has from Python: this folder is first on PYTHONPATH."""

import ctypes
import os
from collections import namedtuple
from pathlib import Path

import psutil

exec(Path(__file__).parents[1].joinpath("without_vllm", "sitecustomize.py").read_text())

_OF_OS = "copy_file_range eventfd memfd_create pidfd_open posix_fadvise posix_fallocate "
_OF_OS += "sched_getaffinity sched_setaffinity splice"
for _name in _OF_OS.split():
    if hasattr(os, _name):
        delattr(os, _name)

_OF_LIBC = {"mallopt", "malloc_trim", "prctl", "setns", "unshare"}
_look_up = ctypes.CDLL.__getattr__


def _portable(library, name):
    if name in _OF_LIBC:
        raise AttributeError(name)
    return _look_up(library, name)


ctypes.CDLL.__getattr__ = _portable

_Memory = namedtuple("_Memory", "rss vms")
_measure = psutil._psplatform.Process.memory_info
psutil._psplatform.Process.memory_info = lambda process: _Memory(*_measure(process)[:2])
