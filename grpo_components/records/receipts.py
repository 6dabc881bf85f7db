"""Receipts: one JSON record per training step that says what it was made of, for the audit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.recent_events import RecentEvents
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipt_chain import ChainedFile
from grpo_components.records.run_identity import RunIdentity
from grpo_components.replay.event_order import Event
from grpo_components.settings import Settings

FORMAT = 2


class Receipts:
    """Writes `receipts.jsonl`: for each attempt a start record, one per step, and an end record.

    The fields are explained in docs/receipts.md; `python -m grpo_components.audit` checks them.
    Records are appended, flushed one by one, and each is chained to the one before. What they say
    about groups and weights comes from the ledger's events.

    Args:
        path: of the file; its folder exists.
        ledger: of the run, with its event order.
        attempt: which attempt of the run this is, from 0.
        max_staleness: the contract's bound, in policy versions.
        groups_per_step: groups that one step trains.
        group_size: responses per group.
        generators: names of all generators; one that never pulls is listed, too.
        identity: of the run and its process; None if the folder has none.
    """

    def __init__(
        self,
        path: Path,
        ledger: Ledger,
        attempt: int,
        *,
        max_staleness: int,
        groups_per_step: int,
        group_size: int,
        generators: Iterable[str] = (),
        identity: RunIdentity | None = None,
    ) -> None:
        self._path, self._ledger, self._generators = path, ledger, tuple(generators)
        self._settings = {
            "max_staleness": max_staleness,
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            **(identity.as_dict() if identity else {}),
        }
        self.begin_attempt(attempt)
        ledger.events.listen(self._add)

    def begin_attempt(self, attempt: int) -> None:
        """Open the file and write the start record; the ledger is restored, if it has to be.

        Args:
            attempt: which attempt of the run begins.
        """
        ledger, self._attempt = self._ledger, attempt
        self._file = ChainedFile(self._path)
        self._step, self._policy_version = ledger.steps_done, ledger.policy_version
        self._recent = RecentEvents(ledger.living(), self._generators)
        self._write(
            "start",
            format=FORMAT,
            steps_done=self._step,
            policy_version=self._policy_version,
            num_steps=ledger.num_steps,
            **self._settings,
        )

    def step(
        self,
        step: int,
        policy_version: int,
        token_versions: Mapping[int, int],
        correction_mass: float,
        batch_hash: str,
    ) -> None:
        """Write the record of one training step, after `Ledger.finish_step`.

        Args:
            step: from 1.
            policy_version: of the trainers after the step; a skipped step leaves it as it was.
            token_versions: number of trained tokens by the policy version that sampled them; each
                token counts once, whatever the number of epochs over the batch.
            correction_mass: mean off-policy weight of the trained tokens.
            batch_hash: of the batch.

        Raises:
            OSError: naming the file, if it cannot be written.
        """
        versions = {version: n for version, n in sorted(token_versions.items()) if n}
        self._write(
            "step",
            step=step,
            trained_from=self._policy_version,
            policy_version=policy_version,
            token_versions=versions,
            max_staleness=StalenessContract.staleness(min(versions), self._policy_version)
            if versions
            else None,
            correction_mass=correction_mass if math.isfinite(correction_mass) else None,
            batch_hash=batch_hash,
            **self._recent.take(),
        )
        self._step, self._policy_version = step, policy_version

    def close(self) -> None:
        """Write the end record of the attempt: which groups and prompts are left; close the file.

        Closing a second time does nothing.

        Raises:
            OSError: if it cannot be written; not if the run has failed, by an error of its own.
        """
        if self._file.closed:
            return
        finished = self._step == self._ledger.num_steps
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            self._write_end(finished)
        self._file.close()

    def _write_end(self, finished: bool) -> None:
        recent = self._recent.take()
        del recent["trained"]  # the batch is a field of step records only
        self._write(
            "end",
            finished=finished,
            step=self._step,
            policy_version=self._policy_version,
            **recent,
            living=[
                {
                    "group_id": entry.group_id,
                    "prompt_index": entry.prompt_index,
                    "epoch": entry.epoch,
                    "state": entry.state,
                }
                for entry in self._ledger.living()
            ],
            waiting=[
                {"prompt_index": prompt["prompt_index"], "epoch": epoch}
                for prompt, epoch in self._ledger.waiting_prompts
            ],
        )

    def _add(self, event: Event) -> None:
        self._recent.add(event)

    def _write(self, record: str, **fields: Any) -> None:
        self._file.append({"record": record, "attempt": self._attempt, **fields})


def build_receipts(cfg: Settings, ledger: Ledger, attempt: int, identity: RunIdentity) -> Receipts:
    """The receipts of a run.

    Args:
        cfg: checked by preflight.
        ledger: of the run, with its event order.
        attempt: which attempt of the run this is, from 0.
        identity: of the run and this process.
    """
    return Receipts(
        Path(cfg.output_dir) / "receipts.jsonl",
        ledger,
        attempt,
        max_staleness=cfg.max_staleness,
        groups_per_step=cfg.groups_per_step,
        group_size=cfg.group_size,
        generators=[f"generator_{i}" for i in range(cfg.num_generators)],
        identity=identity,
    )
