"""Files that are replaced whole: written under a name of nobody's, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(target: Path, text: str, durable: bool = False) -> None:
    """Write a file, or leave the one that was there as it was.

    The unfinished file is made exclusively and beside the target, so that no link or file which
    somebody put into the folder is followed or overwritten. A link, pipe or file in the target's
    own place is replaced, not written to.

    Args:
        target: of the text; its folder exists.
        text: written as UTF-8.
        durable: on the disk before the target is replaced.

    Raises:
        OSError: if it cannot be written, as where the target is a folder.
    """
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
