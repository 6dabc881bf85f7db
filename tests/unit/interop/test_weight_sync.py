"""A collector of torchrl, and a vLLM engine, with weights from our parameter server."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.weight_deltas import DeltaEncoder
from grpo_components.exchange.weights import BucketBuffers, pack_bucket
from grpo_components.interop.weight_sync import (
    ParameterServerScheme,
    load_into_module,
)


class Still(EnvBase):
    """Shows ones, and ends at once."""

    def __init__(self):
        super().__init__(batch_size=torch.Size([]))
        self.observation_spec = Composite(seen=Unbounded(shape=(2,)))
        self.action_spec = Unbounded(shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict=None, **_):
        return TensorDict(seen=torch.ones(2), done=torch.zeros(1, dtype=torch.bool))

    def _step(self, tensordict):
        return TensorDict(seen=torch.ones(2), reward=torch.ones(1), done=torch.ones(1) > 0)

    def _set_seed(self, seed):
        pass


def scheme_of(server, load=load_into_module):
    """A scheme with a server in this process, whose references are the values."""
    return ParameterServerScheme(server.newest, list, load)


def push(server, version, **tensors):
    buckets = [pack_bucket([(name, tensor)]) for name, tensor in tensors.items()]
    server.push(version, buckets, [manifest for manifest, _ in buckets])


@pytest.fixture
def server():
    return VLLMParameterServer()


@pytest.fixture
def policy():
    return TensorDictModule(nn.Linear(2, 1), in_keys=["seen"], out_keys=["action"])


def names(policy, weight, bias):
    """The tensors under the names that the policy's state dict has."""
    tensors = (torch.full((1, 2), weight), torch.full((1,), bias))
    return dict(zip(policy.state_dict(), tensors, strict=True))


def test_a_plain_collector_pulls_the_newest_weights(server, policy):
    scheme = scheme_of(server)
    collector = Collector(
        *(Still(), policy),
        frames_per_batch=1,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    )
    with pytest.raises(LookupError, match="no weights were pushed yet"):
        collector.update_policy_weights_()
    for version, weight in ((3, 2.0), (4, 5.0)):
        push(server, version, **names(policy, weight, 1.0))
        collector.update_policy_weights_()
        assert scheme.version == version
        assert next(iter(collector))["action"].item() == 2 * weight + 1
    with torch.no_grad():
        policy.module.bias.zero_()
    collector.update_policy_weights_()
    assert policy.module.bias.item() == 0.0, "what is loaded already is not loaded again"
    collector.shutdown()


def test_a_policy_of_its_own_receives_the_newest_weights(server, policy):
    scheme = scheme_of(server)
    scheme.init_on_receiver(model_id="policy", model=policy)
    scheme.connect()
    push(server, 1, **names(policy, 3.0, 0.0))
    assert scheme.receive() is not None and scheme.receive() is None
    assert policy(TensorDict(seen=torch.ones(2)))["action"].item() == 6.0


def test_weights_that_do_not_fit_are_refused_and_not_loaded(server, policy):
    scheme = scheme_of(server)
    scheme.init_on_receiver(model_id="policy", model=policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    first, second = before
    push(server, 1, **{first: torch.ones(1, 2)})
    with pytest.raises(ValueError, match=f"missing tensor {second}"):
        scheme.pull()
    push(server, 2, **{first: torch.ones(1, 3), second: torch.ones(1)})
    with pytest.raises(ValueError, match=f"{first} has shape"):
        scheme.pull()
    damaged = pack_bucket(list(names(policy, 1.0, 1.0).items()))
    damaged[1][0] ^= 1
    server.push(3, [damaged], [damaged[0]])
    with pytest.raises(ValueError, match=f"{first} is damaged"):
        scheme.pull()
    assert scheme.version == -1
    assert all(policy.state_dict()[name].equal(tensor) for name, tensor in before.items())


def test_pushes_of_deltas_are_rebuilt(server, policy):
    scheme, encoder = scheme_of(server), DeltaEncoder()
    scheme.init_on_receiver(model_id="policy", model=policy)
    chain = []
    for version, weight in ((1, 1.0), (2, 2.0), (3, 2.0)):
        tensors = list(names(policy, weight, 0.5).items())
        bucket = BucketBuffers(sum(t.nbytes for _, t in tensors), pinned=False).bucket()
        for name, tensor in tensors:
            bucket.add(name, tensor)
        delta = encoder.encode(version, bucket.close(), chain[-1][0] if chain else -1)
        server.push(version, [delta], [], chain)
        chain.append((version, [delta]))
        scheme.pull()
        assert policy.module.weight.unique().tolist() == [weight]
    assert scheme.version == 3
