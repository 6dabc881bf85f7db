"""How often roles may be started again, and after what pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from grpo_components.errors import RoleFailedError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


class RestartBudget:
    """So many restarts of all roles together within a window of time.

    Args:
        max_restarts: within the window; 0 lets the first failure end the run.
        window_s: length of the window, in seconds.
        clock: seconds, never going back.
    """

    def __init__(
        self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._window_s, self._clock = max_restarts, window_s, clock
        self._restarts: deque[tuple[float, str]] = deque()

    def spend(self, failure: RoleFailedError, *, repeated: bool) -> float:
        """Take one restart of the failed role from the budget.

        Args:
            failure: what happened to it.
            repeated: it failed so before, in the same call or in one of its method, and no call of
                that method was answered since.

        Returns:
            Seconds to wait before it: 1, 2, 4, ... to 30 with its restarts in the window.

        Raises:
            RoleFailedError: if the role waited in vain for others, or got a component that is none;
                if its code raised the same again, or if the budget is spent.
        """
        now, role = self._clock(), failure.role
        while self._restarts and now - self._restarts[0][0] > self._window_s:
            self._restarts.popleft()
        of_role = sum(restarted == role for _, restarted in self._restarts)
        if failure.kind in ("waited", "refused"):
            raise failure
        if failure.kind == "raised" and repeated:
            raise failure.with_history("and the same again after a restart")
        if len(self._restarts) >= self._max_restarts:
            if not self._restarts:
                raise failure
            raise failure.with_history(
                f"{len(self._restarts)} restarts in the last {self._window_s:g} s are all that "
                f"max_restarts allows ({of_role} of them were of {role})"
            )
        self._restarts.append((now, role))
        return min(_FIRST_PAUSE_S * 2**of_role, _LONGEST_PAUSE_S)

    def used(self) -> str:
        """How much of the budget is used, in words."""
        return f"restart {len(self._restarts)} of at most {self._max_restarts}"
