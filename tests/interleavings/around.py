"""Replaces what surrounds a run's loops: prompts, checkpoints, Ray, files, groups' contents."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torchrl.data.replay_buffers.storages.base as storages
from interleavings.roles import Generator

import grpo_components.cluster.cluster as cluster_module
import grpo_components.exchange.replay_buffer as buffer_module
import grpo_components.records.receipts as receipts_module
from grpo_components.cluster.handles import Roles
from grpo_components.records.journal import Journal


class Prompts:
    """Prompts in their order; a checkpoint holds the position and which prompts ended untrained."""

    def __init__(self) -> None:
        self.drawn, self.ended = 0, []

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> tuple[dict[str, Any], int]:
        self.drawn += 1
        return {"prompt_index": self.drawn - 1}, 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "ended": list(self.ended)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.ended = state["drawn"], list(state["ended"])


async def _save_in_memory(self: Journal, step: int, roles: Roles, batch: Any) -> None:
    """Save as `Journal.save`, with the driver's state in memory."""
    if self._cfg.rollout_only:  # nobody would read it
        return
    held, buffered = self.held
    await roles.trainers.hold_state(in_background=False)
    folder = Path(f"step_{step}")
    await asyncio.gather(
        roles.trainers.write_state(folder),
        roles.buffer.write_state(folder / "state", [batch, *buffered]),
    )
    self._start = replace(self._start, driver=held, checkpoint=folder)


class Pages:
    """Adds the records of receipts to the books, in place of the file."""

    def __init__(self, books: Any) -> None:
        self.append, self.closed = books.follow, False

    def close(self) -> None:
        self.closed = True


class _Value:
    """A shared number of a process that shares nothing."""

    def __init__(self, kind: str, value: int = 0) -> None:
        self.value, self._lock = value, threading.RLock()

    def get_lock(self) -> Any:
        return self._lock


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """Context manager: replace what would need Ray, files or the contents of groups."""
    files: dict[tuple[str, str], Any] = {}

    def write(folder: Path, name: str, state: Any) -> None:
        files[f"{folder}", name] = copy.copy(state)

    with contextlib.ExitStack() as patches:
        for module, changes in {
            cluster_module: {
                "RayCluster": lambda *_: SimpleNamespace(scratch=None, why_no_room=lambda _: ""),
                "resource_use": dict,
                "_objects_in_scope": lambda: 0,
                "_HEARTBEAT_EVERY_S": math.inf,
            },
            receipts_module: {"ChainedFile": Pages},
            Journal: {"save": _save_in_memory},
            storages: {"mp": SimpleNamespace(RLock=threading.RLock, Value=_Value)},
            buffer_module: {
                "concatenate": list,
                "batch_hash": lambda batch: f"{[group.group_id for group in batch]}",
                "asdict": lambda summary: {"group_id": summary.group_id},
                "summarize": lambda group: Generator(1).summary(group),
                "write_state": write,
                "read_state": lambda folder, name: files[f"{folder}", name],
            },
        }.items():
            for name, value in changes.items():
                patches.enter_context(mock.patch.object(module, name, value))
        yield
