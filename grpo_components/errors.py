"""Errors that a user sees: for a wrong config, a failed role, or a run that cannot go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from grpo_components.plain_text import one_line, shortened


class ConfigError(ValueError):
    """A value or a component of the config is wrong; restarting a process would not help.

    `str` gives one line of at most `MAX_MESSAGE` characters; the attributes have the whole texts.
    """

    def __init__(self, key: str, problem: str, allowed: str, user_traceback: str = "") -> None:
        super().__init__(key, problem, allowed, user_traceback)  # pickle passes these again
        self.key, self.problem, self.allowed = key, problem, allowed
        self.user_traceback = user_traceback

    def __str__(self) -> str:
        fields = (one_line(text) for text in (self.key, self.problem, self.allowed))
        key, problem, allowed = fields
        key = shortened(key, 100)
        label = "; " if allowed.startswith("did you mean ") else "; allowed: "
        label *= bool(allowed)  # a component's own error may not say what is allowed
        rest = MAX_MESSAGE - len(f"{key}: {label}")
        allowed = shortened(allowed, max(120, rest - len(problem)))
        return f"{key}: {shortened(problem, rest - len(allowed))}{label}{allowed}"


def fail(key: str, problem: str, allowed: str) -> NoReturn:
    """Raise a `ConfigError` about a config key; `allowed` says what the key may have."""
    raise ConfigError(key, problem, allowed)


def shown(value: Any) -> str:
    """Format a value for an error message: as in YAML (null, true), cut to 60 characters."""
    text = (
        str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


class DryRunEnd(Exception):
    """Ends a run with `dry_run: true`; `str` is the report, `problems` say what does not fit."""

    def __init__(self, text: str, problems: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.problems = problems


class ReplayError(RuntimeError):
    """A replay (a run that repeats a recorded run) cannot follow the record."""


class ReplayStop(Exception):
    """Ends a replay that has repeated all steps up to `replay_until`."""


class StarvedError(RuntimeError):
    """`dynamic_sampling` discarded too many groups in a row: each had only equal rewards."""


class FailedSamplesError(RuntimeError):
    """Too many samples (responses) failed; the message has one error and the file of all errors."""


class SkippedStepsError(RuntimeError):
    """Too many training steps in a row were skipped; the message has the reason."""


FailureKind = Literal["died", "silent", "raised", "waited", "refused", "lost"]


class RoleFailedError(RuntimeError):
    """A role (a process of the run) died, raised an error, or did not answer in time."""

    def __init__(self, role: str, what: str, log: str, kind: FailureKind) -> None:
        super().__init__(role, what, log, kind)
        self.role, self.what, self.log = role, what, log
        self.kind: FailureKind = kind

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"{self.what} (found by {self.role})"
        return f"{self.role} {self.what}\n  its log: {self.log}"

    def with_history(self, history: str) -> RoleFailedError:
        """Return a copy of this failure that also says why the role is not restarted."""
        return RoleFailedError(self.role, f"{self.what}; {history}", self.log, self.kind)


class RoleLostError(RuntimeError):
    """A role (process) or a group's data is lost for good, and the run goes on without it."""

    def __init__(self, role: str, what: str = "was given up") -> None:
        super().__init__(f"{role} {what}")
        self.role = role


MAX_MESSAGE = 285
"""Maximum characters of a config error, not counting the prefix "config error: "."""


class DisagreementError(RuntimeError):
    """Trainer and generator compute different logprobs with the same policy version."""
