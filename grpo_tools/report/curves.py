"""Draws charts as plotly figures: of the metrics over steps, of the prompts by difficulty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean
from typing import Any

from grpo_components.files import Record
from grpo_tools.report.panels import (
    BOOKKEEPING,
    PANELS,
    REWARD_TERMS,
    Panel,
    reward_term_panels,
)
from grpo_tools.report.safe_text import label

MAX_POINTS = 1000
"""Maximum number of points in a curve; in a longer run, each point combines several steps."""
MAX_OTHER_CHARTS = 300
"""Maximum number of charts for metrics that have no panel of their own."""
_FEW_STEPS = 8
"""With at most this many steps, only steps get ticks; plotly would add ticks between them."""
_MAX_CURVES_PER_RUN = 2
"""With several runs, a chart has at most this many curves of each."""
_HEIGHT, _ROW_HEIGHT = 270, 20
"""Height in pixels of a chart, and of each extra row in its legend or on its vertical axis."""
_FREE_ROWS = 8
"""Number of rows on the vertical axis that fit into `_HEIGHT`."""
_LEGEND_CHARS, _SYMBOL_CHARS = 48, 9
"""Width of a legend on a narrow screen, and of the line before each name, in characters."""
_HUGE = 1e100
"""Values of this magnitude or more are left out, so that sums cannot overflow."""
_BINS = ("0 %", "to 20 %", "to 40 %", "to 60 %", "to 80 %", "over 80 %", "100 %")
Chart = dict[str, Any]
"""Keys: `title`, `about` (one line) and `figure` (plotly's `data` and `layout`)."""


def metric_charts(*runs: Sequence[Record], names: Sequence[str] = ("",)) -> dict[str, list[Chart]]:
    """Draw the metrics of one or more runs; return the charts by section of the page."""
    keys = dict.fromkeys(key for run in runs for record in run for key in record)
    panels = {**PANELS, REWARD_TERMS: reward_term_panels(keys)}
    drawn = {key for of_section in panels.values() for panel in of_section for key in panel.curves}
    others = [Panel(key, "", {key: key}) for key in keys if key not in drawn | BOOKKEEPING]
    panels["Other metrics"] = others[:MAX_OTHER_CHARTS]
    return {
        section: [drawn for panel in of_section for drawn in _charts(runs, names, panel)]
        for section, of_section in panels.items()
    }


def chart(
    title: str,
    about: str,
    traces: Sequence[dict[str, Any]],
    x_title: str = "step",
    rows: int = 0,
    **layout: Any,
) -> Chart:
    """Make a chart; `rows`: number of names on its vertical axis, 0 if none."""
    x_axis: dict[str, Any] = {"title": {"text": x_title}}
    if x_title == "step":
        steps = sorted({x for trace in traces for x in trace["x"]})
        x_axis |= {"tickmode": "array", "tickvals": steps} if len(steps) <= _FEW_STEPS else {}
    legend = sum(len(trace["name"]) + _SYMBOL_CHARS for trace in traces) // _LEGEND_CHARS
    height = _HEIGHT + _ROW_HEIGHT * max(0, legend - 1, rows - _FREE_ROWS)  # the margin has 2 rows
    shared = {"xaxis": x_axis, "showlegend": len(traces) > 1, "height": height}
    figure = {"data": [*traces], "layout": shared | layout}
    return {"title": title, "about": about, "figure": figure}


def curve(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    combine: Callable[[Sequence[float]], float] = itemgetter(-1),
    **trace: Any,
) -> dict[str, Any]:
    """Return a plotly trace of a curve; `combine` merges neighboring points if there are many."""
    x, y = thinned(x, y, combine)
    mode = "lines" if len(y) > 1 else "markers"  # a single point has no line
    return {"type": "scatter", "mode": mode, "name": label(name), "x": x, "y": y, **trace}


def thinned(
    x: Sequence[float],
    y: Sequence[float],
    combine: Callable[[Sequence[float]], float],
) -> tuple[list[float], list[float]]:
    """Combine neighboring points into at most `MAX_POINTS`; round to 6 significant digits."""
    width = math.ceil(len(y) / MAX_POINTS) or 1
    starts = range(0, len(y), width)
    return (
        [_rounded(x[min(start + width, len(x)) - 1]) for start in starts],
        [_rounded(combine(y[start : start + width])) for start in starts],
    )


def measured_after(record: Record, key: str) -> int:
    """Return the step after which a metric was measured: `eval/step` for `eval/`, else `step`."""
    known = values_of([record], "eval/step") if key.startswith("eval/") else []
    return int(known[0]) if known else record["step"]


def values_of(records: Sequence[Record], key: str) -> list[float]:
    """Return a metric's numbers from the records that have one, without null and huge values."""
    values = (record.get(key) for record in records)
    return [value for value in values if isinstance(value, int | float) and abs(value) < _HUGE]


def difficulty_charts(results: Sequence[Record]) -> Sequence[Chart]:
    """Return a histogram of prompts by success rate; nothing if the run had no curriculum."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for each in results:
        prompt = each["prompt_index"]
        if prompt is not None and each["scored"]:
            last[prompt] = _bin(each["successes"], each["scored"])
            first.setdefault(prompt, last[prompt])
    if not first:
        return ()
    traces = []
    for color, (name, bins) in enumerate({"first group": first, "last group": last}.items()):
        counts = Counter(bins.values())
        bars = {"x": list(_BINS), "y": [counts[number] for number in range(len(_BINS))]}
        traces.append({"type": "bar", "name": name, "meta": {"color": color}, **bars})
    about = f"{len(first):,} prompts by the share of right responses in a group"
    return [chart("Difficulty of the prompts", about, traces, x_title="success rate")]


def _charts(
    runs: Sequence[Sequence[Record]], names: Sequence[str], panel: Panel
) -> Iterator[Chart]:
    """Yield the chart of a panel; with several runs and many curves, a chart for each curve."""
    several = len(panel.curves) > 1  # even if only one of them has data
    if len(runs) > 1 and len(panel.curves) > _MAX_CURVES_PER_RUN:
        for key, name in panel.curves.items():
            one = replace(panel, title=f"{panel.title}: {name}", curves={key: name})
            yield from _charts(runs, names, one)
        return
    traces = []
    for run, (metrics, run_name) in enumerate(zip(runs, names, strict=True)):
        for number, (key, name) in enumerate(panel.curves.items()):
            style: dict[str, Any] = {"run": run, "color": number}
            if len(runs) > 1:  # a color for each run, a dash for each curve
                name = f"{run_name}: {name}" if several else run_name
                style |= {"color": run, "dash": number}
            if values := values_of(metrics, key):
                traces.append(_trace(metrics, key, name, values, panel, style))
    axis: dict[str, Any] = {"type": "log"} if panel.log else {}
    axis |= {"range": list(panel.range)} if panel.range else {}
    axis |= {"rangemode": "tozero"} if panel.from_zero else {}
    if traces:
        legend = several or len(runs) > 1
        yield chart(panel.title, panel.about, traces, yaxis=axis, showlegend=legend)


def _trace(
    metrics: Sequence[Record],
    key: str,
    name: str,
    values: Sequence[float],
    panel: Panel,
    style: dict[str, Any],
) -> dict[str, Any]:
    steps = [measured_after(each, key) for each in metrics if values_of([each], key)]
    if key.startswith("eval/"):
        line = {} if "dash" in style else {"dash": "dot"}
        return curve(name, steps, values, mode="lines+markers", line=line, meta=style)
    style = style | {"smooth": panel.smooth and not key.endswith("max")}
    combine = max if panel.total or key.endswith("max") else fmean
    return curve(name, steps, values, combine, meta=style)


def _bin(successes: int, scored: int) -> int:
    """Return the index in `_BINS` of a success rate: none right, five equal ranges, all right."""
    if successes in (0, scored):
        return len(_BINS) - 1 if successes else 0
    return -(-5 * successes // scored)  # rounded up


def _rounded(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value
