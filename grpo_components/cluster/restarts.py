"""Limits how often roles are restarted, and how soon."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from grpo_components.errors import RoleFailedError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class RestartBudget:
    """Allows a number of restarts, of all roles together, within a sliding window of time."""

    def __init__(
        self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._restarts: deque[tuple[float, str]] = deque()

    def spend(self, failure: RoleFailedError, *, repeated: bool, no_room: str = "") -> float:
        """Count one restart of the failed role and return the pause before it, or refuse it."""
        now, role = self._clock(), failure.role
        while self._restarts and now - self._restarts[0][0] > self._window_s:
            self._restarts.popleft()
        of_role = sum(restarted == role for _, restarted in self._restarts)
        if failure.kind in ("waited", "refused"):
            raise failure
        if no_room:
            raise failure.with_history(no_room)
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

    def used(self) -> str:
        """Return how much of the budget is used, as text for a message."""
        return f"restart {len(self._restarts)} of at most {self._max_restarts}"
