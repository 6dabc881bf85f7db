"""Limits how often roles are restarted, how soon, and which of them a run may lose."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from grpo_components.errors import RoleFailedError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_ROOM_CHECK_S = 5.0
"""Seconds from one look at the nodes to the next, while a process starts."""
T = TypeVar("T")


class RestartBudget:
    """Allows a number of restarts, of all roles together, within a sliding window of time."""

    def __init__(
        self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._restarts: deque[tuple[float, str]] = deque()
        self.why_no_room: Callable[[], str] = str
        """Function that says why living nodes have no room for the roles; empty if they have."""

    def spend(self, failure: RoleFailedError, *, repeated: bool) -> float:
        """Count one restart of the failed role, or refuse it."""
        now, role = self._clock(), failure.role
        while self._restarts and now - self._restarts[0][0] > self._window_s:
            self._restarts.popleft()
        of_role = sum(restarted == role for _, restarted in self._restarts)
        if failure.kind in ("waited", "refused"):
            raise failure
        self._check_room(failure)
        if failure.kind == "raised" and repeated:
            raise failure.with_history("failed the same way again after a restart")
        if len(self._restarts) >= self._max_restarts:
            if not self._restarts:
                raise failure
            raise failure.with_history(
                f"max_restarts is used up by {len(self._restarts)} restarts in the last "
                f"{self._window_s:g} s ({of_role} of them of {role})"
            )
        self._restarts.append((now, role))
        return min(_FIRST_PAUSE_S * 2**of_role, _LONGEST_PAUSE_S)

    async def wait_with_room(self, starting: Awaitable[T], role: str, log: str) -> T:
        """Wait for the start of a process for as long as the living nodes have room for it.

        Ray waits without end for a node that it finds dead only after the start has begun.
        """
        task = asyncio.ensure_future(starting)
        try:
            while not (await asyncio.wait([task], timeout=_ROOM_CHECK_S))[0]:
                self._check_room(RoleFailedError(role, "cannot start", log, "waited"))
            return task.result()
        finally:
            task.cancel()

    def _check_room(self, failure: RoleFailedError) -> None:
        if problem := self.why_no_room():
            raise failure.with_history(problem)

    def used(self) -> str:
        """Return how much of the budget is used, as text for a message."""
        return f"restart {len(self._restarts)} of at most {self._max_restarts}"


class Member(Protocol):
    """A role that belongs to a family."""

    lost: bool


@dataclass
class Family:
    """Interchangeable roles, such as all generators, of which a run may lose some."""

    min_living: int
    """A role that cannot be restarted is given up if at least this many others are left."""
    roles: list[Member] = field(default_factory=list)

    def can_spare(self, role: Member) -> bool:
        """Return whether the run can go on without a role."""
        return sum(not other.lost for other in self.roles if other is not role) >= self.min_living
