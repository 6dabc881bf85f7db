"""Brings weights from trainers to generators: push every n steps, pull every m rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpo_components.cluster.handles import GeneratorHandle, Roles
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.weights import snapshot_checksum


class WeightSync:
    """Publishes the trainers' weights and loads them into the generators, comparing checksums.

    Args:
        ledger: ledger of the run; holds the published version and records each push and pull.
        roles: handles of the run's roles.
        push_every_n_steps: training steps from one push to the next.
        pull_every_m_rollouts: rollouts of a generator from one pull to the next.
        push_early: function of a training step (from 1); returns whether an evaluation after that
            step needs its weights.
    """

    def __init__(
        self,
        ledger: Ledger,
        roles: Roles,
        *,
        push_every_n_steps: int,
        pull_every_m_rollouts: int,
        push_early: Callable[[int], bool],
    ) -> None:
        self._ledger, self._roles = ledger, roles
        self._push_every_n_steps = push_every_n_steps
        self._pull_every_m_rollouts = pull_every_m_rollouts
        self._push_early = push_early
        self._pushed: tuple[list[Any], str] = [], ""
        """References to the manifests of the snapshot pulled last, and its checksum."""
        self._reading_manifests = asyncio.Lock()
        for generator in roles.generators:
            generator.role.recover = self._pull_after_restart(generator)

    async def push_if_due(self, policy_version: int) -> float:
        """Push the weights every n steps, and whenever an evaluation needs them.

        Args:
            policy_version: the trainers' policy version after their step.

        Returns:
            Seconds that training stood still.
        """
        due = 1 if self._push_early(self._ledger.steps_done + 1) else self._push_every_n_steps
        if policy_version - self._ledger.published_version < due:
            return 0.0
        return await self.push()

    async def push(self) -> float:
        """Publish the trainers' weights; they are packed while the next step runs.

        Returns:
            Seconds that training stood still.
        """
        began = time.perf_counter()
        version = await self._roles.trainers.gather_weights()
        buckets, manifests = self._roles.trainers.export_weights(version)
        await self._ledger.events.take("push", version=version)
        await self._roles.server.push(version, buckets, manifests)
        await self._ledger.publish(version)
        return time.perf_counter() - began

    async def pull_if_due(self, generator: GeneratorHandle, entry: LedgerEntry) -> None:
        """Pull weights every m rollouts, and when a group needs newer ones than its generator has.

        Args:
            generator: generator that will sample the group.
            entry: ledger entry of the group; its `start_version` is set here.
        """
        ledger = self._ledger

        def due() -> bool:
            counted = generator.rollouts_since_pull >= self._pull_every_m_rollouts
            newer = not ledger.weights_pinned and generator.version < ledger.published_version
            return (counted and newer) or generator.version < entry.needed_version

        replaying = ledger.events.replaying  # in a replay, `pull` follows the recording
        if replaying or due():
            async with generator.swapping:
                if replaying or due():  # one pull serves all rollouts that waited for it
                    await self.pull(generator, f"group {entry.group_id}")
        generator.rollouts_since_pull += 1
        entry.start_version = generator.version

    async def pull(self, generator: GeneratorHandle, cause: str) -> None:
        """Load the newest published weights, if they are newer than the generator's.

        Args:
            generator: generator that loads the weights.
            cause: what needs the weights, for the event log.

        Raises:
            RuntimeError: the generator's checksum differs from that of the pushed weights.
        """
        generator.rollouts_since_pull = 0
        if not await self._ledger.should_pull(generator.name, generator.version, cause):
            return
        version, buckets, references = await self._roles.server.newest()
        if self._roles.transfer is None:
            loaded = await generator.load_weights(version, buckets)
        else:
            loaded = await self._roles.transfer.load(generator.role, version, buckets, references)
        if loaded is None:
            return
        generator.version, checksum = loaded
        pushed = await self._pushed_checksum(references)
        if checksum != pushed:
            raise RuntimeError(
                f"{generator.name} loaded weights of version {version} with checksum {checksum}, "
                f"the trainers pushed {pushed}"
            )
        checksums = {"checksum": checksum, "published": pushed}
        self._ledger.events.note("load", role=generator.name, version=version, **checksums)
        await self._roles.server.acknowledge(generator.name, version)

    async def _pushed_checksum(self, references: list[Any]) -> str:
        """Return the checksum of a pushed snapshot; hundreds of generators may ask for it."""
        async with self._reading_manifests:
            if self._pushed[0] != references:
                manifests = await self._roles.trainers.manifests(references)
                self._pushed = references, snapshot_checksum(manifests)
            return self._pushed[1]

    async def restore(self) -> None:
        """Publish the trainers' weights, even older ones, and load them into every generator."""
        await self.push()
        living = list(self._roles.living_generators())
        await asyncio.gather(*(generator.begin_attempt() for generator in living))
        for generator in living:
            generator.version = -1  # its weights are those of another attempt
        await asyncio.gather(*(self.pull(generator, "restore") for generator in living))

    def _pull_after_restart(self, generator: GeneratorHandle) -> Callable[[], Awaitable[None]]:
        async def pull() -> None:
            generator.version = 0  # a new process has the base model's weights
            await self.pull(generator, "restart")

        return pull
