"""Runs an object in a process of its own, for tests of roles without Ray."""

import asyncio
import contextlib
import importlib
import inspect
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch

from grpo_components.quiet import engine_environment, quiet_libraries

_ENVIRONMENT = {  # as the cluster sets it; OpenMP and vLLM read it at import
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    **engine_environment("cpu", "WARNING"),
}
_CLOSE_TIMEOUT_S = 30.0
"""Seconds that a process has to end before it is killed."""


class RoleProcess:
    """An object in another process, forked from a server that has imported some modules."""

    def __init__(
        self, role_class: str, *, preload: Sequence[str] = (), cpu_threads: int = 1, **kwargs: Any
    ) -> None:
        self._name = role_class.rpartition(".")[2]
        # Python starts the server with the first process, and then keeps it: importing torch and
        # vLLM takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([role_class.rpartition(".")[0], *preload])
        self._connection, child_end = context.Pipe()
        given = (child_end, role_class, cpu_threads, kwargs)
        self._process = context.Process(target=_serve, args=given, name=self._name)
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            self._process.start()
        child_end.close()

    def submit(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def result(self) -> Any:
        try:
            value, error = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process died") from None
        if error is not None:
            raise error
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.submit(method, *args)
        return self.result()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process is dead
            self._connection.send(None)
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    connection: Connection, role_class: str, cpu_threads: int, kwargs: dict[str, Any]
) -> None:
    """Build the object, then answer calls until None arrives; runs in the forked process."""
    os.environ.update(_ENVIRONMENT)  # the server may have been started for other processes
    quiet_libraries("WARNING")
    torch.set_num_threads(cpu_threads)
    role: Any = None
    with tempfile.TemporaryFile() as log, contextlib.suppress(EOFError):
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        for method, args in _calls(connection):
            try:
                role = role or imported(role_class)(**kwargs)
                value = getattr(role, method)(*args)
                answer = asyncio.run(value) if inspect.iscoroutine(value) else value, None
            except Exception as error:  # raised again by the caller
                error.add_note(traceback.format_exc())
                answer = None, error
            connection.send(answer)
    if hasattr(role, "close"):
        role.close()


def _calls(connection: Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    while (call := connection.recv()) is not None:
        yield call


def imported(dotted_path: str) -> Any:
    module, _, name = dotted_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
