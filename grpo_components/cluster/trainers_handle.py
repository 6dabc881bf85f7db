"""Calls all trainer ranks together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from grpo_components.cluster.batch import Batch
from grpo_components.cluster.calls import Part
from grpo_components.cluster.role import Role
from grpo_components.exchange.ledger import Ledger
from grpo_components.training.step_result import StepResult

CHECKPOINT_LANE = "checkpoint"
"""Name of the thread in which a role writes checkpoints while its main thread works."""


class TrainersHandle:
    """Calls all trainer ranks; each rank gets the same calls in the same order."""

    def __init__(
        self,
        roles: Sequence[Role],
        ledger: Ledger,
        train_step_s: float,
        weights_s: float,
    ) -> None:
        self._roles, self._ledger = roles, ledger
        self._train_step_s, self._weights_s = train_step_s, weights_s
        self.turn: Callable[[], AbstractAsyncContextManager[dict[str, float]]]
        self.turn = partial(nullcontext, {})
        """Returns a context manager, entered while the ranks need all of their GPUs: see `Turns`.

        It gives metrics of the wait for it.
        """

    async def train_step(self, batch: Batch, advantages: NDArray[Any]) -> StepResult:
        """Train on one batch; every rank takes its share.

        Args:
            batch: B groups of G responses.
            advantages: [B, G] advantages of the responses.
        """
        steps_done = self._ledger.steps_done
        call = "train_step", batch.packed, advantages.ravel(), steps_done
        async with self.turn() as waits:
            result = (await self._on_all(*call))[0]
        for name, seconds in waits.items():
            result.metrics[name] = seconds
        return result

    async def gather_weights(self) -> int:
        """Gather the sharded weights and return their policy version."""
        return (await self._on_all("gather_weights"))[0]

    def export_weights(
        self, version: int, base: int | None = None
    ) -> tuple[list[Part], list[Part]]:
        """Start to pack the gathered weights, while the next step may run."""
        args = (version,) if base is None else (version, base)
        exports = [
            role.submit("export_weights", *args, num_returns=2, lane="export")
            for role in self._roles
        ]
        buckets, manifests = zip(*exports, strict=True)
        return list(buckets), list(manifests)

    async def manifests(self, references: Sequence[Any]) -> list[Any]:
        """Wait for the ranks' manifests and return them."""
        exports = zip(self._roles, references, strict=True)
        return [
            await role.answer(part, "export_weights", self._weights_s) for role, part in exports
        ]

    async def hold_state(self, *, in_background: bool) -> None:
        """Keep the present state for `write_state`; as a copy if that runs in the background."""
        await self._on_all("hold_state", in_background)

    async def write_state(self, folder: Path) -> list[str | None]:
        """Write the held state to a checkpoint; return why it failed, or None, for each rank."""
        return await self._on_all("write_state", str(folder), lane=CHECKPOINT_LANE)

    async def load_state(self, checkpoint: Path) -> None:
        """Load the state of a checkpoint on every rank."""
        async with self.turn():
            await self._on_all("load_state", str(checkpoint))

    async def _on_all(self, method: str, *args: Any, lane: str = "main") -> list[Any]:
        """Call a method of all ranks at the same time: they wait for each other in collectives."""
        limit_s = self._train_step_s
        calls = (role.call(method, *args, timeout_s=limit_s, lane=lane) for role in self._roles)
        return await asyncio.gather(*calls)
