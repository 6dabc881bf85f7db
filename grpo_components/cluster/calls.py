"""Calls of a role's methods, which outlive its process: made again in its next life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Call:
    """One call of a role's method; made again where its process ends before it has answered.

    Args:
        role: name of the role.
        method: of the role.
        args: for it; parts of other calls arrive as their values, in lists as references.
        num_returns: parts of the returned tuple.
        lane: thread for a blocking method.
        once: never made again.
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
        self.life = -1
        """Of the role's process, in which it was made."""
        self.raised = ""
        """What came of it in an earlier life."""
        self._references: list[Any] = []

    def make(self, host: Any, life: int) -> None:
        """Make the call, unless it was made in this life already."""
        if self.life == life:
            return
        self.life = life
        options = host.call.options(num_returns=self._num_returns)
        made = options.remote(self.method, self._lane, *map(_with_references, self._args))
        self._references = [made] if self._num_returns == 1 else made

    def reference(self, number: int) -> Any:
        """Ray's reference of one part of what it returns."""
        assert self._references, f"{self.method} was not made yet: its role is being restarted"
        return self._references[number]


@dataclass(frozen=True)
class Part:
    """One part of what a call returns, whichever life of its role returns it."""

    call: Call
    number: int


def _with_references(value: Any) -> Any:
    if isinstance(value, Part):
        return value.call.reference(value.number)
    return [_with_references(each) for each in value] if isinstance(value, list | tuple) else value
