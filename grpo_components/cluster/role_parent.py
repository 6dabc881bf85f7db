"""The parent of the roles: a process that imports what roles need once, and forks them.

Without it, every role's process imports torch, Ray, torchtune or vLLM anew, which takes most of a
start on few cores. The parent is a program of its own, run as a script: it has one thread and no
state of the driver. Modules are imported when the first role asks for them, with that role's
environment variables; Ray's core, too, as it reads its settings from the environment only once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_LOG = logging.getLogger("role_parent")
_WORKER_MODULES = (
    "ray._private.workers.default_worker",
    "grpo_components.cluster.role_host",
)
"""What the process of every role imports."""
_FIXED = ("RAY_", "OMP_", "MKL_")
"""Variables that libraries read only once: all roles of a parent must have the same values."""
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
"""Keeps pyarrow's allocator and numpy from starting threads when they are imported."""
_REQUEST_S = 10.0
"""Longest wait for a request to arrive whole, in seconds."""


class RoleParent:
    """Starts the parent of the roles, and ends it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        log_file: Path,
        environment: dict[str, str],
        early: Sequence[str] = (),
    ) -> None:
        self.address = str(folder / name)
        with socket.socket(socket.AF_UNIX) as listener, log_file.open("a") as log:
            listener.bind(self.address)
            listener.listen(256)
            self._life, its_end = socket.socketpair()
            with its_end:
                descriptors = (listener.fileno(), its_end.fileno())
                options = json.dumps({"path": sys.path, "early": list(early)})
                # A session of its own, so that Ctrl-C reaches the driver only.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__, *map(str, descriptors), options],
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=descriptors,
                    start_new_session=True,
                )

    @property
    def pid(self) -> int:
        """Pid of the parent's process."""
        return self._process.pid

    def lives(self) -> bool:
        """Return whether the process lives."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the parent, even while it imports; roles that it forked go on."""
        self._process.kill()
        self._process.wait()
        self._life.close()


def _receive(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """Receive a request; add the descriptors for the worker's stdin, stdout and stderr."""
    connection.settimeout(_REQUEST_S)
    header, received, _, _ = socket.recv_fds(connection, 8, 3)
    descriptors += received
    size, body = int.from_bytes(header, "big"), b""
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            raise ConnectionError("the request ends early")
        body += part
    return json.loads(body)


def _fixed(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_FIXED)}


def _prepare(request: dict[str, Any], fixed: dict[str, str]) -> str:
    """Import what a role needs; return why this process cannot fork it, if it cannot."""
    environment = request["env"]
    changed = [n for n, value in _fixed(environment).items() if fixed.get(n, value) != value]
    if changed:
        return f"a worker with another {', '.join(sorted(changed))} was forked before"
    fixed.update(_fixed(environment))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Python keeps the folder that it found first
    os.environ.update(_NO_THREAD)
    if failed := _import((*_WORKER_MODULES, environment.get("GRPO_ROLE_MODULE", ""))):
        return failed
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else [""]
    return f"it has {len(threads)} threads" if len(threads) > 1 else ""


def _import(modules: Iterable[str]) -> str:
    """Import modules; return which failed, and why."""
    gc.disable()  # it takes a fifth of an import's time
    try:
        for module in filter(None, modules):
            try:
                importlib.import_module(module)
            # Whatever it is, the role's own process meets it again, and says so as its error.
            except (Exception, SystemExit) as error:
                return f"the import of {module} failed: {type(error).__name__}: {error}"
    finally:
        gc.freeze()  # children would copy every page that a collection touches
        gc.enable()
    return ""


def _serve(listener: socket.socket, life: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a worker per request until the driver ends."""
    fixed = _fixed(dict(os.environ))
    while True:
        readable, _, _ = select.select([listener, life], [], [])
        if life in readable:
            return None
        connection, _ = listener.accept()
        descriptors: list[int] = []
        try:
            request = _receive(connection, descriptors)
            refused = _prepare(request, fixed)
            if _has_left(connection) or _has_left(life):
                continue
            pid = 0 if refused else os.fork()
            if not refused and not pid:
                for each in (listener, life, connection):
                    each.close()
                its_own, descriptors = descriptors, []  # else closed below
                return request, its_own
            _LOG.info("%s", refused or f"forked {pid} for {request['env'].get('GRPO_ROLE_MODULE')}")
            connection.sendall(json.dumps({"refused": refused, "pid": pid}).encode())
        except (OSError, ValueError) as error:
            _LOG.warning("a request failed: %r", error)
        finally:
            connection.close()
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def _has_left(connection: socket.socket) -> bool:
    """Return whether the other side has ended, so that nobody waits for the worker."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.setblocking(True)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this process what the raylet would have started, and run the worker."""
    import resource

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name in _NO_THREAD:  # programs that the role starts get what the role was given
        os.environ.pop(name, None)
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["max_files"]))
    if request["oom_score"]:
        Path("/proc/self/oom_score_adj").write_text(request["oom_score"], encoding="ascii")
    if "numpy" in sys.modules:  # Python's own `random` does it at a fork
        sys.modules["numpy"].random.seed()
    logging.getLogger().handlers.clear()
    sys.argv = request["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(listener: int, life: int, options: str) -> None:
    """Run the parent; returns when the driver has ended."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s: %(message)s")
    given = json.loads(options)
    sys.path += [folder for folder in given["path"] if folder not in sys.path]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    os.environ.update(_NO_THREAD)
    if failed := _import(given["early"]):
        _LOG.warning("%s", failed)
    assert "ray" not in sys.modules, "it would read its settings before Ray has started"
    forked = _serve(socket.socket(fileno=listener), socket.socket(fileno=life))
    if forked is not None:
        _become(*forked)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
