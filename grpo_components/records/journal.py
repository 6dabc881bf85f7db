"""Keeps ledger, receipts and checkpoints of a run in agreement with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_components.cluster.handles import Roles
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.errors import ReplayStop
from grpo_components.exchange.ledger import Ledger
from grpo_components.records.checkpoints import Checkpoints
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart, Stateful, roll_back
from grpo_components.training.step_result import StepResult

_SESSIONS = ("count", "calls", "trajectories")
"""What a step says of the agents' sessions."""


class Journal:
    """Commits each step to ledger, receipts and checkpoints together; saves, restores, rolls back.

    The ledger is the account of every group, a receipt is a step's record in receipts.jsonl.
    """

    def __init__(
        self,
        start: RunStart,
        ledger: Ledger,
        prompts: Stateful,
        receipts: Receipts,
        checkpoints: Checkpoints,
        *,
        save_every_n_steps: int,
        replay_until: int | None = None,
    ) -> None:
        self._start, self._ledger, self._prompts = start, ledger, prompts
        self._receipts, self._checkpoints = receipts, checkpoints
        self._save_every_n_steps, self._replay_until = save_every_n_steps, replay_until

    async def commit(
        self, batch_hash: str, result: StepResult, sessions: Mapping[str, int] | None = None
    ) -> int:
        """Commit a trained step; a replay first waits for the turn of this step."""
        step = self._ledger.steps_done + 1
        await self._ledger.events.wait_turn("step", step=step)
        # No await from here on: a resumed run would miss an event between receipt and state to
        # save, or record it in a second receipt.
        mass, counts = result.metrics["off_policy/correction_mass"], result.token_versions
        outcome = {
            "token_versions": {str(version): n for version, n in sorted(counts.items()) if n},
            "correction_mass": mass if math.isfinite(mass) else None,
            "batch_hash": batch_hash,
            "tokens": {str(group): dict(causes) for group, causes in result.group_tokens.items()},
            **({"sessions": {key: sessions[key] for key in _SESSIONS}} if sessions else {}),
        }
        self._ledger.finish_step(result.policy_version, outcome)
        self._checkpoints.hold()
        return step

    async def save_if_due(self, step: int, roles: Roles, batch: Any) -> None:
        """Write the committed state as a checkpoint, every n steps and after the last step."""
        stops = step == self._replay_until
        if stops or step % self._save_every_n_steps == 0 or self._ledger.finished:
            await self._checkpoints.save(step, roles.trainers, roles.buffer, batch)
        if stops:
            await self._checkpoints.finish()
            raise ReplayStop(step)

    async def restore(self, roles: Roles, weights: WeightSync) -> None:
        """Load this attempt's checkpoint, if any, into trainers and buffer.

        Unless the run is new, also publish the trainers' weights and load them into all generators.
        """
        if self._start.checkpoint:
            await self._checkpoints.restore(self._start.checkpoint, roles.trainers, roles.buffer)
        if self._start.attempt or self._start.checkpoint:
            await weights.restore()

    async def roll_back(self) -> int:
        """End this attempt, and start the next one from the last checkpoint or the beginning."""
        await self._checkpoints.wait_idle()
        self._receipts.close()
        self._start = roll_back(self._start, self._ledger, self._prompts)
        self._ledger.events.attempt = self._start.attempt
        self._receipts.begin_attempt(self._start.attempt)
        return self._start.attempt

    async def finish(self) -> None:
        """Wait until the last checkpoint has been written."""
        await self._checkpoints.finish()

    def close(self) -> None:
        """Write the end record of the receipts, however the run ended."""
        self._receipts.close()
