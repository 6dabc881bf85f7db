"""Finds the line at which another process hangs, even if it holds the interpreter lock."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
from multiprocessing.connection import Pipe
from traceback import FrameSummary, StackSummary

_ANSWER_S = 2.0
"""Seconds that a process gets to write its stack; the signal handler needs no interpreter lock."""
_NEXT_PART_S = 0.1
"""Seconds without another part after which the stack is complete; it is written in one go."""
_MAX_BYTES = 2**16
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def answer_on(descriptor: int) -> None:
    """Let this process write the stack of its main thread on SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=False)


class StuckStack:
    """Asks one child process where its main thread is; the child calls `answer_on`."""

    def __init__(self) -> None:
        self._ours, self._theirs = Pipe(duplex=False)  # closed when they are collected
        self.theirs = self._theirs.fileno()
        """Descriptor for the child, to be passed on and then released here."""

    def release(self) -> None:
        """Close this process's copy of the child's descriptor, once the child has started."""
        self._theirs.close()

    def ask(self, pid: int) -> StackSummary:
        """Return the stack of the child's main thread, outermost call first."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        text, wait_s = b"", _ANSWER_S
        while len(text) < _MAX_BYTES and select.select([self._ours], [], [], wait_s)[0]:
            part = os.read(self._ours.fileno(), _MAX_BYTES)
            if not part:
                break
            text, wait_s = text + part, _NEXT_PART_S
        found = _FRAME.findall(text.decode("utf-8", "replace"))
        frames = [FrameSummary(path, int(line), name) for path, line, name in reversed(found)]
        return StackSummary.from_list(frames)
