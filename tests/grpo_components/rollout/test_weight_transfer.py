"""Real weights through vLLM's transfer engines over gloo: exact, checked, and never half in use."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_components.exchange.weights import pack_bucket
from grpo_components.rollout.open_sender import open_sender

PROMPTS = [[5, 6, 7, i + 1] for i in range(8)]
LIMIT_S = 60


def weights(path):
    return load_file(path / "model.safetensors")


def snapshot(path, ranks=2):
    """The buckets of a push by several ranks."""
    tensors = list(weights(path).items())
    return [pack_bucket(tensors[rank::ranks]) for rank in range(ranks)]


def submit(engine, max_tokens=24):
    return [
        engine.submit(ids, max_tokens=max_tokens, temperature=1.0, seed=i, stop_token_ids=[])
        for i, ids in enumerate(PROMPTS)
    ]


def done(futures):
    return [future.result(timeout=LIMIT_S) for future in futures]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


class Relay:
    """Stands for the driver: makes the sender's calls in the receiver, both in this process."""

    def __init__(self, workers=1, timeout_s=20.0):
        self.sender = open_sender(
            "gloo", "cpu", workers=workers, timeout_s=timeout_s, host="127.0.0.1"
        )
        self.timeout_s, self.number, self.kinds = timeout_s, 0, []
        self.pool = ThreadPoolExecutor(4)

    def send(self, incarnation, buckets):
        self.number += 1
        return self.pool.submit(
            self.sender.send_weights, self.number, "generator_0", incarnation, *buckets
        )

    def push(self, engine, version, buckets, announced=None, incarnation=0):
        """Send a snapshot; `announced` replaces the manifests that the receiver gets."""
        from grpo_components.rollout.weight_receiver import IncomingWeights

        manifests = announced or [manifest for manifest, _ in buckets]
        incoming = IncomingWeights(manifests, "trainer_0", self.timeout_s)
        received = engine.receive_weights(version, incoming)
        sent, number, answered = self.send(incarnation, buckets), self.number, False
        try:
            while request := self.sender.next_request(number, "generator_0", answered):
                self.kinds.append(request[0])
                incoming.ask(*request).result(timeout=LIMIT_S)
                answered = True
            sent.result(timeout=LIMIT_S)
        except Exception as error:
            self.sender.abandon_send(number, "generator_0", repr(error))
            incoming.abandon(repr(error))
            raise
        finally:
            received.exception(timeout=LIMIT_S)
        return received.result()


@pytest.fixture
def relay(build_engine):
    made = []

    def make(**options):
        made.append(Relay(**options))
        return made[-1]

    yield make
    for each in made:
        each.pool.shutdown()


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_weights_that_were_sent_are_those_of_the_object_store_and_of_a_fresh_engine(
    make_engine, checkpoints, relay, kind
):
    old, new = checkpoints / f"{kind}_A", checkpoints / f"{kind}_B"
    engine, way = make_engine(old, weight_transfer="gloo"), relay()
    before = done(submit(engine))
    way.push(engine, 3, snapshot(new))
    sent = done(submit(engine))
    way.push(engine, 4, snapshot(old, ranks=1))
    assert way.kinds == ["init", "start", "update", "finish", "start", "update", "finish"]
    assert_same(done(submit(engine)), before)
    engine.load_weights(5, weights(new)).result(timeout=LIMIT_S)
    assert_same(done(submit(engine)), sent)
    assert_same(done(submit(make_engine(new))), sent)
    assert {int(v) for each in sent for v in each.token_versions} == {3}
