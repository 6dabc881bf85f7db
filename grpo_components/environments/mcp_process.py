"""Runs a tool server as a child process, and kills the whole process group when the owner ends.

The owner is the process whose `MCPServer` runs this module as a file. The module imports only the
standard library, because the server may use another Python environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from functools import partial

_PDEATHSIG = 1


def _die_with_parent(with_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, with_signal)


def _end(*_: object) -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process, which leads the group, too


if __name__ == "__main__":
    owner, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    _die_with_parent(signal.SIGTERM)
    if os.getppid() == int(owner):
        subprocess.Popen(command, preexec_fn=partial(_die_with_parent, signal.SIGKILL)).wait()
    _end()
