"""Makes a tensor-parallel worker of vLLM end when its engine's process ends; sets its log level.

vLLM imports this module before it builds a worker. By itself, a worker notices the end of the
engine only after its start, and only between two calls. It would survive if it were loading a
model, or waiting for another worker within a step.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from grpo_components.quiet import quiet_libraries


class WorkerSetup:
    """An empty class: vLLM mixes it into its worker class, and therefore imports this module."""


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)  # threads inside of a kernel never see an exit


if multiprocessing.parent_process() is not None:
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    quiet_libraries(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
