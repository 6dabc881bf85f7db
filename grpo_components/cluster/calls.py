"""Method calls on a role, repeated when the role's process is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_components.cluster.role_process import RoleProcess


class Call:
    """One method call on a role, repeated if the process ends before it answers."""

    def __init__(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        num_returns: int,
        lane: str,
        once: bool,
    ) -> None:
        self.role, self.once = role, once
        self.method, self._args, self._num_returns, self._lane = method, args, num_returns, lane
        self.incarnation = -1
        """Number of the role's process that got the call last; -1 until it is sent."""
        self.last_error = ""
        """What went wrong with the call in an earlier process; empty if nothing did."""
        self._references: list[Any] = []

    def make(self, process: RoleProcess) -> None:
        """Send the call to a process of the role, unless that process got it already."""
        if self.incarnation == process.incarnation:
            return
        self.incarnation = process.incarnation
        send = process.sender(self._num_returns)
        made = send(self.method, self._lane, *map(_to_references, self._args))
        self._references = [made] if self._num_returns == 1 else made

    def reference(self, number: int) -> Any:
        """Return Ray's reference to one part of the result."""
        assert self._references, f"{self.method} was not sent yet: its role is being restarted"
        return self._references[number]


@dataclass(frozen=True)
class Part:
    """Stands for one part of a call's result; stays valid when the role is restarted."""

    call: Call
    number: int


def _to_references(value: Any) -> Any:
    if isinstance(value, Part):
        return value.call.reference(value.number)
    return [_to_references(each) for each in value] if isinstance(value, list | tuple) else value
