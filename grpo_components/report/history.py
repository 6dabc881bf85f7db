"""How a run went: its state in a line, its attempts, and what happened to its roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_components.report.run_files import Receipts, Record
from grpo_components.report.shown import escaped
from grpo_components.report.tables import table

_MOST_EVENTS = 200
_LONGEST_ERROR = 4000
_LONGEST_STATE = 200


def state_line(
    receipts: Receipts, failures: Mapping[int, str | None], metrics: Sequence[Record]
) -> str:
    """HTML of how the run stands, and of the error that ended it.

    Args:
        receipts: of the run.
        failures: the error of each attempt that failed; None where a person stopped it.
        metrics: of each step, in order.
    """
    last, attempts = metrics[-1]["step"] if metrics else 0, len(receipts.starts)
    how, planned, why = "running, or killed", "", None
    if receipts.starts:
        start = receipts.starts[-1]
        how = _ending(receipts, failures, start["attempt"]) or how
        planned = f" of {start.get('num_steps')}"
        why = failures.get(start["attempt"])
    several = f", {attempts} attempts" if attempts > 1 else ""
    state = (
        f'<p class="state">{escaped(f"{how}; {last}{planned} steps{several}", _LONGEST_STATE)}</p>'
    )
    return state + (f'<pre class="warn">{escaped(why, _LONGEST_ERROR)}</pre>' if why else "")


def history_tables(
    receipts: Receipts, failures: Mapping[int, str | None], told: Sequence[Record]
) -> str:
    """HTML of the attempts, and of restarts and rollbacks.

    Args:
        receipts: of the run.
        failures: the error of each attempt that failed; None where a person stopped it.
        told: starts, restarts and rollbacks, each with its `minute`.
    """
    rows = []
    for start in receipts.starts:
        attempt, done = start["attempt"], start["steps_done"]
        how = _ending(receipts, failures, attempt) or "no end was written"
        if why := failures.get(attempt):
            how += f": {why}"
        rows.append((attempt, done, receipts.last_steps.get(attempt, done), how))
    parts = [
        '<div class="box"><h3>Attempts</h3>',
        '<p class="about">A later attempt replaces the steps from where it goes on, '
        "as soon as it has done one.</p>",
        table(("attempt", "goes on after step", "last step", "how it ended"), rows),
        "</div>",
    ]
    if not rows:
        parts = ['<p class="about">no receipts.jsonl, which would tell of attempts</p>']
    events = [event for event in told if event["event"] != "start"]
    if events:
        shown = [
            (
                event["minute"],
                event["event"],
                event.get("attempt"),
                event.get("role"),
                f"{event.get('what')}{'; given up' if event.get('given_up') else ''}",
            )
            for event in events[-_MOST_EVENTS:]
        ]
        told_all = f"the last {len(shown)} of {len(events)}" if len(events) > len(shown) else "all"
        columns = ("minute", "what", "attempt", "role", "why")
        head = f'<div class="box"><h3>Restarts and rollbacks</h3><p class="about">{told_all}</p>'
        parts += [head, table(columns, shown), "</div>"]
    return "".join(parts)


def _ending(receipts: Receipts, failures: Mapping[int, str | None], attempt: int) -> str | None:
    """How an attempt ended, in a word or two; None where it told nothing."""
    if attempt in failures:
        return "interrupted" if failures[attempt] is None else "failed"
    end = receipts.ends.get(attempt)
    if end is None:
        return None
    return "finished" if end.get("finished") else "stopped before its end"
