"""A role in this process, for the tests of what calls roles."""

import asyncio
from types import SimpleNamespace

import pytest


class LocalPart:
    """One part of what a call returns; awaiting it gives the value."""

    def __init__(self, call, number):
        self._call, self._number = call, number

    def __await__(self):
        return self._value().__await__()

    async def _value(self):
        return (await self._call)[self._number]


class LocalRole:
    """Has the methods of `Role` that the handles call; another object's methods answer at once."""

    def __init__(self, name, target):
        self.name, self.target = name, target
        self.lost, self.recover = False, None
        self.process = SimpleNamespace(incarnation=0)
        self.waits = []
        """What was waited for, with its time-out in seconds."""

    async def restart(self):
        """Begin the next process, and recover."""
        self.process.incarnation += 1
        await self.recover()

    def submit(self, method, *args, num_returns=1, lane="main", once=False):
        call = asyncio.create_task(self._make(method, args, num_returns))
        parts = [LocalPart(call, number) for number in range(num_returns)]
        return parts[0] if num_returns == 1 else parts

    async def _make(self, method, args, num_returns):
        args = [await arg if isinstance(arg, LocalPart) else arg for arg in args]
        answer = getattr(self.target, method)(*args)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return (answer,) if num_returns == 1 else tuple(answer)

    async def answer(self, part, what, timeout_s):
        self.waits.append((what, timeout_s))
        return await part

    async def result(self, part, what, timeout_s, turn=None):
        answer = await self.answer(part, what, timeout_s)
        if turn is not None:
            await turn()
        return answer

    async def call(self, method, *args, timeout_s, lane="main", turn=None):
        return await self.result(self.submit(method, *args), method, timeout_s, turn)


@pytest.fixture
def local_role():
    return LocalRole
