"""Builds the HTML page of a report from its sections: one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any

from grpo_components.shapes import fits
from grpo_tools.report.curves import MAX_POINTS, Chart, short, thinned
from grpo_tools.report.run_files import Number, Record
from grpo_tools.report.safe_text import escaped, script_json

_MAX_TITLE_CHARS = 200


@dataclass
class PageParts:
    """Collects the sections of a page, and the data that its script reads."""

    _charts: list[Chart] = field(default_factory=list)
    _sections: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    """Data for the page's script, by the name under which it reads them."""

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

    def html(self, title: str, state: str, top: str, footer: str) -> str:
        """Return the page."""
        from plotly.offline import get_plotlyjs  # imported here because it reads 5 MB

        data = {"charts": [chart["figure"] for chart in self._charts], **self.data}
        script, plotly = _resource("page.js"), get_plotlyjs()
        return Template(_resource("page.html")).substitute(
            title=escaped(title),
            state=state,
            links="".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in self._sections),
            top=top,
            sections="\n".join(
                f'<section><h2 id="{_anchor(name)}">{escaped(name)}</h2>{content}</section>'
                for name, content in self._sections.items()
            ),
            footer=footer,
            style=_resource("page.css"),
            data="\n".join(
                f'<script type="application/json" id="data-{name}">{script_json(value)}</script>'
                for name, value in data.items()
            ),
            plotly=plotly,
            script=script,
            script_hashes=" ".join(map(_hash, (plotly, script))),
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
    timed = [record for record in metrics if fits(record.get("time/wall_clock"), Number)]
    if not timed:
        return {}
    minutes = [record["time/wall_clock"] / 60 for record in timed]
    steps, minutes = thinned([record["step"] for record in timed], minutes, max)
    return {"steps": short(steps), "minutes": short(minutes)}


def _resource(name: str) -> str:
    return (files("grpo_tools.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
