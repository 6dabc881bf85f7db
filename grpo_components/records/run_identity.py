"""Who wrote a file of a run: the id that a run keeps over its resumes, and that of one process."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RunIdentity:
    """Written into the config, the receipts and every checkpoint of a run, for the audit."""

    run: str
    """The same over all attempts; 32 hexadecimal digits."""
    incarnation: str
    """Of the process that drives the run; every start has its own, 32 hexadecimal digits."""

    def as_dict(self) -> dict[str, str]:
        """Both ids, by name."""
        return asdict(self)


def new_identity(run: str | None = None) -> RunIdentity:
    """The identity of a process that starts a run or goes on with one.

    Args:
        run: id of the run that it goes on with; None for a new run.
    """
    return RunIdentity(run or secrets.token_hex(16), secrets.token_hex(16))
