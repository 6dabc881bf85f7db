"""Checkpoints of a run: the driver's account and every role's state, of one moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from grpo_components.cluster.handles import ReplayBufferHandle, TrainersHandle
from grpo_components.exchange.ledger import Ledger
from grpo_components.records.checkpoint_folder import (
    begin,
    choose_best,
    clean,
    latest,
    publish,
    rate,
)
from grpo_components.records.resume import RunStart, Stateful
from grpo_components.records.run_identity import RunIdentity
from grpo_components.records.run_log import RunLog
from grpo_components.settings import Settings
from grpo_components.state_files import write_state


class Checkpoints:
    """Saves and restores; what has to be consistent is read between two training steps.

    Args:
        folder: of all checkpoints of the run.
        cfg: of the run, kept with each of them.
        ledger: of the run.
        prompts: that the ledger draws from.
        writes: whether there are any.
        keep_last_n: checkpoints that stay; None keeps all.
        keep_best: metric of the evaluations by which one more stays, as `best`; None is none.
        failure: whether a checkpoint that cannot be written ends the run or is only told.
        in_background: write beside the next steps, from a copy.
        saved: told step and folder of each.
        note: told what failed.
        identity: of the run and its process, kept with each of them.
        verify: raises an OSError where the folder is no longer the run's.
    """

    def __init__(
        self,
        folder: Path,
        cfg: Settings,
        ledger: Ledger,
        prompts: Stateful,
        *,
        writes: bool,
        keep_last_n: int | None,
        keep_best: str | None,
        failure: Literal["error", "warn"],
        in_background: bool,
        saved: Callable[[int, str], None],
        note: Callable[[str], None],
        identity: RunIdentity,
        verify: Callable[[], None],
    ) -> None:
        self._identity, self._verify = identity, verify
        self._folder, self._cfg, self._ledger, self._prompts = folder, cfg, ledger, prompts
        self._keep_last_n, self._failure = keep_last_n, failure
        self._in_background, self._saved, self._note = in_background, saved, note
        self._writes, self._keep_best = writes, keep_best
        self._versions: dict[int, int] = {}
        """Policy version of the last checkpoint, by step."""
        self._evaluations: dict[int, Mapping[str, float]] = {}
        """The last one, by step."""
        self._held: dict[str, Any] = {}
        self._buffered: list[Any] = []
        self._writing: asyncio.Task[None] | None = None

    def hold(self) -> None:
        """Keep the driver's state for `save`; right after the step's receipt, without an await.

        So no event and no pull lies between the receipt and the state that a resumed run has.

        Raises:
            OSError: if a checkpoint could not be written in the background meanwhile.
        """
        self._held = {"ledger": self._ledger.state_dict(), "prompts": self._prompts.state_dict()}
        # As parts: the buffer may lose its process, and what it holds, before all is written.
        self._buffered = [p for e in self._ledger.in_state("buffered") for p in e.parts]
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def save(self, step: int, trainers: TrainersHandle, buffer: ReplayBufferHandle) -> None:
        """Write a checkpoint, once the one before is written; the trainers stand between two steps.

        Args:
            step: training steps done, when `hold` was called.
            trainers: all ranks.
            buffer: the replay buffer.

        Raises:
            OSError: if it cannot be written, with `failure: error`.
        """
        await self.finish()
        if not self._writes:
            return
        await trainers.hold_state(in_background=self._in_background)
        self._writing = asyncio.create_task(
            self._write(step, self._held, self._buffered, trainers, buffer)
        )
        # A run that ends by another failure leaves this one unasked for, not unretrieved.
        self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not self._in_background:
            await self.finish()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rate the checkpoint of a step, once there is one, by what an evaluation has measured.

        Args:
            step: training steps done, when the evaluation began.
            metrics: of the evaluation, with the version that it saw.
        """
        self._evaluations = {step: metrics}
        self._rate(step)

    async def finish(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            OSError: if it could not be, with `failure: error`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def settled(self) -> None:
        """Wait until nothing is being written, whatever came of it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.wait([writing])

    async def restore(
        self, checkpoint: Path, trainers: TrainersHandle, buffer: ReplayBufferHandle
    ) -> None:
        """Restore the roles that have a state; `begin_run` has restored the driver's.

        Args:
            checkpoint: its folder.
            trainers: all ranks.
            buffer: the replay buffer; what it holds is forgotten.
        """
        if self._keep_best and checkpoint.parent == self._folder.resolve():
            choose_best(self._folder, self._keep_best, self._ledger.steps_done)
            self._versions = {self._ledger.steps_done: self._ledger.policy_version}
        await trainers.load_state(checkpoint)
        await buffer.read_state(checkpoint / "state")

    async def _write(
        self,
        step: int,
        state: dict[str, Any],
        buffered: list[Any],
        trainers: TrainersHandle,
        buffer: ReplayBufferHandle,
    ) -> None:
        try:
            self._verify()
            folder = await asyncio.to_thread(begin, self._folder, step)
            failures = await asyncio.gather(
                trainers.write_state(folder), buffer.write_state(folder / "state", buffered)
            )
            for failure in (*failures[0], failures[1]):
                if failure is not None:
                    raise OSError(failure)
            self._verify()
            checkpoint = await asyncio.to_thread(self._publish, folder, step, state)
        except OSError as error:
            with contextlib.suppress(OSError):  # a full disk is not left fuller
                self._verify()  # and another run's folder not emptier
                await asyncio.to_thread(clean, self._folder)
            last = await asyncio.to_thread(latest, self._folder)
            problem = f"the checkpoint of step {step} could not be written: {error}"
            problem += f"; the last one is {last or 'none'}"
            if self._failure == "error":
                raise OSError(problem) from error
            self._note(problem)
        else:
            self._saved(step, str(checkpoint))
            self._versions = {step: state["ledger"]["policy_version"]}
            self._rate(step)

    def _rate(self, step: int) -> None:
        """Compare a checkpoint with the best, where it is whole and an evaluation saw its weights.

        A generator that was restarted during an evaluation brings newer weights into it.
        """
        metrics = self._evaluations.get(step)
        if not self._keep_best or metrics is None:
            return
        if metrics["eval/policy_version"] != self._versions.get(step):
            return
        checkpoint = self._folder / f"step_{step}"
        try:
            rate(checkpoint, metrics)
            best = choose_best(self._folder, self._keep_best, step)
        except OSError as error:
            problem = f"the evaluation of {checkpoint} could not be kept with it: {error}"
            if self._failure == "error":
                raise OSError(problem) from error
            self._note(problem)
        else:
            if best == checkpoint:
                value = metrics[self._keep_best]
                self._note(f"step {step}: best checkpoint, {self._keep_best} {value:.3f}")

    def _publish(self, folder: Path, step: int, state: dict[str, Any]) -> Path:
        whole = {**state, "identity": self._identity.as_dict()}
        write_state(folder / "state", "driver", whole)
        saved = OmegaConf.create(self._cfg.model_dump())
        OmegaConf.save(saved, folder / "state" / "config.yaml")
        return publish(folder, step, self._keep_last_n)


def build_checkpoints(
    cfg: Settings, ledger: Ledger, prompts: Stateful, run_log: RunLog, beginning: RunStart
) -> Checkpoints:
    """The checkpoints that a config asks for.

    Args:
        cfg: checked by preflight.
        ledger: of the run.
        prompts: that the ledger draws from.
        run_log: tells of them.
        beginning: of the run.
    """
    return Checkpoints(
        Path(cfg.output_dir) / "checkpoints",
        cfg,
        ledger,
        prompts,
        writes=not cfg.rollout_only,
        keep_last_n=cfg.keep_last_n,
        keep_best=cfg.keep_best,
        failure=cfg.checkpoint_failure,
        in_background=cfg.async_checkpoint,
        saved=run_log.checkpoint,
        note=run_log.note,
        identity=beginning.identity,
        verify=beginning.lock.verify,
    )
