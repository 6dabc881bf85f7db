"""Writes the report of a run: one static HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from grpo_components.report.curves import MAX_OTHER_CHARTS, MAX_POINTS, Chart, metric_charts
from grpo_components.report.dropped import dropped_section
from grpo_components.report.history import history_tables, state_line
from grpo_components.report.rollouts import MAX_GROUPS, read_rollouts
from grpo_components.report.run_files import (
    FAILURES,
    NUMBER,
    read_failures,
    read_metrics,
    read_receipts,
    read_records,
)
from grpo_components.report.safe_text import escaped, script_json
from grpo_components.report.tiles import tiles
from grpo_components.report.timeline import timeline
from grpo_components.report.unread import Unread
from grpo_components.report.viewer import rollouts_section
from grpo_components.whole_files import write_whole

_MAX_TITLE_CHARS = 200
_MAX_CONFIG_BYTES = 2**20
_MAX_CONFIGS = 100


class NoStepsError(FileNotFoundError):
    """The run has not logged a step yet."""


def write_report(output_dir: Path, max_groups: int = MAX_GROUPS) -> Path:
    """Write `report.html` for a run that has ended, is still running, or was killed.

    Args:
        output_dir: the run's output folder.
        max_groups: maximum number of groups of `logs/rollouts.jsonl` to show.

    Returns:
        The path of the page.

    Raises:
        NoStepsError: if no step is logged yet.
        OSError: if the page cannot be written.
    """
    page = _page(output_dir, max_groups)
    target = output_dir / "report.html"
    write_whole(target, page)
    return target


def _page(folder: Path, max_groups: int) -> str:
    from plotly.offline import get_plotlyjs  # imported here because it reads 5 MB

    logs, unread = folder / "logs", Unread(folder)
    receipts = read_receipts(folder / "receipts.jsonl", unread)
    metrics = read_metrics(logs / "metrics.jsonl", receipts.attempts, unread)
    if not metrics and not unread.has_skipped(logs / "metrics.jsonl"):
        raise NoStepsError(f"no step is logged in {logs / 'metrics.jsonl'}")
    events = logs / "events.jsonl"
    over_time, role_events = timeline(
        read_records(events, unread=unread),
        list(read_records(logs / "roles.jsonl", {"role": str, "started": NUMBER}, unread)),
        list(read_records(logs / "heartbeats.jsonl", {"role": str, "time": NUMBER}, unread)),
        lambda: unread.skip_file(events, "skipped events without a required field"),
    )
    failures = read_failures(logs / FAILURES, unread)
    rollouts = read_rollouts(logs / "rollouts.jsonl", receipts.attempts, max_groups, unread)
    charts: list[Chart] = []
    sections = metric_charts(metrics)
    others = sections.pop("Other metrics")
    if len(others) == MAX_OTHER_CHARTS:
        unread.skip_file(
            logs / "metrics.jsonl", f"only {MAX_OTHER_CHARTS} of the other metrics are drawn"
        )
    html = [_smoothing(math.ceil(len(metrics) / MAX_POINTS))]
    sections = {name: found for name, found in sections.items() if found}
    for name, found in sections.items():
        html.append(_section(name, _charts(found, charts)))
    history = _charts(over_time, charts) + history_tables(receipts, failures, role_events)
    html += [
        _section("Rollouts", rollouts_section(rollouts)),
        _section("Timeline", history),
        _section(
            "Dropped groups", dropped_section(receipts, logs / "failed_samples.jsonl", unread)
        ),
        _section("Config", _config(folder, unread)),
    ]
    names = [*sections, "Rollouts", "Timeline", "Dropped groups", "Config"]
    if others:
        folded = (
            f"<details><summary>{len(others)} more</summary>{_charts(others, charts)}</details>"
        )
        html.append(_section("Other metrics", folded))
        names.append("Other metrics")
    script, plotly = _resource("page.js"), get_plotlyjs()
    return Template(_resource("page.html")).substitute(
        title=escaped(f"Run {folder.resolve().name}"),
        state=state_line(receipts, failures, metrics) + _unread(unread),
        links="".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in names),
        tiles=tiles(metrics, receipts),
        sections="\n".join(html),
        footer=f"written by <code>python -m grpo_components.report {escaped(folder)}</code>",
        style=_resource("page.css"),
        charts=script_json([chart["figure"] for chart in charts]),
        rollouts=script_json(rollouts.groups),
        plotly=plotly,
        script=script,
        script_hashes=" ".join(map(_hash, (plotly, script))),
    )


def _resource(name: str) -> str:
    return (files("grpo_components.report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash by which the page's Content-Security-Policy allows a script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _section(name: str, content: str) -> str:
    return f'<section><h2 id="{_anchor(name)}">{escaped(name)}</h2>{content}</section>'


def _charts(found: Sequence[Chart], charts: list[Chart]) -> str:
    """Return HTML for these charts; append them to `charts`, which the page's script draws."""
    cards = []
    for chart in found:
        title, about = escaped(chart["title"], _MAX_TITLE_CHARS), escaped(chart["about"])
        cards.append(
            f'<div class="chart"><h3>{title}</h3><p>{about}</p>'
            f'<div class="plot" role="img" aria-label="{title}" data-chart="{len(charts)}" '
            f'style="height: {chart["figure"]["layout"]["height"]}px"></div></div>'
        )
        charts.append(chart)
    return f'<div class="charts">{"".join(cards)}</div>'


def _smoothing(steps_per_point: int) -> str:
    several = f"; each point combines {steps_per_point} steps" if steps_per_point > 1 else ""
    return (
        '<div class="smoothing"><label for="smoothing">Smoothing of the curves</label>'
        '<input type="range" id="smoothing" min="0" max="50" value="8">'
        f'<span><span id="smoothing-shown">over about 8 points</span>{several}</span>'
        "<span>Drag in a chart to zoom, double-click to reset.</span></div>"
    )


def _natural_order(path: Path) -> tuple[int, str]:
    """Return a sort key that orders file names by the number in them."""
    return len(path.name), path.name


def _unread(unread: Unread) -> str:
    """Return HTML that lists what could not be read."""
    notes = "\n".join(map(escaped, unread.notes()))
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
