"""Limits how often roles are restarted, how soon, and which of them a run may lose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from grpo_components.errors import RoleFailedError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class RestartBudget:
    """Allows a number of restarts, of all roles together, within a sliding window of time.

    Args:
        max_restarts: restarts allowed within the window; with 0 the first failure ends the run.
        window_s: length of the window, in seconds.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._restarts: deque[tuple[float, str]] = deque()
        self.why_no_room: Callable[[], str] = str
        """Function that says why the living nodes have no room for the roles; empty if they have."""

    def spend(self, failure: RoleFailedError, *, repeated: bool) -> float:
        """Count one restart of the failed role, or refuse it.

        Args:
            failure: failure that makes the restart necessary.
            repeated: whether the call failed with the same message before, or another call of its
                method did and none has succeeded since.

        Returns:
            Seconds to wait before the restart: 1, 2, 4, ... up to 30, doubled for each earlier
            restart of the role in the window.

        Raises:
            RoleFailedError: a restart cannot help (the role waited for others in vain, refused a
                component, or has no room), the role's code raised the same error again, or the
                budget is used up.
        """
        now, role = self._clock(), failure.role
        while self._restarts and now - self._restarts[0][0] > self._window_s:
            self._restarts.popleft()
        of_role = sum(restarted == role for _, restarted in self._restarts)
        if failure.kind in ("waited", "refused"):
            raise failure
        self.check_room(failure)
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

    def check_room(self, failure: RoleFailedError) -> None:
        """Raise the failure, with the reason, if a new process of its role would have no room."""
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
