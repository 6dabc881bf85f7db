"""With `keep_policy_versions`, every version reaches its file, and late generators join from it."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from lib.role import stand_in_role
from safetensors.torch import save_file

from grpo_components.cluster.handles import (
    GeneratorHandle,
    ParameterServerHandle,
    Roles,
    TrainersHandle,
)
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.errors import RoleFailedError
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.parameter_server import VLLMParameterServer
from grpo_components.exchange.policy_versions import KeptVersions, VersionId
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import pack_bucket, snapshot_checksum, unpack_bucket


def weights(version):
    start = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    return {"a": start * (1 + 1e-5 * version), "b": start[0] + version}


class Trainer:
    """A rank whose weights follow from their version."""

    version = 0

    def gather_weights(self):
        return self.version

    def export_weights(self, version, base=None):
        bucket = pack_bucket(list(weights(version).items()))
        return bucket, bucket[0]


class Engine:
    """A generator that checks and keeps what it gets."""

    def __init__(self):
        self.loaded, self.sources = {}, []

    async def load_weights(self, version, bucket):
        self.loaded[version] = unpack_bucket(*bucket)
        self.sources.append(bucket)
        return version, snapshot_checksum([bucket[0]]), None

    def begin_attempt(self):
        self.loaded.clear()


class Server(VLLMParameterServer):
    """The real one; counts what it rebuilds."""

    def __init__(self, *versions):
        super().__init__(*versions)
        self.rebuilt = []

    def kept(self, attempt, version):
        self.rebuilt.append((attempt, version))
        return super().kept(attempt, version)


class Setting:
    def __init__(self, tmp_path, push_every=1, keeps=True):
        prompts = (({"prompt_index": i}, 0) for i in range(10**6))
        self.ledger = Ledger(StalenessContract(9, 1), 50, prompts)
        (tmp_path / "base").mkdir()
        save_file(weights(0), tmp_path / "base" / "model.safetensors")
        self.folders = str(tmp_path / "versions"), str(tmp_path / "base")
        self.trainer, self.engine = Trainer(), Engine()
        self.generator = GeneratorHandle(
            stand_in_role("generator_0", self.engine), self.ledger, 9.0, 9.0
        )
        trainer = stand_in_role("trainer_0", self.trainer)
        self.server_role = server = stand_in_role(
            "parameter_server", lambda: Server(self.folders), remembers="push"
        )
        self.roles = Roles(
            generators=[self.generator],
            buffer=SimpleNamespace(),
            trainers=TrainersHandle([trainer], self.ledger, 9.0, 9.0),
            server=ParameterServerHandle(server, 9.0, keeps_versions=keeps),
            references=None,
            reward_model=None,
        )
        self.weights = WeightSync(
            self.ledger,
            self.roles,
            push_every_n_steps=push_every,
            pull_every_m_rollouts=1,
            push_early=lambda step: False,
        )

    @property
    def server(self):
        return self.server_role.process.host.role

    async def step(self, skipped=False):
        self.trainer.version += not skipped
        await self.weights.push_if_due(self.trainer.version)
        self.ledger.finish_step(self.trainer.version)

    async def kept(self):
        """The versions in the files; each is checked."""
        await self.roles.server.wait_kept()
        kept = KeptVersions(*self.folders)
        for identity in kept.identities():
            found, expected = kept.state_dict(identity), weights(identity.version)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        return kept.identities()


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


def test_each_version_is_kept_also_where_it_is_not_published(tmp_path):
    async def run():
        setting = Setting(tmp_path, push_every=3)
        for number in range(7):
            await setting.step(skipped=number == 2)
        assert setting.ledger.published_version == 6
        assert await setting.kept() == [VersionId(0, version) for version in range(1, 7)]

    asyncio.run(run())


def test_a_rollback_has_versions_of_its_own(setting):
    async def run():
        for _ in range(3):
            await setting.step()
        setting.ledger.events.attempt = 1
        await setting.roles.server.begin_again()
        setting.trainer.version = 2
        await setting.weights.restore()
        await setting.step()
        numbers = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
        assert await setting.kept() == [VersionId(*each) for each in numbers]

    asyncio.run(run())


def test_a_generator_that_joins_late_gets_its_weights_from_the_files(setting):
    async def run():
        for _ in range(4):
            await setting.step()
        await setting.weights.pull(setting.generator, "group 0")
        assert setting.server.rebuilt == [], "it did not restart"
        early = setting.engine.loaded.pop(4)
        await setting.generator.role.replay_restart("died")
        assert setting.server.rebuilt == [(0, 4)]
        late = setting.engine.loaded[4]
        assert late.keys() == early.keys()
        assert all(torch.equal(late[name], early[name]) for name in late)
        assert setting.generator.held_version == -1, "it holds no base of deltas"
        await setting.step()
        await setting.weights.pull(setting.generator, "group 1")
        assert setting.server.rebuilt == [(0, 4)] and setting.generator.held_version == 5

    asyncio.run(run())


def test_a_late_generator_refuses_a_damaged_version(setting, tmp_path):
    async def run():
        await setting.step()
        await setting.kept()
        path = tmp_path / "versions" / "attempt_0" / "version_1"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        with pytest.raises(RoleFailedError) as failed:
            await setting.generator.role.replay_restart("died")
        assert failed.value.role == "parameter_server"
        assert str(path) in failed.value.what
        assert setting.engine.loaded == {}

    asyncio.run(run())


def test_without_the_key_nothing_is_written(tmp_path):
    async def run():
        setting = Setting(tmp_path, push_every=2, keeps=False)
        for _ in range(3):
            await setting.step()
        await setting.generator.role.replay_restart("died")
        assert not (tmp_path / "versions").exists() and setting.server.rebuilt == []

    asyncio.run(run())
