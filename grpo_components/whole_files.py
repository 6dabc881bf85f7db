"""Writes a file atomically: writes a temporary file under a random name, then renames it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(target: Path, content: str | bytes, durable: bool = False) -> None:
    """Replace a file as a whole; on failure the old file stays unchanged.

    The temporary file is created exclusively in the target's folder, so a link or file that someone
    else put there is neither followed nor overwritten. A link or pipe at the target's own path is
    replaced, not written to.
    """
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
