"""Runs a tool server as a child process, and ends it with all it started when the owner ends.

It is run as a file, and imports only the standard library, because the server may use another
Python environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PDEATHSIG = 1


def _die_with_parent(with_signal: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, with_signal)


def main() -> None:
    """Run the command of the arguments, as the leader of its process group."""
    owner = int(sys.argv[1])

    def end(*_: object) -> None:
        os.killpg(os.getpgrp(), signal.SIGKILL)  # this process, too

    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    _die_with_parent(signal.SIGTERM)
    if os.getppid() != owner:
        end()
    command = sys.argv[2:]
    with contextlib.suppress(KeyboardInterrupt):
        server = subprocess.Popen(command, preexec_fn=lambda: _die_with_parent(signal.SIGKILL))
        server.wait()
    end()


if __name__ == "__main__":
    main()
