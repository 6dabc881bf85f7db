"""The driver relays a sender's calls to a receiver, and neither waits for one that has failed."""

import asyncio

import pytest
from lib.role import stand_in_role, waits_of

from grpo_components.cluster.weight_transfer import _GRACE_S, WeightTransfer
from grpo_components.errors import RoleFailedError
from grpo_components.rollout.relayed_client import RelayedClient

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


def roles_of(sender, receiver, dies_in=(), max_restarts=0, **more):
    """Roles whose first failure ends the run."""
    options = {"dies_in": dies_in, "max_restarts": max_restarts, "names": {}, **more}
    return [
        stand_in_role(name, role, threads=True, **options)
        for name, role in (("trainer_0", sender), ("generator_1", receiver))
    ]


def load(sender, receiver, dies_in=()):
    """The result of a transfer, or its failure, and what the driver waited for."""
    roles = roles_of(sender, receiver, dies_in)
    waits = waits_of(roles[1])

    async def run():
        transfer = WeightTransfer(roles[0], LIMIT_S)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await transfer.load(roles[1], 7, ["bucket 0", "bucket 1"], ["manifest"])
        except RoleFailedError as failure:
            await asyncio.sleep(0.05)  # what was told to the others arrives
            return failure

    return asyncio.run(run()), roles[0].process.host.received, waits[-1]


def test_the_calls_arrive_in_their_order_and_the_result_is_the_receivers():
    sender, receiver = Sender(), Receiver()
    result, _, last_wait = load(sender, receiver)
    assert result == (7, "checksum", None)
    assert receiver.kinds == [("start", None), ("update", {"names": ["a"]}), ("finish", None)]
    assert sender.reasons == receiver.reasons == []
    assert last_wait == ("load_weights", LIMIT_S + _GRACE_S)


def test_pulls_of_one_receiver_that_overlap_come_one_after_the_other():
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
    roles = roles_of(Again(), receiver)

    async def run():
        transfer = WeightTransfer(roles[0], LIMIT_S)
        loads = (transfer.load(roles[1], v, ["bucket 0", "bucket 1"], ["manifest"]) for v in (7, 8))
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*loads)

    assert asyncio.run(run()) == [(7, "checksum", None), (8, "checksum", None)]
    assert [kind for kind, _ in receiver.kinds] == ["start", "update", "finish"] * 2


@pytest.mark.parametrize("kind", ["start", "update", "finish"])
def test_a_receiver_that_fails_ends_the_send_and_is_the_one_that_failed(kind):
    sender, receiver = Sender(), Receiver(fails_at=kind)
    failure, received, _ = load(sender, receiver)
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "tensor a is damaged" in sender.reasons[0] and "generator_1" in sender.reasons[0]
    assert received[-1] == "abandon_send"


def test_a_receiver_that_dies_ends_the_send():
    sender = Sender()
    failure, *_ = load(sender, Receiver(), dies_in={"answer_request"})
    assert (failure.role, failure.kind) == ("generator_1", "died")
    (reason,) = sender.reasons
    assert reason.startswith("generator_1 died")


def test_a_sender_that_fails_costs_the_receivers_process_and_the_reason_is_its_own():
    failure, _, last_wait = load(Sender(failure=OSError("no buffer")), Receiver())
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "trainer_0 failed: OSError: no buffer" in str(failure)
    assert last_wait == ("load_weights", _GRACE_S), (
        "nobody waits long for one that cannot be answered"
    )


@pytest.mark.parametrize(
    ("deaths", "failure", "kind"),
    [
        ({"next_request"}, None, "died"),
        ((), TimeoutError("waited for generator_1"), "waited"),
    ],
)
def test_the_end_of_the_sender_and_a_wait_in_vain_are_the_senders_failure(deaths, failure, kind):
    receiver = Receiver()
    failed, *_ = load(Sender(failure=failure), receiver, deaths)
    assert (failed.role, failed.kind) == ("trainer_0", kind)
    assert receiver.reasons and receiver.reasons[0].startswith("trainer_0 ")


def test_a_receiver_that_fails_without_an_answer_is_noticed_at_once():
    class Silent(Receiver):
        async def answer_request(self, number, kind, info):
            self.error = ValueError("the vLLM engine stopped")
            self.ended.set()
            await asyncio.Event().wait()

    sender = Sender()
    failure, *_ = load(sender, Silent())
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert sender.reasons == ["generator_1 failed: ValueError: the vLLM engine stopped"]


def test_nothing_is_sent_to_a_receiver_that_is_being_restarted():
    again = asyncio.Event()
    restart = {"max_restarts": 1, "pause": lambda seconds: again.wait()}
    sender, receiver = roles_of(Sender(), Receiver(), **restart)

    async def run():
        restart = asyncio.create_task(receiver.replay_restart("died"))
        await asyncio.sleep(0)
        transfer = WeightTransfer(sender, LIMIT_S)
        loading = asyncio.create_task(transfer.load(receiver, 7, ["bucket 0"], ["manifest"]))
        await asyncio.sleep(0)
        again.set()
        await restart
        return await loading

    assert asyncio.run(run()) is None and sender.process.host.received == []
