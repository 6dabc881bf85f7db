"""Draws charts over a run's time: policy versions, role processes, their use of time and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from typing_extensions import TypedDict

from grpo_components.shapes import fits
from grpo_tools.report.curves import MAX_POINTS, Chart, chart, curve
from grpo_tools.report.run_files import Items, Number, Record
from grpo_tools.report.safe_text import label
from grpo_tools.report.time_use import time_use_charts

_ROLE_EVENTS = ("start", "restart", "rollback")
"""Kinds of events that `timeline` returns."""
_FIELDS = {
    "publish": {"version": int},
    "load": {"role": str, "version": int},
    "issue": {"role": str, "group": int},
    "finish": {"group": int},
    "buffer": {"group": int},
    "drop": {"groups": Items[int]},
    "step": {"step": int},
    "restart": {"role": str},
    "rollback": {"role": str},
}
"""Required fields of an event besides its kind and time."""


class _Event(TypedDict):
    event: str
    time: Number


def timeline(
    events: Iterable[Record],
    starts: Sequence[Record],
    heartbeats: Sequence[Record],
    waited_s: float = 0.0,
    on_skip: Callable[[], None] = lambda: None,
) -> tuple[list[Chart], list[Record]]:
    """Draw charts over time, and collect the starts, restarts and rollbacks of roles."""
    names = list(dict.fromkeys(start["role"] for start in starts))
    versions: dict[str, list[tuple[float, int]]] = defaultdict(list)
    role_events: list[Record] = []
    last = max((beat["time"] for beat in heartbeats), default=0.0)
    first = min((start["started"] for start in starts), default=last)
    for event in events:
        if not _is_complete(event):
            on_skip()
            continue
        first, last = min(first or event["time"], event["time"]), max(last, event["time"])
        if event["event"] == "publish":
            versions["published"].append((event["time"], event["version"]))
        elif event["event"] == "load":
            versions[event["role"]].append((event["time"], event["version"]))
        elif event["event"] in _ROLE_EVENTS:
            role_events.append(event)
    last = max([last, *(start["started"] for start in starts)])
    role_events = [
        {**event, "minute": round((event["time"] - first) / 60, 2)} for event in role_events
    ]
    charts = [
        _versions_chart(versions, role_events, first),
        _processes_chart(names, starts, role_events, first, last),
        *time_use_charts(heartbeats, waited_s),
        _memory_chart(heartbeats, first),
    ]
    return [each for each in charts if each], role_events


def _is_complete(event: Record) -> bool:
    """Return whether an event has its required fields."""
    if not fits(event, _Event):
        return False
    needed = _FIELDS.get(event["event"], {})
    return all(fits(event.get(name), shape) for name, shape in needed.items())


def _versions_chart(
    versions: dict[str, list[tuple[float, int]]], role_events: Sequence[Record], first: float
) -> Chart | None:
    if not versions:
        return None
    traces = []
    for name in sorted(versions, key=lambda name: (name != "published", name)):
        kept = _some(versions[name])
        minutes = [(time - first) / 60 for time, _ in kept]
        line = {"shape": "hv", "width": 2.5 if name == "published" else 1.2}
        traces.append(curve(name, minutes, [version for _, version in kept], line=line))
    about = "policy version published by the trainers and loaded by each generator"
    rollbacks = [event["minute"] for event in role_events if event["event"] == "rollback"]
    shapes = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": _ROLLBACK}
        for x in rollbacks
    ]
    about += "; a dotted line is a rollback" if rollbacks else ""
    return chart("Policy versions", about, traces, "minutes", shapes=shapes)


def _some(points: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Return every n-th point, at most `MAX_POINTS` of them, and the last point."""
    width = -(-len(points) // MAX_POINTS)
    return points[::width] + (points[-1:] if (len(points) - 1) % width else [])


def _processes_chart(
    names: list[str],
    starts: Sequence[Record],
    role_events: Sequence[Record],
    first: float,
    last: float,
) -> Chart | None:
    if not names:
        return None
    bars: dict[str, list[Any]] = {"y": [], "x": [], "base": [], "text": []}
    by_role: dict[str, list[Record]] = {name: [] for name in names}
    for start in starts:
        by_role[start["role"]].append(start)
    for name, own in by_role.items():
        ends = [start["started"] for start in own[1:]] + [last]
        for number, (start, end) in enumerate(zip(own, ends, strict=True), start=1):
            bars["y"].append(label(name))
            bars["base"].append(round((start["started"] - first) / 60, 3))
            bars["x"].append(round((end - start["started"]) / 60, 3))
            attempt, pid = start.get("attempt", 0), start.get("pid", "?")
            bars["text"].append(label(f"process {number}, attempt {attempt}, pid {pid}"))
    traces: list[dict[str, Any]] = [
        {
            **{"type": "bar", "orientation": "h", "name": "processes", **bars},
            **{"hovertemplate": "%{y}: %{text}<extra></extra>", "textposition": "none"},
            "marker": {"color": "#9db8d9", "line": {"color": "#ffffff", "width": 2}},
        }
    ]
    for kind, symbol, color in (("restart", "x", "#c2410c"), ("rollback", "diamond", "#7c3aed")):
        found = [
            event for event in role_events if event["event"] == kind and event.get("role") in names
        ]
        if found:
            places = {"x": [e["minute"] for e in found], "y": [label(e["role"]) for e in found]}
            marker = {"symbol": symbol, "size": 10, "color": color}
            trace = {"type": "scatter", "mode": "markers", "name": kind, "marker": marker, **places}
            traces.append(trace)
    about = "from the start of each process to the next one or the end of the run" + _clock(first)
    axis = {"autorange": "reversed", "automargin": True, "dtick": 1}
    layout = {"yaxis": axis, "bargap": 0.35}
    return chart("Role processes", about, traces, "minutes", rows=len(names), **layout)


def _clock(first: float) -> str:
    """Return the part of a caption that gives the date and time of minute 0."""
    try:
        return f"; minute 0 is {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # a damaged record has an impossible time
        return ""


def _memory_chart(heartbeats: Sequence[Record], first: float) -> Chart | None:
    by_role: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for beat in heartbeats:
        if fits(beat.get("rss_mib"), Number):
            by_role[beat["role"]].append(((beat["time"] - first) / 60, beat["rss_mib"] / 1024))
    if not by_role:
        return None
    traces = []
    for role, points in sorted(by_role.items()):
        kept = _some(points)
        traces.append(curve(role, [x for x, _ in kept], [y for _, y in kept]))
    about = "GiB of each process, without shared memory and child processes"
    layout = {"yaxis": {"rangemode": "tozero"}, "showlegend": True}
    return chart("Memory by role", about, traces, "minutes", **layout)


_ROLLBACK = {"color": "#7c3aed", "width": 1, "dash": "dot"}
