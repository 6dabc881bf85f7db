"""Writes the report of a run: one static HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from grpo_components.files import ANSWERS, Record, records_of, write_whole
from grpo_tools.diagnose.evidence import Run
from grpo_tools.diagnose.rules import diagnose
from grpo_tools.report.curves import (
    MAX_POINTS,
    Chart,
    difficulty_charts,
    metric_charts,
    thinned,
    values_of,
)
from grpo_tools.report.facts import facts_line, held_out_table, tiles
from grpo_tools.report.history import dropped_section, history_tables, state_line, token_accounts
from grpo_tools.report.rollouts import MAX_GROUPS, read_answers, read_rollouts
from grpo_tools.report.run_files import read_run
from grpo_tools.report.safe_text import escaped, script_json
from grpo_tools.report.timeline import timeline
from grpo_tools.report.viewer import answers_section, rollouts_section

_MAX_TITLE_CHARS, _MAX_CONFIG_CHARS = 200, 100_000


@dataclass
class PageParts:
    """Collects the sections of a page, and the data that its script reads."""

    _charts: list[Chart] = field(default_factory=list)
    _sections: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, content: str) -> None:
        """Add a section."""
        self._sections[name] = content

    def charts(self, found: Sequence[Chart]) -> str:
        """Return HTML for these charts, which the page's script draws."""
        cards = []
        for chart in found:
            title, about = escaped(chart["title"], _MAX_TITLE_CHARS), escaped(chart["about"])
            height = chart["figure"]["layout"]["height"]
            cards.append(
                f'<div class="chart"><h3>{title}</h3><p>{about}</p>'
                f'<div class="plot" role="img" aria-label="{title}" '
                f'data-chart="{len(self._charts)}" style="height: {height}px"></div></div>'
            )
            self._charts.append(chart)
        return f'<div class="charts">{"".join(cards)}</div>'

    def metrics(self, sections: Mapping[str, Sequence[Chart]]) -> None:
        """Add a section of charts for each section that has any."""
        for name, found in sections.items():
            if found:
                self.add(name, self.charts(found))

    def others(self, found: Sequence[Chart]) -> None:
        """Add a folded section with the charts that have no section of their own, if any."""
        if found:
            folded = f"<summary>{len(found)} more</summary>{self.charts(found)}"
            self.add("Other metrics", f"<details>{folded}</details>")

    def html(self, title: str, state: str, top: str, command: str, **data: Any) -> str:
        """Return the page; `data` is what its script reads besides the charts."""
        from plotly.offline import get_plotlyjs  # imported here because it reads 5 MB

        data = {"charts": [chart["figure"] for chart in self._charts], **data}
        script, plotly = _resource("page.js"), get_plotlyjs()
        anchors = {name: name.lower().replace(" ", "-") for name in self._sections}
        return Template(_resource("page.html")).substitute(
            title=escaped(title),
            state=state,
            links="".join(f'<a href="#{anchors[name]}">{name}</a>' for name in anchors),
            top=top,
            sections="\n".join(
                f'<section><h2 id="{anchors[name]}">{name}</h2>{content}</section>'
                for name, content in self._sections.items()
            ),
            footer=f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by "
            f"<code>grpo report {escaped(command)}</code>",
            style=_resource("page.css"),
            data="\n".join(
                f'<script type="application/json" id="data-{name}">{script_json(value)}</script>'
                for name, value in data.items()
            ),
            plotly=plotly,
            script=script,
            script_hashes=" ".join(map(_hash, (plotly, script))),
        )


def write_report(
    folder: Path,
    max_groups: int = MAX_GROUPS,
    next_page_s: float | None = None,
    target: Path | None = None,
) -> Path:
    """Write the report of a run that has ended or was killed.

    With `next_page_s`, the run goes on: its page reloads itself after so many seconds.
    """
    target = target or folder / "report.html"
    write_whole(target, _page(folder, max_groups, next_page_s))
    return target


