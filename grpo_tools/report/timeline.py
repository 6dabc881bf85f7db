"""Draws charts over a run's time: policy versions, role processes, their use of time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from grpo_components.files import Record
from grpo_tools.report.curves import Chart, chart, curve
from grpo_tools.report.safe_text import label
from grpo_tools.report.time_use import time_use_charts

_ROLE_EVENTS = ("start", "restart", "rollback")
"""Kinds of events that `timeline` returns."""
_ROLLBACK = {"color": "#7c3aed", "width": 1, "dash": "dot"}
_Points = dict[str, list[tuple[float, float]]]
"""Name of a curve -> its minutes and values."""


def timeline(
    events: Iterable[Record],
    starts: Sequence[Record],
    heartbeats: Sequence[Record],
    waited_s: float = 0.0,
) -> tuple[list[Chart], list[Record]]:
    """Draw charts over time, and collect the starts, restarts and rollbacks of roles."""
    versions: _Points = defaultdict(list)
    role_events: list[Record] = []
    times = [beat["time"] for beat in heartbeats] + [start["started"] for start in starts]
    first, last = min(times, default=0.0), max(times, default=0.0)
    for event in events:
        time, kind = event["time"], event["event"]
        first, last = min(first or time, time), max(last, time)
        if kind in ("publish", "load"):
            name = "published" if kind == "publish" else event["role"]
            versions[name].append((time, event["version"]))
        elif kind in _ROLE_EVENTS:
            role_events.append(event)
    role_events = [
        {**event, "minute": round((event["time"] - first) / 60, 2)} for event in role_events
    ]
    memory: _Points = defaultdict(list)
    for beat in heartbeats:
        if "rss_mib" in beat:
            memory[beat["role"]].append((beat["time"], beat["rss_mib"] / 1024))
    charts = [
        _versions_chart(versions, role_events, first),
        _processes_chart(starts, role_events, first, last),
        *time_use_charts(heartbeats, waited_s),
        _memory_chart(memory, first),
    ]
    return [each for each in charts if each], role_events


def _versions_chart(versions: _Points, role_events: Sequence[Record], first: float) -> Chart | None:
    if not versions:
        return None
    traces = []
    for name in sorted(versions, key=lambda name: (name != "published", name)):
        line = {"shape": "hv", "width": 2.5 if name == "published" else 1.2}
        traces.append(_curve(name, versions[name], first, line=line))
    about = "policy version published by the trainers and loaded by each generator"
    rollbacks = [event["minute"] for event in role_events if event["event"] == "rollback"]
    shapes = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": _ROLLBACK}
        for x in rollbacks
    ]
    about += "; a dotted line is a rollback" if rollbacks else ""
    return chart("Policy versions", about, traces, "minutes", shapes=shapes)


def _processes_chart(
    starts: Sequence[Record], role_events: Sequence[Record], first: float, last: float
) -> Chart | None:
    if not starts:
        return None
    by_role: dict[str, list[Record]] = {}
    for start in starts:
        by_role.setdefault(start["role"], []).append(start)
    bars: dict[str, list[Any]] = {"y": [], "x": [], "base": [], "text": []}
    for name, own in by_role.items():
        ends = [start["started"] for start in own[1:]] + [last]
        for number, (start, end) in enumerate(zip(own, ends, strict=True), start=1):
            bars["y"].append(label(name))
            bars["base"].append(round((start["started"] - first) / 60, 3))
            bars["x"].append(round((end - start["started"]) / 60, 3))
            process = f"process {number}, attempt {start['attempt']}, pid {start['pid']}"
            bars["text"].append(label(process))
    traces: list[dict[str, Any]] = [
        {
            **{"type": "bar", "orientation": "h", "name": "processes", **bars},
            **{"hovertemplate": "%{y}: %{text}<extra></extra>", "textposition": "none"},
        }
    ]
    for kind, symbol, color in (("restart", "x", "#c2410c"), ("rollback", "diamond", "#7c3aed")):
        found = [e for e in role_events if e["event"] == kind and e.get("role") in by_role]
        if found:
            places = {"x": [e["minute"] for e in found], "y": [label(e["role"]) for e in found]}
            marker = {"symbol": symbol, "size": 10, "color": color}
            trace = {"type": "scatter", "mode": "markers", "name": kind, "marker": marker, **places}
            traces.append(trace)
    about = "from the start of each process to the next one or the end of the run; "
    about += f"minute 0 is {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    axis = {"autorange": "reversed", "automargin": True, "dtick": 1}
    layout = {"yaxis": axis, "bargap": 0.35}
    return chart("Role processes", about, traces, "minutes", rows=len(by_role), **layout)


def _memory_chart(memory: _Points, first: float) -> Chart | None:
    if not memory:
        return None
    traces = [_curve(role, points, first) for role, points in sorted(memory.items())]
    about = "GiB of each process, without shared memory and child processes"
    layout = {"yaxis": {"rangemode": "tozero"}, "showlegend": True}
    return chart("Memory by role", about, traces, "minutes", **layout)


def _curve(name: str, points: Sequence[tuple[float, float]], first: float, **trace: Any) -> Record:
    minutes = [(time - first) / 60 for time, _ in points]
    return curve(name, minutes, [value for _, value in points], **trace)
