"""The stand-in for a role's process takes the calls that the real one takes, and ends like it."""

import asyncio
from inspect import signature

import pytest
from lib.role import AtOnce, StandInHost, stand_in_role, value_of

from grpo_components.cluster.role_host import RoleHost
from grpo_components.errors import RoleFailedError


def test_its_methods_have_the_parameters_of_the_real_ones():
    host = StandInHost(AtOnce(), "counter", Counter)
    for name, remote in (
        ("call", host.call.options(num_returns=2).remote),
        ("heartbeat", host.heartbeat.remote),
    ):
        _, *real = signature(getattr(RoleHost, name)).parameters.values()
        assert [(p.name, p.kind) for p in signature(remote).parameters.values()] == [
            (p.name, p.kind)
            for p in real
            if not p.name.startswith("_ray")  # of tracing; added when it is made an actor
        ]


class Counter:
    def __init__(self):
        self.value, self.release = 0, asyncio.Event()

    def add(self, amount):
        self.value += amount
        return self.value, f"is {self.value}"

    async def hang(self):
        await self.release.wait()

    def fail(self):
        raise KeyError("no such thing")


def test_a_result_reaches_another_role_as_its_value_and_a_process_that_died_is_replaced():
    async def run():
        first, second = (stand_in_role(f"counter_{i}", Counter) for i in range(2))
        number, text = first.submit("add", 3, num_returns=2)
        assert await second.call("add", number, timeout_s=1) == (3, "is 3")
        assert await value_of(text) == "is 3"
        waiting = asyncio.create_task(second.call("hang", timeout_s=1))
        dropped = second.submit("hang", once=True)
        await asyncio.sleep(0)
        second.process.host.end()
        assert await second.result(dropped, "hang", 1) is None
        assert second.process.incarnation == 1
        second.process.host.role.release.set()
        await waiting
        assert await second.call("add", 1, timeout_s=1) == (1, "is 1")

    asyncio.run(run())


@pytest.mark.parametrize(("dies_in", "kind"), [({"fail"}, "died"), ((), "raised")])
def test_a_failure_names_the_role_that_failed(dies_in, kind):
    async def run():
        names = {}
        failing, other = (
            stand_in_role(f"counter_{i}", Counter, dies_in=dies, max_restarts=0, names=names)
            for i, dies in enumerate((dies_in, ()))
        )
        with pytest.raises(RoleFailedError) as failed:
            await other.call("add", failing.submit("fail"), timeout_s=1)
        assert (failed.value.role, failed.value.kind) == ("counter_0", kind)

    asyncio.run(run())
