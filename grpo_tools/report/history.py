"""Writes the history of a run: its state, attempts, restarts and rollbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_tools.report.run_files import Receipts, Record
from grpo_tools.report.safe_text import escaped
from grpo_tools.report.tables import table

_MAX_EVENTS = 200
_MAX_ERROR_CHARS = 4000
_MAX_STATE_CHARS = 200


def state_line(
    receipts: Receipts,
    failures: Mapping[int, str | None],
    metrics: Sequence[Record],
    *,
    live: bool = False,
) -> str:
    """Return HTML with the run's state in one line, and the error that ended it, if any."""
    state = escaped(state_text(receipts, failures, metrics, live=live), _MAX_STATE_CHARS)
    state = f'<p class="state">{state}</p>'
    why = failures.get(receipts.starts[-1]["attempt"]) if receipts.starts else None
    return state + (f'<pre class="warn">{escaped(why, _MAX_ERROR_CHARS)}</pre>' if why else "")


def state_text(
    receipts: Receipts,
    failures: Mapping[int, str | None],
    metrics: Sequence[Record],
    *,
    live: bool = False,
) -> str:
    """Return the run's state in a few words; the arguments are those of `state_line`."""
    last, attempts = metrics[-1]["step"] if metrics else 0, len(receipts.starts)
    how, planned = "running" if live else "running or killed", ""
    if receipts.starts:
        start = receipts.starts[-1]
        how = _ending(receipts, failures, start["attempt"]) or how
        planned = f" of {start.get('num_steps')}"
        if start.get("num_steps") == 0:
            return f"{how}; only an evaluation"
    several = f", {attempts} attempts" if attempts > 1 else ""
    return f"{how}; {last}{planned} steps{several}"


def history_tables(
    receipts: Receipts, failures: Mapping[int, str | None], role_events: Sequence[Record]
) -> str:
    """Return HTML tables of attempts, restarts and rollbacks."""
    rows = []
    for start in receipts.starts:
        attempt, done = start["attempt"], start["steps_done"]
        how = _ending(receipts, failures, attempt) or "no end recorded"
        if why := failures.get(attempt):
            how += f": {why}"
        rows.append((attempt, done, receipts.last_steps.get(attempt, done), how))
    parts = [
        '<div class="box"><h3>Attempts</h3>',
        '<p class="about">A later attempt replaces all steps after the one it resumes from, '
        "once it has trained a step.</p>",
        table(("attempt", "resumes after step", "last step", "how it ended"), rows),
        "</div>",
    ]
    if not rows:
        parts = ['<p class="about">no receipts.jsonl: attempts are unknown</p>']
    events = [event for event in role_events if event["event"] != "start"]
    if events:
        rows = [
            (
                event["minute"],
                event["event"],
                event.get("attempt"),
                event.get("role"),
                f"{event.get('what')}{'; given up' if event.get('given_up') else ''}",
            )
            for event in events[-_MAX_EVENTS:]
        ]
        extent = f"the last {len(rows)} of {len(events)}" if len(events) > len(rows) else "all"
        columns = ("minute", "what", "attempt", "role", "why")
        head = f'<div class="box"><h3>Restarts and rollbacks</h3><p class="about">{extent}</p>'
        parts += [head, table(columns, rows), "</div>"]
    return "".join(parts)


def phases_table(phases: Sequence[Record]) -> str:
    """Return an HTML table of what the phases of the last attempt's start and end took."""
    last = [each for each in phases if each["attempt"] == phases[-1]["attempt"]]
    if not last:
        return ""
    rows = [(each["phase"], round(each["seconds"], 1)) for each in last[-_MAX_EVENTS:]]
    about = "last attempt, from the command on; a report made after the run also has its end"
    head = f'<div class="box"><h3>Start and end</h3><p class="about">{about}</p>'
    return head + table(("phase", "seconds"), rows) + "</div>"


def _ending(receipts: Receipts, failures: Mapping[int, str | None], attempt: int) -> str | None:
    """Return in a few words how an attempt ended; None if no file says so."""
    if attempt in failures:
        return "interrupted" if failures[attempt] is None else "failed"
    end = receipts.ends.get(attempt)
    if end is None:
        return None
    return "finished" if end.get("finished") else "stopped early"
