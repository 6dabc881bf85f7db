"""Shows the history of a run: its state, attempts, restarts, dropped groups and failed samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_components.files import Record
from grpo_tools.report.run_files import History
from grpo_tools.report.safe_text import part

_MAX_ROWS, _MAX_EVENTS = 100, 200
_REASONS = {
    "stale": "older than max_staleness when the batch was formed",
    "failed": "none of its samples could be scored, or its generator was lost",
    "filtered": "dynamic sampling replaced its prompt with another",
}


def state_text(history: History, *, live: bool = False) -> str:
    """Return the run's state in a few words, such as `finished; 100 of 100 steps`."""
    how, planned = "running" if live else "running or killed", ""
    if history.starts:
        start = history.starts[-1]
        how = _ending(history, start["attempt"]) or how
        planned = f" of {start.get('num_steps', '?')}"
        if start.get("num_steps") == 0:
            return f"{how}; only an evaluation"
    several = f", {len(history.starts)} attempts" if len(history.starts) > 1 else ""
    return f"{how}; {history.metrics[-1]['step']}{planned} steps{several}"


def history_tables(history: History, events: Sequence[Record], phases: Sequence[Record]) -> str:
    """Return HTML tables of attempts, restarts, rollbacks, and the last attempt's start and end."""
    if not history.starts:
        return part("about", "no receipts.jsonl: attempts are unknown")
    rows = []
    for attempt, done in ((start["attempt"], start["steps_done"]) for start in history.starts):
        how = _ending(history, attempt) or "no end recorded"
        if why := history.failures.get(attempt):
            how += f": {why}"
        rows.append((attempt, done, history.last_steps.get(attempt, done), how))
    found = part("attempts", rows)
    if events := [event for event in events if event["event"] != "start"]:
        keys = ("minute", "event", "attempt", "role")
        rows = [
            [*map(e.get, keys), f"{e['what']}{'; given up' if e.get('given_up') else ''}"]
            for e in events[-_MAX_EVENTS:]
        ]
        found += part("restarts", rows, len(events))
    if last := [each for each in phases if each["attempt"] == phases[-1]["attempt"]]:
        found += part("phases", [(each["phase"], round(each["seconds"], 1)) for each in last])
    return found


def dropped_section(drops: Sequence[Record], failed_samples: Sequence[Record]) -> str:
    """Return HTML that lists dropped groups and failed samples."""
    found = part("about", "No group was dropped.")
    if drops:
        counts = Counter(drop["reason"] for drop in drops).most_common()
        why = [(reason, n, _REASONS.get(reason, "")) for reason, n in counts]
        keys = ("step", "group_id", "reason", "prompt_index", "epoch")
        last = [
            [*map(drop.get, keys), "yes" if drop["reissue"] else "no"]
            for drop in drops[-_MAX_ROWS:]
        ]
        found = part("drops", why, last, len(drops))
    if failed_samples:
        rows = []
        for record in failed_samples[-_MAX_ROWS:]:
            where = f"group {record.get('group_id')}"
            if "evaluation" in record:
                where = f"evaluation at step {record['evaluation']}"
            errors = "\n".join(f"{n} x {error}" for error, n in record["errors"].items())
            place = (str(record.get("attempt", 0)), where, str(record.get("prompt_index")))
            rows.append((*place, errors))
        found += part("failed", rows, len(failed_samples))
    return found


def _ending(history: History, attempt: int) -> str | None:
    """Return in a few words how an attempt ended; None if no file says so."""
    if attempt in history.failures:
        return "interrupted" if history.failures[attempt] is None else "failed"
    if attempt not in history.ends:
        return None
    return "finished" if history.ends[attempt].get("finished") else "stopped early"
