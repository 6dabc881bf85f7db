"""Turns Ray's errors into a `RoleFailedError` that names the role at fault, in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from grpo_components.errors import RoleFailedError


def role_failure(
    error: RayError, role: str, method: str, log_file: str, names: Mapping[str, str]
) -> RoleFailedError:
    """Return the failure behind an error that Ray raised for a call."""
    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, RoleFailedError):
        return cause
    if isinstance(cause, RayActorError):
        name = names.get(cause.actor_id or "", role)
        log = str(Path(log_file).with_name(f"{name}.log"))
        return RoleFailedError(name, _cause_of_death(cause), log, "died")
    if isinstance(cause, ObjectLostError):
        what = f"cannot go on with {method}: data that it needs was lost with another node"
        return RoleFailedError(role, what, log_file, "lost")
    if isinstance(cause, OutOfMemoryError):
        return RoleFailedError(role, _out_of_memory(cause), log_file, "died")
    return RoleFailedError(role, f"failed in {method}: {error}", log_file, "raised")


def _out_of_memory(error: OutOfMemoryError) -> str:
    """Say that memory was full, with the figures from the start of Ray's long message."""
    found = re.search(r"was (\S+) used / (\S+) limit", str(error))
    figures = f", {found[1]} of {found[2]} in use" if found else ""
    return f"died: killed because the machine's memory was full{figures}"


def _cause_of_death(error: RayActorError) -> str:
    """Say how a process ended: the kind of exit, and the first sentence of Ray's explanation."""
    text = " ".join(str(error).split())
    if "its node has died" in text:
        found = re.search(r" ip: (\S+)", text)
        return f"died: its node{f' {found[1]}' if found else ''} died, or cannot be reached"
    if isinstance(error, ActorUnavailableError):
        return "died: its process or its node cannot be reached"
    found = re.search(r"exit type: (\w+) Worker exit detail: (.+?\.)( |$)", text)
    if found is None:
        return f"died: {text}"
    if found[1] == "SYSTEM_ERROR":  # the explanation only says that the connection broke
        return "died: killed, out of memory, or crashed"
    return f"died: {found[1]}: {found[2]}"