def _page(folder: Path, max_groups: int, next_page_s: float | None) -> str:
    logs, parts, is_live = folder / "logs", PageParts(), next_page_s is not None
    metrics, history = read_run(folder)
    run = Run(folder, metrics, history)
    over_time, role_events = timeline(
        records_of(folder / "receipts.jsonl"),
        list(records_of(logs / "roles.jsonl")),
        run.heartbeats,
        sum(values_of(metrics, "time/wait_for_batch")),
    )
    rollouts = read_rollouts(logs / "rollouts.jsonl", history.attempts, max_groups)
    answers = read_answers(logs / ANSWERS, history.attempts, max_groups)
    sections = metric_charts(metrics)
    others = sections.pop("Other metrics")
    trained = any(record["step"] > 0 for record in metrics)  # else it has no curves, only values
    if trained:
        lines = [f"<li>{escaped(finding)}</li>" for finding in diagnose(run)]
        none = ["<li>nothing looks wrong</li>"]
        parts.add("Diagnosis", f'<ul class="box">{"".join(lines or none)}</ul>')
        parts.metrics(sections)
    parts.add("Evaluation", held_out_table(metrics) + answers_section(answers))
    if trained or rollouts.logged:
        parts.add("Rollouts", rollouts_section(rollouts))
    phases = list(records_of(logs / "phases.jsonl"))
    times = parts.charts(over_time) + history_tables(history, role_events, phases)
    if prompts := difficulty_charts(history.results):
        parts.add("Prompts", parts.charts(prompts))
    parts.add("Timeline", times)
    failed_samples = list(records_of(logs / "failed_samples.jsonl"))
    dropped = dropped_section(history.drops, failed_samples)
    parts.add("Dropped groups", token_accounts(folder) + dropped)
    parts.add("Config", _config(folder))
    if trained:
        parts.others(others)
    return parts.html(
        f"Run {folder.resolve().name}",
        state_line(history, metrics, live=is_live) + facts_line(folder, metrics),
        f'<div class="tiles">{tiles(metrics, history)}</div>'
        + (controls(metrics) if trained else ""),
        str(folder),
        rollouts=rollouts.groups,
        answers=answers.groups,
        page={
            "clocks": [clock(metrics)],
            "live": {"written": time.time(), "next_s": next_page_s} if is_live else None,
        },
    )


def controls(*runs: Sequence[Record]) -> str:
    """Return HTML to choose smoothing and horizontal axis of the curves."""
    width = max(math.ceil(len(run) / MAX_POINTS) for run in runs)
    several = f"; each point combines {width} steps" if width > 1 else ""
    axis = (
        '<label>Horizontal axis <select id="axis"><option value="step">steps</option>'
        '<option value="minutes">minutes of wall-clock time</option></select></label>'
    )
    return (
        '<div class="controls"><label for="smoothing">Smoothing of the curves</label>'
        '<input type="range" id="smoothing" min="0" max="50" value="8">'
        f'<span><span id="smoothing-shown">over about 8 points</span>{several}</span>'
        f"{axis if all(map(clock, runs)) else ''}"
        "<span>Drag in a chart to zoom, double-click to reset.</span></div>"
    )


def clock(metrics: Sequence[Record]) -> dict[str, list[float]]:
    """Return steps and the wall-clock minutes at their ends; empty if they were not measured."""
    timed = [record for record in metrics if "time/wall_clock" in record]
    if not timed:
        return {}
    minutes = [record["time/wall_clock"] / 60 for record in timed]
    steps, minutes = thinned([record["step"] for record in timed], minutes, max)
    return {"steps": steps, "minutes": minutes}


def _config(folder: Path) -> str:
    earlier = sorted(
        folder.glob("config_attempt_*.yaml"), key=lambda path: (len(path.name), path.name)
    )
    found = ""
    for path in [folder / "config.yaml", *earlier]:
        if path.exists():
            last = " (last attempt)" if earlier and path.name == "config.yaml" else ""
            text = escaped(path.read_text(encoding="utf-8"), _MAX_CONFIG_CHARS)
            summary = f"<summary>{path.name}{last}</summary>"
            found += f'<details class="box">{summary}<pre>{text}</pre></details>'
    return found or '<p class="about">no config.yaml</p>'


def _resource(name: str) -> str:
    return (files("grpo_tools.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
