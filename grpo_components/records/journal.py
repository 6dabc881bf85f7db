"""Keeps the records of a run consistent: its ledger (groups), receipts (events) and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_components.cluster.handles import Roles
from grpo_components.cluster.supervision import quiet_task
from grpo_components.cluster.weight_sync import WeightSync
from grpo_components.errors import ReplayStop
from grpo_components.exchange.ledger import Ledger
from grpo_components.records import checkpoint_folder
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import RunStart, Stateful, roll_back
from grpo_components.records.run_log import RunLog
from grpo_components.settings import Settings
from grpo_components.state_files import FORMAT, write_state
from grpo_components.training.step_result import StepResult

_SESSIONS = ("count", "calls", "trajectories")
"""Names of the counts, summed over the agent sessions of a step, that `commit` records."""


class Journal:
    """Keeps ledger, receipts and checkpoints of a run in agreement; restores or rolls back the run.

    The ledger tracks every group; receipts.jsonl records every event. All parts of a checkpoint are
    taken between the same two steps.
    """

    def __init__(
        self,
        cfg: Settings,
        start: RunStart,
        ledger: Ledger,
        prompts: Stateful,
        receipts: Receipts,
        log: RunLog,
    ) -> None:
        self._cfg, self._start, self._ledger, self._prompts = cfg, start, ledger, prompts
        self._receipts, self._log = receipts, log
        self._folder = Path(cfg.output_dir) / "checkpoints"
        self._versions: dict[int, int] = {}
        """Step of the last checkpoint -> its policy version."""
        self._evaluations: dict[int, Mapping[str, float]] = {}
        """Step of an evaluation since the last checkpoint -> its metrics."""
        self.held: tuple[dict[str, Any], list[Any]] = {}, []
        """For `save`: the driver's state after the last step, and the groups to be stored."""
        self._writing: asyncio.Task[None] | None = None

    async def commit(
        self, batch_hash: str, result: StepResult, sessions: Mapping[str, int] | None = None
    ) -> int:
        """Record a trained step and return its number; a replay first waits for the step's turn."""
        step = self._ledger.steps_done + 1
        await self._ledger.events.wait_turn("step", step=step)
        # No await from here on: else an event or a pull could be in receipts.jsonl but not in the
        # state that a resumed run starts from, or the other way round.
        mass, counts = result.metrics["off_policy/correction_mass"], result.token_versions
        outcome = {
            "token_versions": {str(version): n for version, n in sorted(counts.items()) if n},
            "correction_mass": mass if math.isfinite(mass) else None,
            "batch_hash": batch_hash,
            "tokens": {str(group): dict(causes) for group, causes in result.group_tokens.items()},
            **({"sessions": {key: sessions[key] for key in _SESSIONS}} if sessions else {}),
        }
        self._ledger.finish_step(result.policy_version, outcome)
        self.hold()
        return step

    def hold(self) -> None:
        """Keep the driver's state in memory for `save`; raise if a background save has failed."""
        state = {"ledger": self._ledger.state_dict(), "prompts": self._prompts.state_dict()}
        # References to the groups: the buffer's process may die before it has written them.
        self.held = state, [part for entry in self._ledger.stored() for part in entry.parts]
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def save_if_due(self, step: int, roles: Roles, batch: Any) -> None:
        """Save a checkpoint each n-th step and after the last; end replays after `replay_until`."""
        stops = step == self._cfg.replay_until
        if stops or step % self._cfg.save_every_n_steps == 0 or self._ledger.finished:
            await self.save(step, roles, batch)
        if stops:
            await self.finish()
            raise ReplayStop(step)

    async def save(self, step: int, roles: Roles, batch: Any) -> None:
        """Write a checkpoint of the held state; in the background, if `async_checkpoint` is set.

        Call it between two training steps. It first waits for the previous checkpoint.
        """
        await self.finish()
        if self._cfg.rollout_only:
            return
        await roles.trainers.hold_state(in_background=self._cfg.async_checkpoint)
        state, buffered = self.held
        # Nobody waits for it if the run ends with another error.
        self._writing = quiet_task(self._write(step, state, [batch, *buffered], roles))
        if not self._cfg.async_checkpoint:
            await self.finish()

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's evaluation to the step's checkpoint once both exist; update `best`."""
        self._evaluations[step] = metrics
        self._rate(step)

    async def restore(self, roles: Roles, weights: WeightSync) -> None:
        """Load the checkpoint that this attempt starts from, if any, into trainers and buffer.

        Unless the run is new, also publish the trainers' weights and load them into all generators.
        The driver's state is restored before, by `begin_run` or `roll_back`.
        """
        checkpoint, ledger = self._start.checkpoint, self._ledger
        self._evaluations = {}  # those of an attempt that was rolled back
        if checkpoint:
            if self._cfg.keep_best and checkpoint.parent == self._folder.resolve():
                checkpoint_folder.choose_best(self._folder, ledger.steps_done, self._cfg)
                self._versions = {ledger.steps_done: ledger.policy_version}
            await roles.trainers.load_state(checkpoint)
            await roles.buffer.read_state(checkpoint / "state")
        if self._start.attempt or checkpoint:
            await weights.restore()

    async def roll_back(self) -> None:
        """End this attempt, and start the next one from the last checkpoint or the beginning."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait([writing])  # its error is not raised
        self._receipts.close()
        self._start = roll_back(self._start, self._ledger, self._prompts)
        self._ledger.events.attempt = self._start.attempt
        self._receipts.begin_attempt()

    async def finish(self) -> None:
        """Wait until the last checkpoint has been written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def close(self) -> None:
        """Write the end record of the receipts, however the run ended."""
        self._receipts.close()

    async def _write(
        self, step: int, state: dict[str, Any], parts: list[Any], roles: Roles
    ) -> None:
        place = self._folder, step, self._start.identity.incarnation
        try:
            folder = await asyncio.to_thread(checkpoint_folder.begin, *place)
            failures = await asyncio.gather(
                roles.trainers.write_state(folder),
                roles.buffer.write_state(folder / "state", parts),
            )
            for failure in (*failures[0], failures[1]):
                if failure is not None:
                    raise OSError(failure)
            checkpoint = await asyncio.to_thread(self._publish, folder, step, state)
        except OSError as error:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(checkpoint_folder.clean, self._folder)
            last = await asyncio.to_thread(checkpoint_folder.latest, self._folder)
            problem = f"the checkpoint of step {step} could not be written: {error}"
            problem += f"; the last one is {last or 'none'}"
            self._report(problem, error)
        else:
            self._log.checkpoint(step, str(checkpoint))
            self._versions = {step: state["ledger"]["policy_version"]}
            self._rate(step)
            # A checkpoint in the background may end after the evaluation of a later one.
            later = {at: metrics for at, metrics in self._evaluations.items() if at > step}
            self._evaluations = later

    def _publish(self, folder: Path, step: int, state: dict[str, Any]) -> Path:
        whole = {**state, "identity": self._start.identity._asdict(), "format": FORMAT}
        write_state(folder / "state", "driver", whole)
        saved = OmegaConf.create(self._cfg.model_dump())
        OmegaConf.save(saved, folder / "state" / "config.yaml")
        return checkpoint_folder.publish(folder, step, self._cfg.keep_last_n)

    def _rate(self, step: int) -> None:
        """Write the evaluation of a step to its checkpoint, and point `best` at the best one.

        Does nothing until checkpoint and evaluation exist. Skips an evaluation of newer weights
        than the checkpoint's: a generator that restarts during an evaluation loads the newest.
        """
        metrics = self._evaluations.get(step)
        if not self._cfg.keep_best or metrics is None:
            return
        if metrics["eval/policy_version"] != self._versions.get(step):
            return
        checkpoint = self._folder / f"step_{step}"
        try:
            checkpoint_folder.rate(checkpoint, metrics, self._cfg)
            best = checkpoint_folder.choose_best(self._folder, step, self._cfg)
        except OSError as error:
            self._report(f"the evaluation of {checkpoint} could not be written: {error}", error)
        else:
            if best == checkpoint:
                value = metrics[self._cfg.keep_best]
                self._log.note(f"step {step}: best checkpoint, {self._cfg.keep_best} {value:.3f}")

    def _report(self, problem: str, error: OSError) -> None:
        if self._cfg.checkpoint_failure == "error":
            raise OSError(problem) from error
        self._log.note(problem)
