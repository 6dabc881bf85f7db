"""Ends a tensor-parallel worker of vLLM as soon as its engine's process has ended.

vLLM's workers notice the end of the engine only between two calls, and after they have started. A
worker that waits for another one within a step, or loads a model, would stay. So importing this
module, which vLLM does before it builds a worker, starts a thread that waits for the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


class WorkerGuard:
    """Adds nothing to a worker: vLLM imports this module when it mixes this class into its own."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # threads inside of a kernel never see an exit


if multiprocessing.parent_process() is not None:
    threading.Thread(target=_end_with_parent, name="worker-guard", daemon=True).start()
