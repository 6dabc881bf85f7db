"""The driver lets a sender send and a receiver receive; neither waits for one that has failed."""

import asyncio

import pytest
from lib.role import limits, stand_in_role, waits_of

from grpo_components.cluster.weight_transfer import GRACE_S, WeightTransfer
from grpo_components.errors import RoleFailedError

pytestmark = pytest.mark.anyio

LIMIT_S = 20.0


class Wire:
    """What the sender and the receiver share."""

    def __init__(self):
        self.sent, self.given_up = asyncio.Event(), asyncio.Event()


class Sender:
    """Sends to a receiver that takes what is sent; or fails, or waits in vain."""

    def __init__(self, wire, failure=None):
        self.wire, self.failure, self.abandoned = wire, failure, []

    async def transfer_group(self, receiver, incarnation):
        return {"group": f"{receiver}.{incarnation}"}

    async def send_weights(self, receiver, *buckets):
        assert (receiver, buckets) == ("generator_1", ("bucket 0", "bucket 1"))
        if self.failure:
            raise self.failure
        self.wire.sent.set()
        await self.wire.given_up.wait()

    async def abandon_send(self, receiver, incarnation):
        self.abandoned.append((receiver, incarnation))
        self.wire.given_up.set()


class Receiver:
    """Receives what is sent; raises `early` before it waits for that, or `late` once it is sent."""

    def __init__(self, wire, early=None, late=None):
        self.wire, self.early, self.late = wire, early, late
        self.awaited, self.numbers, self.incarnation = asyncio.Event(), [], 0

    async def receive_weights(self, version, number, group, *manifests):
        joined = {"group": f"generator_1.{self.incarnation}"}
        assert (group, manifests) == (joined, ("manifest",))
        self.numbers.append(number)
        if self.early:
            raise self.early
        self.awaited.set()
        await self.wire.sent.wait()
        if self.late:
            raise self.late
        self.wire.sent.clear()
        self.wire.given_up.set()
        return version, "checksum", None

    async def weights_awaited(self, number):
        await self.awaited.wait()


class Setting:
    """Roles whose first failure ends the run, unless restarts are allowed."""

    def __init__(self, failure=None, early=None, late=None, max_restarts=0, dies_in=(), **options):
        wire = Wire()
        options |= {"max_restarts": max_restarts, "dies_in": dies_in, "names": {}}
        self.wire_sender, self.wire_receiver = Sender(wire, failure), Receiver(wire, early, late)
        self.sender = stand_in_role("trainer_0", self.wire_sender, **options)
        self.receiver = stand_in_role("generator_1", self.wire_receiver, **options)
        self.transfer = WeightTransfer(self.sender, limits(LIMIT_S))
        self.waits = waits_of(self.receiver)

    async def load(self, version=7):
        async with asyncio.timeout(LIMIT_S):
            buckets = ["bucket 0", "bucket 1"]
            return await self.transfer.load(self.receiver, version, buckets, ["manifest"])

    async def failure(self):
        with pytest.raises(RoleFailedError) as failed:
            await self.load()
        await asyncio.sleep(0.05)  # what was told to the others arrives
        return failed.value


async def test_pulls_of_one_receiver_that_overlap_come_one_after_the_other():
    """In a replay they may. Their results are the receiver's, and nothing is given up."""
    setting = Setting()
    loaded = await asyncio.gather(setting.load(7), setting.load(8))
    assert loaded == [(7, "checksum", None), (8, "checksum", None)]
    assert setting.wire_receiver.numbers == [0, 1] and setting.wire_sender.abandoned == []
    assert setting.waits[-1] == ("load_weights", LIMIT_S + GRACE_S)


async def test_transfers_to_several_receivers_come_one_after_the_other_each_with_its_time():
    """The memory of the sender's GPU is planned for one; whoever waits is not timed yet."""
    setting, begun, may_receive = Setting(), [], asyncio.Event()

    class Waits:
        def __init__(self, name):
            self.name, self.awaited = name, asyncio.Event()

        async def receive_weights(self, version, number, group, *manifests):
            begun.append(self.name)
            await may_receive.wait()
            raise DAMAGED

        async def weights_awaited(self, number):
            await may_receive.wait()

    names = ["generator_1", "generator_2", "generator_3"]
    receivers = [stand_in_role(name, Waits(name), max_restarts=0) for name in names]
    waits = [waits_of(receiver) for receiver in receivers]
    loads = [setting.transfer.load(receiver, 7, (), ["manifest"]) for receiver in receivers]
    loading = asyncio.gather(*loads, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert begun == names[:1] and [bool(each) for each in waits] == [True, False, False]
    may_receive.set()
    assert {type(each) for each in await loading} == {RoleFailedError}
    assert begun == names


async def test_a_restart_can_pull_while_another_pull_waits_for_it():
    """The pull that found the receiver restarting has given up its turn."""
    setting, pulled = Setting(max_restarts=1), []

    async def recover(role):
        await asyncio.sleep(0)
        pulled.append(await setting.load(8))

    setting.receiver._recover, setting.wire_receiver.incarnation = recover, 1
    restart = asyncio.create_task(setting.receiver.replay_restart("died"))
    await asyncio.sleep(0)
    assert setting.receiver.is_restarting
    assert await setting.load(7) is None
    await restart
    assert pulled == [(8, "checksum", None)]


DAMAGED = ValueError("weight tensor a is damaged")


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({"early": DAMAGED}, "raised"),
        ({"late": DAMAGED}, "raised"),
        ({"dies_in": {"weights_awaited"}}, "died"),
    ],
)
async def test_a_receiver_that_fails_ends_the_send_and_is_the_one_that_failed(setting, kind):
    setting = Setting(**setting)
    failure = await setting.failure()
    assert (failure.role, failure.kind) == ("generator_1", kind)
    assert kind == "died" or "weight tensor a is damaged" in str(failure)
    assert setting.wire_sender.abandoned == [("generator_1", 0)]


async def test_a_sender_that_fails_costs_the_receivers_process_and_the_reason_is_its_own():
    """Nobody waits for an answer that cannot come."""
    failure = await Setting(failure=OSError("no buffer")).failure()
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "trainer_0 failed: OSError: no buffer" in str(failure)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ({"dies_in": {"transfer_group"}}, "died"),
        ({"dies_in": {"send_weights"}}, "died"),
        ({"failure": TimeoutError("waited for generator_1")}, "waited"),
    ],
)
async def test_the_senders_end_and_its_wait_in_vain_are_its_own_failure(setting, kind):
    failed = await Setting(**setting).failure()
    assert (failed.role, failed.kind) == ("trainer_0", kind)


async def test_nothing_is_sent_to_a_receiver_that_is_being_restarted():
    again = asyncio.Event()
    setting = Setting(max_restarts=1, pause=lambda seconds: again.wait())
    restart = asyncio.create_task(setting.receiver.replay_restart("died"))
    await asyncio.sleep(0)
    loading = asyncio.create_task(setting.load())
    await asyncio.sleep(0)
    again.set()
    await restart
    assert await loading is None and setting.sender.process.host.received == []
