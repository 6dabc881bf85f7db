"""Weights from the trainers to the generators: push every n steps, pull every m rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from grpo_components.cluster.handles import GeneratorHandle, Roles
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.weights import snapshot_checksum

Acknowledge = Callable[[str, int, str, str], None]


class WeightSync:
    """Publishes the trainers' weights, brings generators to them, and compares the checksums.

    Args:
        ledger: of the run; knows which version is published.
        roles: of the run.
        push_every_n_steps: training steps from one push to the next.
        pull_every_m_rollouts: rollouts of a generator from one pull to the next.
        push_early: by training step, whether an evaluation needs its weights published.
        acknowledge: gets generator, version, loaded checksum and published checksum of each pull.
    """

    def __init__(
        self,
        ledger: Ledger,
        roles: Roles,
        *,
        push_every_n_steps: int,
        pull_every_m_rollouts: int,
        push_early: Callable[[int], bool],
        acknowledge: Acknowledge,
    ) -> None:
        self._ledger, self._order, self._roles = ledger, ledger.turns, roles
        self._push_every_n_steps = push_every_n_steps
        self._pull_every_m_rollouts = pull_every_m_rollouts
        self._push_early, self._acknowledge = push_early, acknowledge
        for generator in roles.generators:
            generator.role.recover = self._pull_after_restart(generator)

    async def push_if_due(self, policy_version: int) -> float:
        """Push every n steps, and when an evaluation follows.

        Args:
            policy_version: of the trainers, after their step.

        Returns:
            Seconds that training stood still.
        """
        due = 1 if self._push_early(self._ledger.steps_done + 1) else self._push_every_n_steps
        if policy_version - self._ledger.published_version < due:
            return 0.0
        return await self.push()

    async def push(self) -> float:
        """Publish the trainers' weights; packing them overlaps the next step.

        Returns:
            Seconds that training stood still.
        """
        began = time.perf_counter()
        version = await self._roles.trainers.gather_weights()
        buckets, manifests = self._roles.trainers.export_weights(version)
        await self._order.take("push", version=version)
        await self._roles.server.push(version, buckets, manifests)
        await self._ledger.publish(version)
        return time.perf_counter() - began

    async def pull_if_due(self, generator: GeneratorHandle, entry: LedgerEntry) -> None:
        """Pull every m rollouts, and when a group needs newer weights than its generator has.

        Args:
            generator: that samples the group.
            entry: the group; its `start_version` is set.
        """

        def due() -> bool:
            counted = generator.rollouts_since_pull >= self._pull_every_m_rollouts
            newer = not self._order.pinned and generator.version < self._ledger.published_version
            return (counted and newer) or generator.version < entry.needed_version

        if self._order.replaying or due():  # a replay pulls where the recorded run did
            async with generator.swapping:
                if self._order.replaying or due():  # one pull serves all that waited for it
                    await self.pull(generator, f"group {entry.group_id}")
        generator.rollouts_since_pull += 1
        entry.start_version = generator.version

    async def pull(self, generator: GeneratorHandle, cause: str) -> None:
        """Load the newest published weights, where they are newer than the generator's.

        Args:
            generator: that loads them.
            cause: what needs them, for the event log.

        Raises:
            RuntimeError: if it loaded other bytes than the trainers published.
        """
        generator.rollouts_since_pull = 0
        if not await self._ledger.should_pull(generator.name, generator.version, cause):
            return
        version, buckets, references = await self._roles.server.newest()
        loaded = await generator.load_weights(version, buckets)
        if loaded is None:
            return
        generator.version, checksum = loaded
        manifests = await self._roles.trainers.manifests(references)
        self._acknowledge(generator.name, version, checksum, snapshot_checksum(manifests))
        await self._roles.server.acknowledge(generator.name, version)

    async def restore(self) -> None:
        """Publish the trainers' weights, also older ones, and bring every generator to them."""
        await self.push()
        living = list(self._roles.living_generators())
        await asyncio.gather(*(generator.begin_attempt() for generator in living))
        for generator in living:
            generator.version = -1  # whatever it has is of another attempt
        await asyncio.gather(*(self.pull(generator, "restore") for generator in living))

    def _pull_after_restart(self, generator: GeneratorHandle) -> Callable[[], Awaitable[None]]:
        async def pull() -> None:
            generator.version = 0  # a new process has the base model's weights
            await self.pull(generator, "restart")

        return pull
