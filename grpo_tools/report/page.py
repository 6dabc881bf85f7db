"""Writes the report of a run: one static HTML page that loads nothing from the network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from typing_extensions import TypedDict

from grpo_components.files import ANSWERS, FAILURES
from grpo_components.shapes import fits
from grpo_components.files import write_whole
from grpo_tools.report.books import books_section
from grpo_tools.report.curves import MAX_OTHER_CHARTS, metric_charts
from grpo_tools.report.difficulty import difficulty_charts
from grpo_tools.report.dropped import dropped_section
from grpo_tools.report.held_out import held_out_table
from grpo_tools.report.history import history_tables, phases_table, state_line
from grpo_tools.report.page_parts import PageParts, clock, controls
from grpo_tools.report.rollouts import MAX_GROUPS, read_answers, read_rollouts
from grpo_tools.report.run_facts import read_facts
from grpo_tools.report.run_files import (
    Number,
    read_failures,
    read_metrics,
    read_receipts,
    read_records,
)
from grpo_tools.report.safe_text import escaped
from grpo_tools.report.tiles import tiles
from grpo_tools.report.timeline import timeline
from grpo_tools.report.unread import INCOMPLETE, Unread
from grpo_tools.report.viewer import answers_section, rollouts_section

_MAX_CONFIG_BYTES = 2**20
_MAX_CONFIGS = 100
_WAIT = "time/wait_for_batch"


class _Role(TypedDict):
    role: str
    started: Number


class _Heartbeat(TypedDict):
    role: str
    time: Number


class _Phase(TypedDict):
    attempt: int
    phase: str
    seconds: Number


class NoStepsError(FileNotFoundError):
    """The run has not logged a step or an evaluation yet."""


@dataclass(frozen=True)
class Live:
    """Says that the run goes on, so that its page reloads itself."""

    next_s: float
    """Seconds until the next page is written."""


def write_report(
    output_dir: Path,
    max_groups: int = MAX_GROUPS,
    live: Live | None = None,
    target: Path | None = None,
) -> Path:
    """Write the report of a run that has ended, is still running, or was killed."""
    page = _page(output_dir, max_groups, live)
    target = target or output_dir / "report.html"
    write_whole(target, page)
    return target


def _page(folder: Path, max_groups: int, live: Live | None) -> str:
    logs, unread, parts = folder / "logs", Unread(folder), PageParts()
    receipts = read_receipts(folder / "receipts.jsonl", unread)
    metrics = read_metrics(logs / "metrics.jsonl", receipts.attempts, unread)
    if not metrics and not unread.has_skipped(logs / "metrics.jsonl"):
        raise NoStepsError(f"no step is logged in {logs / 'metrics.jsonl'}")
    events = logs / "events.jsonl"
    over_time, role_events = timeline(
        read_records(events, unread=unread),
        list(read_records(logs / "roles.jsonl", _Role, unread)),
        list(read_records(logs / "heartbeats.jsonl", _Heartbeat, unread)),
        sum(record[_WAIT] for record in metrics if fits(record.get(_WAIT), Number)),
        lambda: unread.skip_file(events, "skipped events without a required field"),
    )
    failures = read_failures(logs / FAILURES, unread)
    rollouts = read_rollouts(logs / "rollouts.jsonl", receipts.attempts, max_groups, unread)
    answers = read_answers(logs / ANSWERS, receipts.attempts, max_groups, unread)
    sections = metric_charts(metrics)
    others = sections.pop("Other metrics")
    if len(others) == MAX_OTHER_CHARTS:
        unread.skip_file(
            logs / "metrics.jsonl", f"only {MAX_OTHER_CHARTS} of the other metrics are drawn"
        )
    trained = any(record["step"] > 0 for record in metrics)  # else it has no curves, only values
    if trained:
        parts.metrics(sections)
    parts.add("Evaluation", held_out_table(metrics) + answers_section(answers))
    if trained or rollouts.logged:
        parts.add("Rollouts", rollouts_section(rollouts))
    history = parts.charts(over_time) + history_tables(receipts, failures, role_events)
    history += phases_table(list(read_records(logs / "phases.jsonl", _Phase, unread)))
    if prompts := difficulty_charts(receipts):
        parts.add("Prompts", parts.charts(prompts))
    parts.add("Timeline", history)
    dropped = dropped_section(receipts, logs / "failed_samples.jsonl", unread)
    parts.add("Dropped groups", books_section(folder, receipts) + dropped)
    parts.add("Config", _config(folder, unread))
    parts.others(others if trained else ())
    parts.data = {
        "rollouts": rollouts.groups,
        "answers": answers.groups,
        "page": {
            "clocks": [clock(metrics)],
            "live": None if live is None else {"written": time.time(), "next_s": live.next_s},
        },
    }
    choices = controls(metrics) if trained else ""
    state = state_line(receipts, failures, metrics, live=live is not None)
    return parts.html(
        f"Run {folder.resolve().name}",
        state + read_facts(folder).html() + _unread(unread, live),
        f'<div class="tiles">{tiles(metrics, receipts)}</div>' + choices,
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by "
        f"<code>python -m grpo_tools.report {escaped(folder)}</code>",
    )


def _natural_order(path: Path) -> tuple[int, str]:
    """Return a sort key that orders file names by the number in them."""
    return len(path.name), path.name


def _unread(unread: Unread, live: Live | None) -> str:
    """Return HTML that lists what could not be read."""
    found = unread.notes()
    if live is not None:  # the run is writing these lines now
        found = [note for note in found if not note.endswith(INCOMPLETE)]
    notes = "\n".join(map(escaped, found))
    return f'<pre class="warn">not read:\n{notes}</pre>' if notes else ""


def _config(folder: Path, unread: Unread) -> str:
    parts = []
    earlier = sorted(folder.glob("config_attempt_*.yaml"), key=_natural_order)[-_MAX_CONFIGS:]
    for path in [folder / "config.yaml", *earlier]:
        if config := unread.head(path, _MAX_CONFIG_BYTES):
            is_last = path.name == "config.yaml"
            name = f"{path.name} (last attempt)" if is_last and earlier else path.name
            parts.append(
                f'<details class="box"><summary>{escaped(name)}</summary>'
                f"<pre>{escaped(config, 100_000)}</pre></details>"
            )
    return "".join(parts) or '<p class="about">no config.yaml</p>'
