"""Receipts: what every training step was made of, one JSON record per step, for the audit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_components.errors import ReplayError
from grpo_components.exchange.ledger import GroupEvent, Ledger
from grpo_components.records.receipt_chain import ChainedFile
from grpo_components.records.run_identity import RunIdentity
from grpo_components.replay.recorded_run import Original, read_original
from grpo_components.settings import Settings

FORMAT = 2


class Receipts:
    """Writes `receipts.jsonl`: a start record, one record per step, an end record.

    The fields are explained in docs/receipts.md; `python -m grpo_components.audit` checks them.
    The file is appended to and flushed record by record; each record is chained to the one before.

    Args:
        path: of the file; its folder exists.
        ledger: of the run. Its events are drained here, and by nobody else.
        attempt: which life of the run.
        max_staleness: the contract's bound, in policy versions.
        groups_per_step: groups that one step trains.
        group_size: responses per group.
        generators: names of all, so that those that never pulled are listed too.
        original: what the run to replay trained; None for a new run.
        identity: of the run and its process; None where no folder has it.
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
        original: Original | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        self._path = path
        self._settings = {
            "max_staleness": max_staleness,
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "generators": tuple(generators),
            "identity": identity,
        }
        self._file = ChainedFile(path)
        self._ledger, self._attempt = ledger, attempt
        self._step, self._policy_version = ledger.steps_done, ledger.policy_version
        self._generators: dict[str, dict[str, Any]] = {
            name: {"version": 0, "checksum": None} for name in self._settings["generators"]
        }
        self._acknowledged: list[dict[str, Any]] = []
        self._original = original
        self._write(
            "start",
            format=FORMAT,
            steps_done=self._step,
            policy_version=self._policy_version,
            num_steps=ledger.num_steps,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            group_size=group_size,
            **(identity.as_dict() if identity else {}),
        )

    def next_attempt(self, attempt: int) -> Receipts:
        """Receipts of the run's next attempt, in the same file, once these are closed.

        Args:
            attempt: which life of the run.
        """
        assert self._file.closed, "one attempt writes at a time"
        return Receipts(self._path, self._ledger, attempt, **self._settings)

    def acknowledged(self, generator: str, version: int, checksum: str, published: str) -> None:
        """Record that a generator has loaded weights; called at each pull.

        Args:
            generator: its name.
            version: policy version that it loaded.
            checksum: of the snapshot as the generator received it.
            published: checksum of the snapshot as the trainer pushed it.

        Raises:
            RuntimeError: if the two are not the same.
            ReplayError: if the original's weights of this version were others.
        """
        if checksum != published:
            raise RuntimeError(
                f"{generator} loaded weights of version {version} with checksum {checksum}, "
                f"the trainer published {published}"
            )
        if self._original and self._original.checksums.get(version, checksum) != checksum:
            raise ReplayError(
                f"the replay diverged before step {version + 1}: its weights of version {version} "
                f"have checksum {checksum}, the original's {self._original.checksums[version]}"
            )
        self._ledger.turns.note("load", role=generator, version=version, checksum=checksum)
        self._generators[generator] = {"version": version, "checksum": checksum}
        self._acknowledged.append(
            {
                "generator": generator,
                "version": version,
                "checksum": checksum,
                "published": published,
            }
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
            policy_version: that the step left behind; after a skipped step it is the one before.
            token_versions: how many tokens of which policy version were trained, each token
                counted once, whatever the number of epochs over the batch.
            correction_mass: mean off-policy weight of the trained tokens.
            batch_hash: of the batch.

        Raises:
            ReplayError: if the original trained another batch.
        """
        if self._original and self._original.batch_hashes[step] != batch_hash:
            raise ReplayError(
                f"the replay diverged in step {step}: its batch has the hash {batch_hash}, the "
                f"original's {self._original.batch_hashes[step]}"
            )
        versions = {version: n for version, n in sorted(token_versions.items()) if n}
        events = self._ledger.drain_events()
        self._write(
            "step",
            step=step,
            trained_from=self._policy_version,
            policy_version=policy_version,
            token_versions=versions,
            max_staleness=self._policy_version - min(versions) if versions else None,
            correction_mass=correction_mass if math.isfinite(correction_mass) else None,
            batch_hash=batch_hash,
            generators=self._generators,
            acknowledged=self._acknowledged,
            groups=_amounts(events),
            trained=[
                {"prompt_index": e.prompt_index, "epoch": e.epoch, "group_id": e.group_id}
                for e in events
                if e.kind == "trained"
            ],
            events=[_plain(event) for event in events],
        )
        self._step, self._policy_version = step, policy_version
        self._acknowledged = []

    def close(self) -> None:
        """Write the end record, however the run ended: which groups and prompts are left.

        Raises:
            OSError: if it cannot be written; not where the run has failed, which is told already.
        """
        if self._file.closed:
            return
        finished = self._step == self._ledger.num_steps
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            self._write_end(finished)
        self._file.close()

    def _write_end(self, finished: bool) -> None:
        events = self._ledger.drain_events()
        self._write(
            "end",
            finished=finished,
            step=self._step,
            policy_version=self._policy_version,
            generators=self._generators,
            acknowledged=self._acknowledged,
            groups=_amounts(events),
            events=[_plain(event) for event in events],
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

    def _write(self, record: str, **fields: Any) -> None:
        self._file.append({"record": record, "attempt": self._attempt, **fields})


def build_receipts(cfg: Settings, ledger: Ledger, attempt: int, identity: RunIdentity) -> Receipts:
    """The receipts of a run.

    Args:
        cfg: checked by preflight.
        ledger: of the run.
        attempt: which life of the run.
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
        original=read_original(cfg.replay_events) if cfg.replay_events else None,
        identity=identity,
    )


def _amounts(events: Iterable[GroupEvent]) -> dict[str, Any]:
    """How many groups met which end, with the mean of their response lengths."""
    lengths: dict[str, list[float | None]] = {}
    reasons = {"stale": None, "failed": None}  # in this order, and whatever else there is
    for event in events:
        lengths.setdefault(event.reason or event.kind, []).append(event.response_tokens)
        if event.reason not in (None, "filtered"):
            reasons[event.reason] = None

    def amount(what: str) -> dict[str, Any]:
        known = [tokens for tokens in lengths.get(what, []) if tokens is not None]
        return {
            "count": len(lengths.get(what, [])),
            "response_tokens_mean": sum(known) / len(known) if known else None,
        }

    return {
        "issued": len(lengths.get("issued", [])),
        "generated": amount("generated"),
        "filtered": amount("filtered"),
        "dropped": {reason: amount(reason) for reason in reasons},
        "trained": amount("trained"),
    }


def _plain(event: GroupEvent) -> dict[str, Any]:
    """An event under its kind, with what only that kind has to say."""
    said: dict[str, Any] = {event.kind: event.group_id}
    if event.kind == "issued":
        said |= {"prompt_index": event.prompt_index, "epoch": event.epoch}
    elif event.kind == "generated":
        said["response_tokens"] = event.response_tokens
    elif event.kind == "dropped":
        said |= {"reason": event.reason, "reissue": event.reissue}
    return said
