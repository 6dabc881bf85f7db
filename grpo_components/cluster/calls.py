"""Method calls on a role, repeated when the role's process is restarted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Call:
    """One method call on a role, repeated if the process ends before it answers.

    Args:
        role: name of the role.
        method: name of the method.
        args: arguments. A `Part` at top level arrives as its value, one in a list as a Ray
            reference.
        num_returns: length of the returned tuple; 1 for a single value.
        lane: thread that runs a blocking method.
        once: never repeat the call.
    """

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
        """Process of the role that got the call last; -1 before the first."""
        self.last_error = ""
        """Failure of the call in an earlier process; empty if there was none."""
        self._references: list[Any] = []

    def make(self, host: Any, incarnation: int) -> None:
        """Send the call to a process of the role, unless that process got it already.

        Args:
            host: the Ray actor that holds the role.
            incarnation: number of its process.
        """
        if self.incarnation == incarnation:
            return
        self.incarnation = incarnation
        options = host.call.options(num_returns=self._num_returns)
        made = options.remote(self.method, self._lane, *map(_to_references, self._args))
        self._references = [made] if self._num_returns == 1 else made

    def reference(self, number: int) -> Any:
        """Ray's reference of one part of the result."""
        assert self._references, f"{self.method} was not sent yet: its role is being restarted"
        return self._references[number]


@dataclass(frozen=True)
class Part:
    """One part of a call's result; stays valid when the role is restarted."""

    call: Call
    number: int


def _to_references(value: Any) -> Any:
    if isinstance(value, Part):
        return value.call.reference(value.number)
    return [_to_references(each) for each in value] if isinstance(value, list | tuple) else value
