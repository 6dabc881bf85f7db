"""Prepares a tensor-parallel worker of vLLM: it ends with its engine's process, and logs like it.

vLLM imports this module before it builds a worker. By itself, a worker notices the end of the
engine only between two calls, and once it has started: while it waits for another worker within a
step, or loads a model, it would stay.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from grpo_components.quiet import quiet_libraries


class WorkerSetup:
    """Adds nothing to a worker: vLLM imports this module to mix this class into its own."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # threads inside of a kernel never see an exit


if multiprocessing.parent_process() is not None:
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    quiet_libraries(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
