"""Configures vLLM's tensor-parallel worker processes, and kills all of them if one dies."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

WORKER_OPTIONS = {
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "grpo_components.rollout.worker_setup.WorkerSetup",
}
"""vLLM's options: workers are processes on this machine, and end with this process."""
_NOTICE_S = 1.0
"""Seconds until the end of a process is noticed."""
_EXIT_S = 5.0
"""Seconds that a killed process may take to end."""
_NO_LEAKS = "ignore:resource_tracker"
_SHARED = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
"""Prefixes of names of shared memory: of vLLM's queues and, on a CPU, of its reductions."""


@contextlib.contextmanager
def worker_environment(threads: int) -> Iterator[None]:
    """Context manager: set the environment variables with which vLLM's workers must start."""
    variables = {
        # The threads of this process, Ray's among them, do not survive a fork.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM would bind each worker to a NUMA node of its own, and refuses a machine that has too
        # few. Unbound, the kernel moves workers away from the cores of other roles.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # Python's tracker of shared memory removes what killed workers leave; that is no warning.
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _NO_LEAKS])),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    except BaseException:
        remove_names()  # of memory for workers that did not start
        raise
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def remove_names(_worker: Any = None) -> None:
    """Remove the file names of memory shared with the workers, once every process has mapped it.

    The memory is then freed with the last process. Otherwise killed workers would leave it
    behind.
    """
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_SHARED):
            Path(path).unlink(missing_ok=True)  # another worker may be faster


class WorkerProcesses:
    """Waits in a thread for the first worker that dies, and then kills the others.

    Otherwise a worker would wait for a dead one for ever, inside a kernel.
    """

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._processes = processes
        self._dead: BaseProcess | None = None
        self._closing = False
        self._watching = threading.Thread(target=self._watch, name="vllm-workers", daemon=True)
        self._watching.start()

    def failure(self, error: BaseException) -> str:
        """Return how the workers caused an error of the engine; empty if they did not."""
        self._watching.join(_NOTICE_S)  # what the other workers fail with may come first
        if self._dead is None:
            is_late = isinstance(error, TimeoutError)
            return f"its worker processes did not answer in time: {error}" if is_late else ""
        self._dead.join(_NOTICE_S)  # its pipe closes a moment before it can be waited for
        code = self._dead.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"its worker process {self._dead.name} (pid {self._dead.pid}) died, {how}"

    def close(self) -> None:
        """Kill the workers: they have nothing to save, and take seconds to exit by themselves."""
        self._closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_EXIT_S)

    def _watch(self) -> None:
        # Not vLLM's failure callback: it names no worker, and comes once all have ended, after 9 s.
        ended = wait([process.sentinel for process in self._processes])
        if self._closing:
            return
        self._dead = next(each for each in self._processes if each.sentinel in ended)
        for process in self._processes:
            process.kill()
