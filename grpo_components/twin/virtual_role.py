"""What a call on a role costs, in virtual time: the driver's turn, the receipt, and the lanes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from grpo_components.twin.cores import Process


@dataclass(frozen=True)
class VirtualPart:
    """One part of a call's result."""

    result: asyncio.Task[Any]
    number: int | None
    """Position in the returned tuple; None for a single value."""

    async def value(self) -> Any:
        """Wait for the call, and return this part of its result."""
        result = await self.result
        return result if self.number is None else result[self.number]


class Driver:
    """The process that makes all calls: one thread, which sends and receives one at a time."""

    def __init__(self, process: Process, call_s: float) -> None:
        self.process, self.call_s = process, call_s
        self._turn = asyncio.Lock()
        self.calls = 0

    async def half_call(self, parts: float = 1.0) -> None:
        """Send a call, or receive a result: half of `call_s` each."""
        async with self._turn:
            await self.process.work(parts * self.call_s / 2)


class VirtualRole:
    """Calls the methods of a role in this process, with the interface of `cluster.role.Role`."""

    lost = False

    def __init__(
        self, name: str, target: Any, driver: Driver, process: Process, receive_s: float
    ) -> None:
        self.name, self._target, self._driver = name, target, driver
        self._process, self._receive_s = process, receive_s
        self.recover: Callable[[], Awaitable[None]] | None = None
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def submit(
        self,
        method: str,
        *args: Any,
        num_returns: int = 1,
        lane: str = "main",
        once: bool = False,
    ) -> Any:
        """Start a call; see `Role.submit`."""
        task = asyncio.create_task(self._run(method, args, lane))
        if num_returns == 1:
            return VirtualPart(task, None)
        return [VirtualPart(task, number) for number in range(num_returns)]

    async def _run(self, method: str, args: tuple[Any, ...], lane: str) -> Any:
        self._driver.calls += 1
        await self._driver.half_call()
        values = [await arg.value() if isinstance(arg, VirtualPart) else arg for arg in args]
        await self._process.work(self._receive_s)
        function = getattr(self._target, method)
        if asyncio.iscoroutinefunction(function):
            if method in _SIDE_BY_SIDE:
                return await function(*values)
            async with self._lanes[lane]:
                return await function(*values)
        return function(*values)

    async def result(
        self,
        part: VirtualPart,
        what: str,
        timeout_s: float,
        turn: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Wait for a call's result; see `Role.result`."""
        return await self.answer(part, what, timeout_s)

    async def call(
        self, method: str, *args: Any, timeout_s: float, lane: str = "main", turn: Any = None
    ) -> Any:
        """Call a method and wait for its result; see `Role.call`."""
        return await self.answer(self.submit(method, *args, lane=lane), method, timeout_s)

    async def answer(self, part: VirtualPart, what: str, timeout_s: float) -> Any:
        """Wait for a result; see `Role.answer`."""
        try:
            async with asyncio.timeout(timeout_s):
                value = await part.value()
        except TimeoutError as error:
            if error.args:  # the role's own
                raise
            problem = f"{self.name} did not answer {what} within {timeout_s:g} s of virtual time"
            raise TimeoutError(problem) from None
        await self._driver.half_call()
        return value


_SIDE_BY_SIDE = ("reserve", "generate_group", "load_weights", "evaluate", "add", "take")
"""Coroutines of the real roles: calls of them run side by side."""
