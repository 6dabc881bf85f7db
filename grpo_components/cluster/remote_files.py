"""Brings a run's files from nodes without a shared file system to the run's folder, through Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from grpo_components.cluster import node_side
from grpo_components.cluster.nodes import on_node

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the folder of a run."""
_STATE, _PROOF = "state", "driver.json"
"""What ranks read of a checkpoint, and a file that every checkpoint has there."""
_PART_BYTES = 64 * 2**20


class RemoteFiles:
    """Copies files between the driver's folder of a run and other nodes' parts of it."""

    def __init__(self, output_dir: Path, scratch: Path) -> None:
        self._output_dir, self._scratch = output_dir, scratch
        self._seen: dict[str, dict[str, int]] = {}
        """Bytes of each file that were brought, by node."""
        self._bringing = asyncio.Lock()

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes that do not see the run's folder."""
        return list(self._seen)

    def add_node(self, node_id: str) -> None:
        """Include a node that does not see the run's folder."""
        self._seen.setdefault(node_id, {})

    async def bring(self) -> None:
        """Bring what is new on every node but checkpoints, of which there may be half a file.

        A node that cannot be reached is left for later.
        """
        for node_id in self.nodes:
            with contextlib.suppress(RayError):
                await self._bring(node_id, without=CHECKPOINTS)

    def bring_last(self, timeout_s: float) -> None:
        """Bring what is new on every node but checkpoints, when the event loop has ended."""
        for node_id in self.nodes:
            with contextlib.suppress(RayError):  # a time-out, too
                while new := ray.get(self._ask(node_id, without=CHECKPOINTS), timeout=timeout_s):
                    self._write(node_id, new)

    async def bring_checkpoint(self, folder: Path, nodes: Iterable[str]) -> None:
        """Bring a checkpoint that was written whole, and remove it on the nodes."""
        below = str(folder.relative_to(self._output_dir))
        for node_id in self._seen.keys() & set(nodes):
            try:
                await self._bring(node_id, below=f"{below}/")
                await on_node(node_id, node_side.remove_files, str(self._output_dir), below)
            except RayError as error:
                problem = " ".join(str(error).split())
                raise OSError(f"a node's part of it is lost: {problem}") from error
            seen = self._seen[node_id]
            for name in [each for each in seen if each.startswith(f"{below}/")]:
                del seen[name]

    async def _bring(self, node_id: str, **which: str) -> None:
        async with self._bringing:
            while new := await self._ask(node_id, **which):
                await asyncio.to_thread(self._write, node_id, new)

    def _ask(self, node_id: str, *, below: str = "", without: str = "\n") -> Any:
        folder, seen = str(self._output_dir), self._seen[node_id]
        return on_node(node_id, node_side.new_bytes, folder, seen, below, without)

    def _write(self, node_id: str, new: list[tuple[str, int, bytes]]) -> None:
        node_side.write_files(str(self._output_dir), new)
        for name, offset, content in new:
            self._seen[node_id][name] = offset + len(content)

    async def path_on(self, node_id: str, checkpoint: Path) -> Path:
        """Return a path under which a node can read a checkpoint's state; copy it if need be."""
        folder = checkpoint.resolve()
        if await on_node(node_id, node_side.has_file, str(folder / _STATE / _PROOF)):
            return folder
        target = self._scratch / folder.name
        for file in sorted(each for each in (folder / _STATE).rglob("*") if each.is_file()):
            for offset in range(0, max(1, file.stat().st_size), _PART_BYTES):
                part = await asyncio.to_thread(_read, file, offset)
                name = str(file.relative_to(folder))
                await on_node(node_id, node_side.write_files, str(target), [(name, offset, part)])
        return target


def _read(file: Path, offset: int) -> Any:
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(_PART_BYTES)
