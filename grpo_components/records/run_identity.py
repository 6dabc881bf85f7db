"""Identifies a run and the process that drives it, by ids in the run's files, for the audit."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RunIdentity:
    """The ids that config, receipts and every checkpoint of a run contain."""

    run: str
    """Id of the run, the same in all attempts; 32 hexadecimal digits."""
    incarnation: str
    """Id of the driver's process, new at every start; 32 hexadecimal digits."""

    def as_dict(self) -> dict[str, str]:
        """Return both ids, by name."""
        return asdict(self)


def new_identity(run: str | None = None) -> RunIdentity:
    """Make the identity of a process that starts or resumes a run."""
    return RunIdentity(run or secrets.token_hex(16), secrets.token_hex(16))
