"""The driver relays a sender's calls to a receiver, and neither waits for one that has failed."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_components.cluster.weight_transfer import _GRACE_S, WeightTransfer
from grpo_components.errors import RoleFailedError
from grpo_components.rollout.relayed_client import RelayedClient

LIMIT_S = 20.0


class Role:
    """A role in this process; each lane is a thread, and `deaths` says which call it dies in."""

    def __init__(self, name, target, deaths=()):
        self.name, self.target, self.deaths = name, target, deaths
        self.process = SimpleNamespace(incarnation=4)
        self.called, self.limits = [], []

    def submit(self, method, *args, lane="main", once=False):
        self.called.append(method)
        incarnation = -1 if self.target is None else self.process.incarnation
        call = SimpleNamespace(incarnation=incarnation, method=method)
        if self.target is None:
            return SimpleNamespace(call=call)
        task = asyncio.ensure_future(self._make(method, args))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return SimpleNamespace(call=call, task=task)

    async def _make(self, method, args):
        if method in self.deaths:
            raise RoleFailedError(self.name, "died: killed", "its.log", "died")
        function = getattr(self.target, method)
        try:
            if asyncio.iscoroutinefunction(function):
                return await function(*args)
            return await asyncio.to_thread(function, *args)
        except (OSError, ValueError) as error:
            kind = "waited" if isinstance(error, TimeoutError) else "raised"
            raise RoleFailedError(self.name, f"failed: {error}", "its.log", kind) from error

    async def answer(self, part, what, timeout_s):
        return await asyncio.shield(part.task)

    async def result(self, part, what, timeout_s):
        self.limits.append(timeout_s)
        return None if part.call.incarnation < 0 else await self.answer(part, what, timeout_s)


class Sender:
    """Makes the calls that vLLM's trainer engine makes."""

    def __init__(self, failure=None):
        self.client, self.failure, self.reasons = RelayedClient("generator_1", LIMIT_S), failure, []

    def send_weights(self, number, receiver, incarnation, *buckets):
        assert (receiver, incarnation, buckets) == ("generator_1", 4, ("bucket 0", "bucket 1"))
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


def load(sender, receiver, sender_deaths=(), receiver_deaths=()):
    """The result of a transfer, or its failure, and the roles."""
    roles = Role("trainer_0", sender, sender_deaths), Role("generator_1", receiver, receiver_deaths)

    async def run():
        transfer = WeightTransfer(roles[0], LIMIT_S)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await transfer.load(roles[1], 7, ["bucket 0", "bucket 1"], ["manifest"])
        except RoleFailedError as failure:
            await asyncio.sleep(0.05)  # what was told to the others arrives
            return failure

    return asyncio.run(run()), *roles


def test_the_calls_arrive_in_their_order_and_the_result_is_the_receivers():
    sender, receiver = Sender(), Receiver()
    result, _, role = load(sender, receiver)
    assert result == (7, "checksum", None)
    assert receiver.kinds == [("start", None), ("update", {"names": ["a"]}), ("finish", None)]
    assert sender.reasons == receiver.reasons == []
    assert role.limits == [LIMIT_S + _GRACE_S]


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
    roles = Role("trainer_0", Again()), Role("generator_1", receiver)

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
    failure, trainer, _ = load(sender, receiver)
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "tensor a is damaged" in sender.reasons[0] and "generator_1" in sender.reasons[0]
    assert trainer.called[-1] == "abandon_send"


def test_a_receiver_that_dies_ends_the_send():
    sender = Sender()
    failure, *_ = load(sender, Receiver(), receiver_deaths=("receive_weights", "answer_request"))
    assert (failure.role, failure.kind) == ("generator_1", "died")
    assert sender.reasons == ["generator_1 died: killed"]


def test_a_sender_that_fails_costs_the_receivers_process_and_the_reason_is_its_own():
    failure, _, role = load(Sender(failure=OSError("no buffer")), Receiver())
    assert (failure.role, failure.kind) == ("generator_1", "raised")
    assert "trainer_0 failed: no buffer" in str(failure)
    assert role.limits == [_GRACE_S], "nobody waits long for one that cannot be answered"


@pytest.mark.parametrize(
    ("deaths", "failure", "kind"),
    [
        (("next_request", "send_weights"), None, "died"),
        ((), TimeoutError("waited for generator_1"), "waited"),
    ],
)
def test_the_end_of_the_sender_and_a_wait_in_vain_are_the_senders_failure(deaths, failure, kind):
    receiver = Receiver()
    failed, *_ = load(Sender(failure=failure), receiver, sender_deaths=deaths)
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
    assert sender.reasons == ["generator_1 failed: the vLLM engine stopped"]


def test_nothing_is_sent_to_a_receiver_that_is_being_restarted():
    result, trainer, _ = load(Sender(), None)
    assert result is None and trainer.called == []
