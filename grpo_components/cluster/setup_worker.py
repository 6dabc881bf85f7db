"""Lets the run's parent of roles fork a Ray worker; the raylet runs this file for each role.

The raylet starts a worker with a runtime environment as `python setup_worker.py default_worker.py
ARGUMENTS`, with a file of this name. Ray's own imports Ray, and then starts a Python that imports
everything else. This one asks the parent (see `role_parent`), which has it all imported, to fork a
worker, and ends. The worker has another pid than this process; Ray takes the pid that the worker
registers with. If the parent cannot, Ray's own file runs, and the reason is in Ray's log.
"""

from __future__ import annotations

import array
import json
import os
import resource
import socket
import sys
from typing import Any

SOCKET_VARIABLE = "GRPO_ROLE_PARENT"
"""Environment variable of a role: path of the parent's socket."""
MODULE_VARIABLE = "GRPO_ROLE_MODULE"
"""Environment variable of a role: module that the parent imports before it forks."""
_CONTEXT = "--serialized-runtime-env-context="
_FOR_SETUP_ONLY = (_CONTEXT, "--language=")
_ANSWER_S = 300.0
"""Longest wait for the parent, which may have to import first, in seconds."""


def main(arguments: list[str]) -> None:
    """Let the parent fork a worker; without it, run Ray's own file."""
    context: dict[str, Any] = {}
    for each in arguments:
        if each.startswith(_CONTEXT):
            context = json.loads(each.removeprefix(_CONTEXT))
    environment = {**os.environ, **context.get("env_vars", {})}
    request = {
        "argv": [each for each in arguments if not each.startswith(_FOR_SETUP_ONLY)],
        "env": environment,
        "cwd": os.getcwd(),
        "max_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "oom_score": _oom_score(),
    }
    if problem := _ask(environment.get(SOCKET_VARIABLE, ""), request):
        sys.stderr.write(f"{problem}; this worker imports everything by itself\n")
        sys.stderr.flush()
        own = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, own, *arguments])


def _ask(path: str, request: dict[str, Any]) -> str:
    """Send a request to the parent; return what went wrong, if anything did."""
    body = json.dumps(request).encode()
    descriptors = array.array("i", [0, 1, 2])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(path)
            header = len(body).to_bytes(8, "big")
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
            connection.sendmsg([header], [rights])
            connection.sendall(body)
            answer = connection.makefile("rb").read().decode()
        except TimeoutError:
            return f"the parent of the roles did not fork a worker within {_ANSWER_S:g} s"
        except OSError as error:
            return f"the parent of the roles cannot be reached at {path!r}: {error}"
    if not answer:
        return "the parent of the roles ended before it forked a worker"
    return json.loads(answer)["refused"]


def _oom_score() -> str:
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # only Linux has it
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
