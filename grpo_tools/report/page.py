"""Writes the report of a run: one static HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from grpo_components.files import ANSWERS, Record, records_of, write_whole
from grpo_tools.books import close_books
from grpo_tools.diagnose.evidence import Run
from grpo_tools.diagnose.rules import lines_of
from grpo_tools.report.curves import (
    MAX_POINTS,
    Chart,
    difficulty_charts,
    metric_charts,
    thinned,
    values_of,
)
from grpo_tools.report.facts import held_out_table, key_figures, read_facts
from grpo_tools.report.history import dropped_section, history_tables, state_text
from grpo_tools.report.rollouts import MAX_BYTES, MAX_GROUPS, read_groups
from grpo_tools.report.run_files import DAMAGED, read_run
from grpo_tools.report.safe_text import part, script_json, whole_page
from grpo_tools.report.timeline import timeline

_DIFFERENCES = "trainer - generator, trainer - reference, generator - reference, trainer - teacher"
"""Pairs of logprobs whose difference can color the tokens."""


@dataclass
class PageParts:
    """Collects the sections of a page, and the charts that its script draws."""

    sections: dict[str, str] = field(default_factory=dict)
    """HTML of each section by name."""
    _figures: list[Any] = field(default_factory=list)

    def charts(self, found: Sequence[Chart]) -> str:
        """Add charts to the page's script; return their HTML."""
        cards = [*enumerate(found, start=len(self._figures))]
        self._figures += [chart["figure"] for chart in found]
        return part("charts", cards)

    def add(self, name: str, make: Callable[[], str]) -> None:
        """Add a section; if a file that it needs cannot be read, the section only says so."""
        try:
            self.sections[name] = make()
        except (*DAMAGED, OSError) as error:
            self.sections[name] = part("about", f"damaged: {type(error).__name__}: {error}")

    def metrics(self, sections: dict[str, list[Chart]]) -> dict[str, str]:
        """Add the sections that have charts; return `Other metrics`, collapsed, to be put last."""
        others = sections.pop("Other metrics")
        self.sections |= {name: self.charts(found) for name, found in sections.items() if found}
        folded = part("folded", f"{len(others)} more", self.charts(others)) if others else ""
        return {"Other metrics": folded} if others else {}

    def html(self, title: str, state: str, top: str, command: str, **data: Any) -> str:
        """Return the page; `state` and `top` are HTML, `data` is for the page's script."""
        from plotly.offline import get_plotlyjs  # imported here because it reads 5 MB

        data = {"charts": self._figures, **data}
        script = (files("grpo_tools.report") / "page.js").read_text("utf-8")
        scripts = get_plotlyjs(), script
        return whole_page(
            **{"title": title, "state": state, "top": top, "command": command},
            sections=self.sections,
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            data={name: script_json(value) for name, value in data.items()},
            scripts=scripts,
            hashes=[*map(_hash, scripts)],
        )


def write_report(
    folder: Path,
    max_groups: int = MAX_GROUPS,
    next_page_s: float | None = None,
    target: Path | None = None,
) -> Path:
    """Write the report of a run.

    With `next_page_s`, for a run in progress, the page reloads itself after this many seconds.
    """
    target = target or folder / "report.html"
    write_whole(target, _page(folder, max_groups, next_page_s))
    return target


def _page(folder: Path, max_groups: int, next_page_s: float | None) -> str:
    logs, parts, is_live = folder / "logs", PageParts(), next_page_s is not None
    history = read_run(folder)
    metrics, run = history.metrics, Run(history)
    rollouts = read_groups(logs / "rollouts.jsonl", history.attempts, max_groups)
    answers = read_groups(logs / ANSWERS, history.attempts, max_groups, of_evaluations=True)
    trained, others = bool(run.steps), {}  # else it has no curves, only values
    if trained:
        parts.sections["Diagnosis"] = part("findings", lines_of(run))
        others = parts.metrics(metric_charts(metrics))
    parts.sections["Evaluation"] = held_out_table(metrics) + part("answers", answers)
    if trained or rollouts.logged:
        known, pairs = rollouts.logprobs, _DIFFERENCES.split(", ")
        differences = [each for each in pairs if known.issuperset(each.split(" - "))]
        shown = part("rollouts", rollouts, differences, MAX_BYTES // 2**20)
        parts.sections["Rollouts"] = shown

    def times() -> str:
        roles, phases = ([*records_of(logs / f"{name}.jsonl")] for name in ("roles", "phases"))
        waited_s = sum(values_of(metrics, "time/wait_for_batch"))
        receipts = records_of(folder / "receipts.jsonl")
        over_time, role_events = timeline(receipts, roles, run.heartbeats, waited_s)
        tables = history_tables(history, role_events, phases)
        return parts.charts(over_time) + tables

    def dropped() -> str:
        failed = [*records_of(logs / "failed_samples.jsonl")]
        return part("accounts", close_books(folder)) + dropped_section(history.drops, failed)

    if history.results:
        parts.add("Prompts", lambda: parts.charts(difficulty_charts(history.results)))
    parts.add("Timeline", times)
    parts.add("Dropped groups", dropped)
    earlier = sorted(folder.glob("config_attempt_*.yaml"), key=lambda path: (len(path.name), path))
    configs = [path for path in (folder / "config.yaml", *earlier) if path.exists()]
    parts.add("Config", lambda: part("configs", configs, bool(earlier)))
    parts.sections |= others
    state = state_text(history, live=is_live)
    top = part("top", state, run.error, read_facts(history))
    figures = part("tiles", key_figures(history))
    return parts.html(
        f"Run {folder.resolve().name}",
        top,
        figures + controls(metrics) if trained else figures,
        str(folder),
        rollouts=rollouts.groups,
        answers=answers.groups,
        page={
            "clocks": [clock(metrics)],
            "live": {"written": time.time(), "next_s": next_page_s} if is_live else None,
        },
    )


def controls(*runs: Sequence[Record]) -> str:
    """Return HTML controls for the curves: smoothing, and what their horizontal axis shows."""
    width = max(math.ceil(len(run) / MAX_POINTS) for run in runs)
    return part("controls", width, all(map(clock, runs)))


def clock(metrics: Sequence[Record]) -> dict[str, list[float]]:
    """Return steps and the wall-clock minutes at their ends; empty if they were not measured."""
    timed = [record for record in metrics if values_of([record], "time/wall_clock")]
    if not timed:
        return {}
    minutes = [record["time/wall_clock"] / 60 for record in timed]
    steps, minutes = thinned([record["step"] for record in timed], minutes, max)
    return {"steps": steps, "minutes": minutes}


def _hash(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
