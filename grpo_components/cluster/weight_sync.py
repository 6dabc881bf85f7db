"""Brings weights from trainers to generators: push every n steps, pull every m rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from grpo_components.cluster.handles import GeneratorHandle, Roles
from grpo_components.errors import RoleLostError
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.weight_probe import WeightProbe
from grpo_components.exchange.weights import pushed_layers, snapshot_checksum


class WeightSync:
    """Publishes the trainers' weights and loads them into the generators, comparing checksums."""

    def __init__(
        self,
        ledger: Ledger,
        roles: Roles,
        *,
        push_every_n_steps: int,
        pull_every_m_rollouts: int,
        push_early: Callable[[int], bool],
        probe_kl: float | None = None,
    ) -> None:
        self._ledger, self._roles = ledger, roles
        self._push_every_n_steps = push_every_n_steps
        self._pull_every_m_rollouts = pull_every_m_rollouts
        self._push_early, self._probe = push_early, WeightProbe(probe_kl)
        self._pushed: tuple[list[Any], str, dict[str, int] | None] = [], "", None
        """Manifest references, checksum and layer hashes of the snapshot that was pulled last."""
        self._ever_pushed, self._reading_manifests = False, asyncio.Lock()

    async def push_if_due(
        self, policy_version: int, probe_logprobs: Sequence[float] = ()
    ) -> dict[str, float]:
        """Push the weights every n steps, and whenever an evaluation or a generator needs them.

        Returns metrics. If a generator has slept, so that it has no weights, and nothing was pushed
        yet, the weights are pushed even after a skipped step.
        """
        due = 1 if self._push_early(self._ledger.steps_done + 1) else self._push_every_n_steps
        if not self._ever_pushed and any(g.version < 0 for g in self._roles.living_generators()):
            due = 0
        began = time.perf_counter()
        is_due = policy_version - self._ledger.published_version >= due
        if is_due:
            self._probe.pushed(policy_version, probe_logprobs)
            await self.push()
        seconds = time.perf_counter() - began if is_due else 0.0
        return {"time/push": seconds, "push/bytes": self._roles.server.nbytes}

    async def push(self) -> None:
        """Publish the trainers' weights, so that generators can pull them."""
        server = self._roles.server
        push = await server.begin()
        await self._ledger.events.take("push", version=push.version)
        await server.push(push)
        self._ever_pushed = True
        await self._ledger.publish(push.version)

    async def pull_if_due(self, generator: GeneratorHandle, entry: LedgerEntry) -> None:
        """Pull weights before a group: every m rollouts, or when the group needs newer ones."""
        ledger = self._ledger

        def due() -> bool:
            counted = generator.rollouts_since_pull >= self._pull_every_m_rollouts
            newer = not ledger.weights_pinned and generator.version < ledger.published_version
            return (counted and newer) or generator.version < entry.needed_version

        recording = ledger.events.recording  # in a replay, `pull` follows the record
        if recording or due():
            async with generator.swapping:
                if recording or due():  # one pull serves all rollouts that waited for it
                    await self.pull(generator, f"group {entry.group_id}")
        generator.rollouts_since_pull += 1
        # A generator that is being restarted has version 0; its recovery loads the newest one.
        entry.start_version = max(generator.version, entry.needed_version)

    async def pull(self, generator: GeneratorHandle, cause: str) -> None:
        """Load the newest published weights into a generator, if they are newer than its own."""
        generator.rollouts_since_pull = 0
        if not await self._ledger.should_pull(generator.name, generator.version, cause):
            return
        loads, ended = generator.loads, asyncio.Event()
        earlier = loads[-1:]
        loads.append(ended)
        try:
            # In a replay, a pull asks at once, as recorded, and loads after the earlier pulls.
            newest = await self._roles.server.newest(generator.held_version)
            for each in earlier:
                await each.wait()
            if generator.loads is loads:  # else a restart came, and pulls the newest
                await self._load(generator, *newest)
        finally:
            ended.set()
            loads.remove(ended)

    async def _load(
        self, generator: GeneratorHandle, version: int, buckets: list[Any], references: list[Any]
    ) -> None:
        began = time.perf_counter()
        if self._roles.transfer is None:
            loaded = await generator.load_weights(version, buckets)
        else:
            loaded = await self._roles.transfer.load(generator.role, version, buckets, references)
        generator.load_s = time.perf_counter() - began
        if loaded is None:  # a restart came, and pulls the newest
            return
        generator.version, checksum, probe = loaded
        generator.held_version = version
        pushed, layers = await self._pushed_hashes(references)
        if checksum != pushed:
            raise RuntimeError(
                f"{generator.name} loaded weights of version {version} with checksum {checksum}, "
                f"the trainers pushed {pushed}"
            )
        checksums = {"checksum": checksum, "published": pushed}
        self._ledger.events.note("load", role=generator.name, version=version, **checksums)
        self._probe.check(generator.name, version, probe, layers)

    async def _pushed_hashes(self, references: list[Any]) -> tuple[str, dict[str, int] | None]:
        """Return a snapshot's checksum and hashes by layer, read once for all generators."""
        async with self._reading_manifests:
            if self._pushed[0] != references:
                manifests = await self._roles.trainers.manifests(references)
                hashes = snapshot_checksum(manifests), pushed_layers(manifests)
                self._pushed = references, *hashes
            return self._pushed[1:]

    async def restore(self) -> None:
        """Publish the restored weights; load them into all generators, even over newer ones."""
        self._probe.forget()
        await self.push()
        living = self._roles.living_generators
        await _unless_lost(generator.begin_attempt() for generator in living())
        for generator in living():
            generator.version = generator.held_version = -1  # of another attempt
        await _unless_lost(self.pull(generator, "restore") for generator in living())

    async def recover(self, role: str) -> None:
        """Bring a restarted generator, replay buffer or parameter server up to date."""
        for generator in self._roles.generators:
            if generator.name == role:
                return await self._pull_after_restart(generator)
        if role == self._roles.buffer.role.name:
            await self._roles.buffer.refill()
        elif role == self._roles.server.role.name:
            await self._roles.server.push_again()

    async def _pull_after_restart(self, generator: GeneratorHandle) -> None:
        generator.version, generator.held_version = 0, -1  # the base model's weights
        generator.loads = []
        await self.pull(generator, f"restart {generator.role.process.incarnation}")


async def _unless_lost(calls: Iterable[Awaitable[None]]) -> None:
    """Run calls on generators concurrently; ignore those on generators that are given up."""

    async def finished(call: Awaitable[None]) -> None:
        with contextlib.suppress(RoleLostError):
            await call

    await asyncio.gather(*map(finished, calls))
