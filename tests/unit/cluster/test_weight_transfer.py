"""The driver relays a sender's calls to a receiver, and neither waits for one that has failed."""

import asyncio

import pytest
from lib.role import stand_in_role, waits_of

from grpo_components.cluster.weight_transfer import _GRACE_S, WeightTransfer
from grpo_components.errors import RoleFailedError
from grpo_components.training.relayed_client import RelayedClient

pytestmark = pytest.mark.anyio

LIMIT_S = 20.0


class Sender:
    """Makes the calls that vLLM's trainer engine makes."""

    def __init__(self, failure=None):
        self.client, self.failure, self.reasons = RelayedClient("generator_1", LIMIT_S), failure, []

    def send_weights(self, number, receiver, incarnation, *buckets):
        assert (receiver, incarnation, buckets) == ("generator_1", 0, ("bucket 0", "bucket 1"))
        try:
            self.client.start_weight_update()
            if self.failure:
                raise self.failure
            self.client.update_weights({"names": ["a"]})
            self.client.finish_weight_update()
        finally:
            self.client.end()

    def next_request(self, number, receiver, answered):
        return self.client.next_request(answered=answered)

    def abandon_send(self, number, receiver, reason):
        self.reasons.append(reason)
        self.client.abandon(reason)


class Receiver:
    """Takes calls; fails at the one that it is told."""

    def __init__(self, fails_at=None):
        self.fails_at, self.kinds, self.reasons = fails_at, [], []
        self.ended = asyncio.Event()
        self.error = None

    async def receive_weights(self, version, number, sender, timeout_s, *manifests):
        assert (sender, timeout_s, manifests) == ("trainer_0", LIMIT_S, ("manifest",))
        await self.ended.wait()
        if self.error:
            raise self.error
        return version, "checksum", None

    async def answer_request(self, number, kind, info):
        self.kinds.append((kind, info))
        if kind == self.fails_at:
            self.error = ValueError("weight tensor a is damaged")
            self.ended.set()
            raise self.error
        if kind == "finish":
            self.ended.set()

    async def abandon_weights(self, number, reason):
        self.reasons.append(reason)
        self.error = self.error or ConnectionError(reason)
        self.ended.set()


class Setting:
    """Roles whose first failure ends the run, unless restarts are allowed."""

    def __init__(self, sender, receiver, max_restarts=0, **options):
        options |= {"threads": True, "max_restarts": max_restarts, "names": {}}
        self.sender = stand_in_role("trainer_0", sender, **options)
        self.receiver = stand_in_role("generator_1", receiver, **options)
        self.transfer, self.waits = WeightTransfer(self.sender, LIMIT_S), waits_of(self.receiver)

    async def load(self, version=7):
        async with asyncio.timeout(LIMIT_S):
            buckets = ["bucket 0", "bucket 1"]
            return await self.transfer.load(self.receiver, version, buckets, ["manifest"])

    async def failure(self):
        with pytest.raises(RoleFailedError) as failed:
            await self.load()
        await asyncio.sleep(0.05)  # what was told to the others arrives
        return failed.value


async def test_the_calls_arrive_in_their_order_and_the_result_is_the_receivers():
    sender, receiver = Sender(), Receiver()
    setting = Setting(sender, receiver)
    assert await setting.load() == (7, "checksum", None)
    assert receiver.kinds == [("start", None), ("update", {"names": ["a"]}), ("finish", None)]
    assert sender.reasons == receiver.reasons == []
    assert setting.waits[-1] == ("load_weights", LIMIT_S + _GRACE_S)


async def test_pulls_of_one_receiver_that_overlap_come_one_after_the_other():
    """In a replay they may; of a receiver, only the last transfer that began is answered."""
    began = []

    class Last(Receiver):
        async def receive_weights(self, version, number, *announced):
            began.append(number)
            self.ended = asyncio.Event()
            return await super().receive_weights(version, number, *announced)

        async def answer_request(self, number, kind, info):
            await asyncio.sleep(0.01)
            if number != began[-1]:
                await asyncio.Event().wait()
            await super().answer_request(number, kind, info)

    class Again(Sender):
        def send_weights(self, *given):
            super().send_weights(*given)
            self.client = RelayedClient("generator_1", LIMIT_S)

    receiver = Last()
    setting = Setting(Again(), receiver)
    loaded = await asyncio.gather(setting.load(7), setting.load(8))
    assert loaded == [(7, "checksum", None), (8, "checksum", None)]
    assert [kind for kind, _ in receiver.kinds] == ["start", "update", "finish"] * 2


class Silent(Receiver):
    """Fails without an answer."""

    async def answer_request(self, number, kind, info):
        self.error = ValueError("the vLLM engine stopped")
        self.ended.set()
        await asyncio.Event().wait()


DAMAGED = "generator_1 failed: ValueError: weight tensor a is damaged"
STOPPED = "generator_1 failed: ValueError: the vLLM engine stopped"


@pytest.mark.parametrize(
    ("receiver", "deaths", "kind", "reason"),
    [
        *((Receiver(fails_at=at), (), "raised", DAMAGED) for at in ("start", "update", "finish")),
        (Silent(), (), "raised", STOPPED),
        (Receiver(), {"answer_request"}, "died", "generator_1 died"),
    ],
)
async def test_a_receiver_that_fails_ends_the_send_and_is_the_one_that_failed(
    receiver, deaths, kind, reason
):
    sender = Sender()
    setting = Setting(sender, receiver, dies_in=deaths)
    failure = await setting.failure()
    assert (failure.role, failure.kind) == ("generator_1", kind)
    (told,) = sender.reasons
    assert told.startswith(reason)
    assert setting.sender.process.host.received[-1] == "abandon_send"


async def test_a_sender_that_fails_costs_the_receivers_process_and_the_reason_is_its_own():
    """Nobody waits long for an answer that cannot come."""
    setting = Setting(Sender(failure=OSError("no buffer")), Receiver())
    failure = await setting.failure()
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "trainer_0 failed: OSError: no buffer" in str(failure)
    assert setting.waits[-1] == ("load_weights", _GRACE_S)


@pytest.mark.parametrize(
    ("deaths", "failure", "kind"),
    [({"next_request"}, None, "died"), ((), TimeoutError("waited for generator_1"), "waited")],
)
async def test_the_senders_end_and_its_wait_in_vain_are_its_own_failure(deaths, failure, kind):
    receiver = Receiver()
    failed = await Setting(Sender(failure=failure), receiver, dies_in=deaths).failure()
    assert (failed.role, failed.kind) == ("trainer_0", kind)
    assert receiver.reasons and receiver.reasons[0].startswith("trainer_0 ")


async def test_nothing_is_sent_to_a_receiver_that_is_being_restarted():
    again = asyncio.Event()
    setting = Setting(Sender(), Receiver(), max_restarts=1, pause=lambda seconds: again.wait())
    restart = asyncio.create_task(setting.receiver.replay_restart("died"))
    await asyncio.sleep(0)
    loading = asyncio.create_task(setting.load())
    await asyncio.sleep(0)
    again.set()
    await restart
    assert await loading is None and setting.sender.process.host.received == []
