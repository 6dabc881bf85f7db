"""Keeps a judge's replies on disk, by the content of the request."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_components.whole_files import write_whole


class ReplyCache:
    """Keeps a judge's replies as files named by the hash of the request.

    Any number of processes may share it. The first reply that is stored for a request stays, so
    that all of them use the same one.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def find(self, key: str) -> str | None:
        """Return the reply stored under a key; None if there is none, or its file is damaged."""
        path = self._path(key)
        if path is None:
            return None
        try:
            reply = json.loads(path.read_text(encoding="utf-8"))["reply"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return reply if isinstance(reply, str) else None

    @contextlib.contextmanager
    def asking(self, key: str, timeout_s: float) -> Iterator[None]:
        """Context manager: others that want to ask the same wait until it ends."""
        path = self._path(key)
        if path is None:
            yield
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        place = path.with_suffix(".lock")
        lock = FileLock(place)  # the kernel releases it with its process
        with contextlib.suppress(Timeout):
            lock.acquire(timeout_s)
        try:
            yield
        finally:
            if lock.is_locked:
                place.unlink(missing_ok=True)  # who waited finds the reply, or asks
            lock.release()

    def store(self, key: str, reply: str, *, replace: bool) -> str:
        """Store a reply; return the one that is stored then, which may be another process's."""
        path = self._path(key)
        if path is None:
            return reply
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        write_whole(mine, json.dumps({"reply": reply}))
        try:
            if replace:
                mine.replace(path)
            else:
                os.link(mine, path)  # unlike a rename, it never replaces another process's reply
        except FileExistsError:
            if (stored := self.find(key)) is not None:
                return stored
            mine.replace(path)  # what is there is damaged
        finally:
            mine.unlink(missing_ok=True)
        return reply

    def _path(self, key: str) -> Path | None:
        return None if self._folder is None else self._folder / key[:2] / f"{key}.json"
