"""Writes one page that overlays the curves of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_components.files import FAILURES
from grpo_components.files import write_whole
from grpo_tools.report.curves import metric_charts
from grpo_tools.report.history import state_text
from grpo_tools.report.page import NoStepsError
from grpo_tools.report.page_parts import PageParts, clock, controls
from grpo_tools.report.run_facts import read_facts
from grpo_tools.report.run_files import (
    Record,
    read_failures,
    read_metrics,
    read_receipts,
)
from grpo_tools.report.safe_text import escaped, text
from grpo_tools.report.tables import table
from grpo_tools.report.tiles import key_figures
from grpo_tools.report.unread import Unread

_MAX_CONFIG_BYTES = 2**20
_MAX_NAME_CHARS = 40
_MAX_VALUE_CHARS = 100
_MAX_KEYS = 500


@dataclass
class _Run:
    """One of the runs that are compared."""

    name: str
    metrics: list[Record]
    figures: dict[str, str]
    """State, facts and key figures by name."""
    config: dict[str, str]
    """Config values by dotted key."""
    unread: Unread


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write a page with the curves of several runs in the same charts."""
    write_whole(target, _page(folders))
    return target


def _page(folders: Sequence[Path]) -> str:
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    metrics, names = [run.metrics for run in runs], [run.name for run in runs]
    parts = PageParts()
    parts.add("Runs", _table("", names, [run.figures for run in runs]))
    sections = metric_charts(*metrics, names=names)
    others = sections.pop("Other metrics")
    parts.metrics(sections)
    parts.add("Differences in the configs", _differences(runs))
    parts.others(others)
    parts.data = {
        "rollouts": [],
        "answers": [],
        "page": {"clocks": [clock(run) for run in metrics], "live": None},
    }
    notes = [f"{run.name}/{note}" for run in runs for note in run.unread.notes()]
    unread = f'<pre class="warn">not read:\n{escaped(chr(10).join(notes))}</pre>' if notes else ""
    command = " ".join(map(str, folders))
    return parts.html(
        f"{len(runs)} runs",
        f'<p class="state">{escaped(", ".join(names))}</p>{unread}',
        controls(*metrics),
        f"written by <code>python -m grpo_tools.report {escaped(command)}</code>",
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last parts, as many as tell the folders apart."""
    parts = [folder.resolve().parts for folder in folders]
    most = max(map(len, parts))
    for count in range(1, most + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len({*names}) == len({*parts}):
            break
    numbers = range(1, len(names) + 1)
    names = [text(name)[-_MAX_NAME_CHARS:] for name in names]
    repeated = len({*names}) < len(names)  # e.g. one folder given twice
    return [f"{name} ({i})" if repeated else name for name, i in zip(names, numbers, strict=True)]


def _read(folder: Path, name: str) -> _Run:
    logs, unread = folder / "logs", Unread(folder)
    receipts = read_receipts(folder / "receipts.jsonl", unread)
    metrics = read_metrics(logs / "metrics.jsonl", receipts.attempts, unread)
    if not metrics:
        raise NoStepsError(f"no step is logged in {logs / 'metrics.jsonl'}")
    failures = read_failures(logs / FAILURES, unread)
    figures = {"state": state_text(receipts, failures, metrics)}
    figures |= read_facts(folder).items() | key_figures(metrics, receipts, "first and last steps")
    return _Run(name, metrics, figures, _config(folder, unread), unread)


def _table(first: str, names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """Return an HTML table with a column for each run, and a row for each key of any run."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(column.get(key) for column in columns)) for key in keys]
    return f'<div class="box">{table((first, *names), rows)}</div>'


def _config(folder: Path, unread: Unread) -> dict[str, str]:
    """Return the values of a run's last config by dotted key; empty if it cannot be read."""
    path = folder / "config.yaml"
    try:
        found = yaml.safe_load(unread.head(path, _MAX_CONFIG_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError):
        unread.skip_file(path, "not a config")
        return {}
    return dict(_flat("", found)) if isinstance(found, dict) else {}


def _flat(prefix: str, node: Any) -> list[tuple[str, str]]:
    if isinstance(node, dict) and node:
        items = [(f"{prefix}.{key}".lstrip("."), value) for key, value in node.items()]
        return [pair for key, value in items for pair in _flat(key, value)]
    return [(prefix, text("null" if node is None else node, _MAX_VALUE_CHARS))]


def _differences(runs: Sequence[_Run]) -> str:
    """Return HTML with the config keys that do not have the same value in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    if not differing:
        return '<p class="about">The configs are the same.</p>'
    shown = differing[:_MAX_KEYS]
    columns = [{key: run.config[key] for key in shown if key in run.config} for run in runs]
    return _table("key", [run.name for run in runs], columns)
