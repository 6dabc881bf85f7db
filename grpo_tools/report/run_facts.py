"""Reads when, where and with which versions a run ran, for the top of its report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from grpo_components.shapes import fits
from grpo_tools.report.run_files import Number, Record, read_records
from grpo_tools.report.safe_text import escaped
from grpo_tools.report.unread import ObjectReader, Unread

_MAX_HOSTS, _MAX_VERSIONS, _MAX_FACT_CHARS = 4, 20, 60
_START = b'{"event": "start"'


class _Role(TypedDict):
    node: str
    attempt: int


@dataclass
class RunFacts:
    """When, how long, where and with which versions a run ran; None where no file says so."""

    began: datetime | None = None
    seconds: float | None = None
    """How long the run has been running, without the pauses between its processes."""
    hosts: list[str] = field(default_factory=list)
    """Names of the machines on which the roles of the last attempt ran."""
    cpus: int | None = None
    """CPUs that the roles of the last attempt shared."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of libraries in the last attempt, by name."""

    def items(self) -> dict[str, str]:
        """Return the known facts as plain text, by name."""
        found: dict[str, str] = {}
        if self.began is not None:
            found["began"] = f"{self.began:%Y-%m-%d %H:%M} UTC"
        if self.seconds is not None:
            found["duration"] = duration(self.seconds)
        if self.hosts:
            more = len(self.hosts) - _MAX_HOSTS
            names = ", ".join(name[:_MAX_FACT_CHARS] for name in self.hosts[:_MAX_HOSTS])
            found["host"] = names + (f" and {more} more" if more > 0 else "")
        if self.cpus is not None:
            found["host"] = f"{found.get('host', '')} ({self.cpus} CPUs)".strip()
        if self.versions:
            each = [f"{k} {v}"[:_MAX_FACT_CHARS] for k, v in self.versions.items()]
            found["versions"] = ", ".join(each[:_MAX_VERSIONS])
        return found

    def html(self) -> str:
        """Return the known facts as one line of HTML."""
        parts = (
            f"<span>{name} <b>{escaped(fact)}</b></span>" for name, fact in self.items().items()
        )
        return f'<p class="run-facts">{"".join(parts)}</p>'


def read_facts(folder: Path) -> RunFacts:
    """Read the facts from a run's events and roles; what these lack is None or empty."""
    unread, facts = Unread(folder), RunFacts()  # others tell what they cannot read of these files
    spans = [*_spans(folder / "logs/events.jsonl", unread)]
    if spans:
        facts.began = _moment(spans[0][0]["time"])
        facts.seconds = sum(max(0.0, end - start["time"]) for start, end in spans)
        last, _ = spans[-1]
        facts.cpus = last["cpus"] if fits(last.get("cpus"), int) else None
        if fits(last.get("libraries"), dict):
            facts.versions = {str(k): str(v) for k, v in last["libraries"].items()}
    roles = list(read_records(folder / "logs/roles.jsonl", _Role, unread))
    last_attempt = max((role["attempt"] for role in roles), default=0)
    nodes = (role["node"] for role in roles if role["attempt"] == last_attempt)
    facts.hosts = [*dict.fromkeys(nodes)]
    return facts


def duration(seconds: float) -> str:
    """Return a duration in words, e.g. 3 min 20 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _spans(path: Path, unread: Unread) -> Iterator[tuple[Record, float]]:
    """Yield the start event of each process of the run, and the time of its last event.

    Only the first and last lines of each process are parsed: there may be millions between them.
    """
    start: Record | None = None
    before = b""
    for _, _, line in unread.lines(path):
        if line.startswith(_START):
            if start is not None:
                yield start, _time(before, start)
            start = _read(line) or start
        before = line
    if start is not None:
        yield start, _time(before, start)


def _read(line: bytes) -> Record | None:
    record = ObjectReader().read(line)
    return record if record is not None and fits(record.get("time"), Number) else None


def _time(line: bytes, start: Record) -> float:
    record: Any = _read(line) or start
    return float(record["time"])


def _moment(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):  # a damaged record has an impossible time
        return None
