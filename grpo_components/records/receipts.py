"""Writes receipts: for each training step a JSON record of what it trained, for the audit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.data.curriculum import Curriculum
from grpo_components.exchange.ledger import Ledger, LedgerEntry
from grpo_components.exchange.recent_events import RecentEvents
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipt_chain import ChainedFile
from grpo_components.records.run_identity import RunIdentity
from grpo_components.replay.event_order import Event
from grpo_components.settings import Settings

FORMAT = 2
SESSION_FIELDS = ("count", "calls", "trajectories")
"""What a step record says of the agents' sessions."""


class Receipts:
    """Writes `receipts.jsonl`: for each attempt a start record, one per step, and an end record.

    The fields are explained in docs/receipts.md; `grpo audit` checks them.
    Each record is appended, flushed, and chained to the previous one by a hash. What records say
    about groups and weights comes from the ledger's events.
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
        curriculum: Curriculum | None = None,
    ) -> None:
        self._path, self._ledger, self._generators = path, ledger, tuple(generators)
        self._settings = {
            "max_staleness": max_staleness,
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            **(identity.as_dict() if identity else {}),
            **(curriculum.describe() if curriculum else {}),
            **ledger.reuse.describe(),
        }
        self.begin_attempt(attempt)
        ledger.events.listen(self._add)

    def begin_attempt(self, attempt: int) -> None:
        """Open the file and write the start record, from a ledger that is already restored."""
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
            carried={
                str(entry.group_id): tokens
                for entry in ledger.living()
                if (tokens := self._tokens(entry)) is not None
            },
        )

    def step(
        self,
        step: int,
        policy_version: int,
        token_versions: Mapping[int, int],
        correction_mass: float,
        batch_hash: str,
        sessions: Mapping[str, int] | None = None,
        group_tokens: Mapping[int, Mapping[str, int]] | None = None,
    ) -> None:
        """Write the record of one training step; call it after `Ledger.finish_step`."""
        versions = {version: n for version, n in sorted(token_versions.items()) if n}
        recent = self._recent.take()
        batch = [
            recent["groups"][kind] for kind in ("trained", "reused") if kind in recent["groups"]
        ]
        tokens = sum(each["count"] * (each["response_tokens_mean"] or 0.0) for each in batch)
        sampled = round(tokens * self._settings["group_size"])
        counts = {name: sessions[name] for name in SESSION_FIELDS} if sessions else None
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
            trained_share=sum(versions.values()) / sampled if sampled else None,
            batch_hash=batch_hash,
            **({"sessions": counts} if counts else {}),
            tokens={str(group): dict(causes) for group, causes in (group_tokens or {}).items()},
            **recent,
        )
        self._step, self._policy_version = step, policy_version

    def close(self) -> None:
        """Write the attempt's end record, with the groups and prompts left over; close the file.

        A second call does nothing.
        """
        if self._file.closed:
            return
        finished = self._step == self._ledger.num_steps
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            self._write_end(finished)
        self._file.close()

    def _write_end(self, finished: bool) -> None:
        recent = self._recent.take()
        del recent["trained"]  # the groups of a batch: only a step record has them
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
                    "tokens": self._tokens(entry),
                }
                for entry in self._ledger.living()
            ],
            waiting=[
                {"prompt_index": prompt["prompt_index"], "epoch": epoch}
                for prompt, epoch in self._ledger.waiting_prompts
            ],
        )

    def _add(self, event: Event) -> None:
        if event["event"] == "drop":  # the ledger still has the entries
            living = {entry.group_id: entry for entry in self._ledger.living()}
            event = event | {"tokens": {g: self._tokens(living[g]) for g in event["groups"]}}
        self._recent.add(event)

    def _tokens(self, entry: LedgerEntry) -> int | None:
        """Return the number of tokens sampled for a group; None until it is generated."""
        mean = entry.response_tokens
        return None if mean is None else round(mean * self._settings["group_size"])

    def _write(self, record: str, **fields: Any) -> None:
        self._file.append({"record": record, "attempt": self._attempt, **fields})


def build_receipts(
    cfg: Settings,
    ledger: Ledger,
    attempt: int,
    identity: RunIdentity,
    curriculum: Curriculum | None,
) -> Receipts:
    """Build `Receipts` from the config."""
    return Receipts(
        Path(cfg.output_dir) / "receipts.jsonl",
        ledger,
        attempt,
        max_staleness=cfg.max_staleness,
        groups_per_step=cfg.groups_per_step,
        group_size=cfg.group_size,
        generators=[f"generator_{i}" for i in range(cfg.num_generators)],
        identity=identity,
        curriculum=curriculum,
    )
