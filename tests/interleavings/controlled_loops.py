"""Event loops that run one callback at a time, when they are told to, in virtual time."""

import asyncio
import asyncio.base_events
from asyncio import events, futures
from collections.abc import Callable
from typing import Any


class ControlledLoop(asyncio.base_events.BaseEventLoop):
    """An asyncio loop without a selector: who holds it decides when the next callback runs."""

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self._now = now
        self.tasks: list[asyncio.Task[Any]] = []
        """All tasks so far, in the order of their start."""
        self.problems: list[BaseException | str] = []
        """What asyncio's exception handler got."""
        self.set_exception_handler(self._keep_problem)
        self.set_task_factory(_quiet_task)

    def time(self) -> float:
        return self._now()

    def _write_to_self(self) -> None:  # nobody waits in a selector
        pass

    def _keep_problem(self, loop: Any, context: dict[str, Any]) -> None:
        self.problems.append(context.get("exception") or context["message"])

    @property
    def ready(self) -> list[asyncio.Handle]:
        return [handle for handle in self._ready if not handle._cancelled]  # type: ignore[attr-defined]

    def run_next(self) -> None:
        handle = self._ready.popleft()  # type: ignore[attr-defined]
        if handle._cancelled:
            return
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            handle._run()
        finally:
            events._set_running_loop(before)

    def run_all(self) -> None:
        while self._ready:  # type: ignore[attr-defined]
            self.run_next()

    def sleepers(self) -> list[asyncio.TimerHandle]:
        """Return the timers of `asyncio.sleep` that may end; time-outs never do."""
        ends = futures._set_result_unless_cancelled  # type: ignore[attr-defined]
        timers = self._scheduled  # type: ignore[attr-defined]
        found = [t for t in timers if not t._cancelled and t._callback is ends]
        return sorted((t for t in found if t._when < float("inf")), key=lambda t: t._when)

    def wake(self, timer: asyncio.TimerHandle) -> None:
        self._scheduled.remove(timer)  # type: ignore[attr-defined]
        timer._scheduled = False  # type: ignore[attr-defined]
        self._ready.append(timer)  # type: ignore[attr-defined]


def _quiet_task(loop: Any, coroutine: Any, **options: Any) -> Any:
    """Return a task that may be forgotten unfinished: most schedules are left half-way."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.tasks.append(task)
    return task
