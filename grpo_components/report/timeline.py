"""When things happened in a run: lives of its roles, their policy versions, restarts, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from grpo_components.report.curves import MOST_POINTS, Chart, chart, curve
from grpo_components.report.idle import Idle
from grpo_components.report.run_files import NUMBER, Record, fits
from grpo_components.report.shown import label

_TOLD = ("start", "restart", "rollback")
"""Events that the page lists."""
_EVENT = {"event": str, "time": NUMBER}
_FIELDS = {
    "publish": {"version": int},
    "load": {"role": str, "version": int},
    "issue": {"role": str, "group": int},
    "finish": {"group": int},
    "buffer": {"group": int},
    "drop": {"groups": [int]},
    "step": {"step": int},
    "restart": {"role": str},
    "rollback": {"role": str},
}
"""What is read of an event, besides its kind and time."""


def timeline(
    events: Iterable[Record],
    lives: Sequence[Record],
    beats: Sequence[Record],
    left_out: Callable[[], None] = lambda: None,
) -> tuple[list[Chart], list[Record]]:
    """Charts over time, and what happened to the roles.

    Args:
        events: of events.jsonl.
        lives: of roles.jsonl: role, attempt, started.
        beats: of heartbeats.jsonl: role, time, rss_mib.
        left_out: called for each event that lacks a field of its kind.

    Returns:
        The charts, and the starts, restarts and rollbacks, each with its `minute`.
    """
    names = list(dict.fromkeys(life["role"] for life in lives))
    idle = Idle(sum(name.startswith("reference_") for name in names))
    versions: dict[str, list[tuple[float, int]]] = defaultdict(list)
    told: list[Record] = []
    last = max((beat["time"] for beat in beats), default=0.0)
    first = min((life["started"] for life in lives), default=last)
    for event in events:
        if not fits(event, _EVENT) or not fits(event, _FIELDS.get(event["event"], {})):
            left_out()
            continue
        idle.follow(event)
        first, last = min(first or event["time"], event["time"]), max(last, event["time"])
        if event["event"] == "publish":
            versions["published"].append((event["time"], event["version"]))
        elif event["event"] == "load":
            versions[event["role"]].append((event["time"], event["version"]))
        elif event["event"] in _TOLD:
            told.append(event)
    last = max([last, *(life["started"] for life in lives)])
    told = [{**event, "minute": round((event["time"] - first) / 60, 2)} for event in told]
    charts = [
        _versions_chart(versions, told, first),
        _lives_chart(names, lives, told, first, last),
        idle.chart(),
        _memory_chart(beats, first),
    ]
    return [each for each in charts if each], told


def _versions_chart(
    versions: dict[str, list[tuple[float, int]]], told: Sequence[Record], first: float
) -> Chart | None:
    if not versions:
        return None
    traces = []
    for name in sorted(versions, key=lambda name: (name != "published", name)):
        kept = _some(versions[name])
        minutes = [(time - first) / 60 for time, _ in kept]
        line = {"shape": "hv", "width": 2.5 if name == "published" else 1.2}
        traces.append(curve(name, minutes, [version for _, version in kept], line=line))
    about = "policy version that the trainers published, and that each generator loaded"
    marks = [event["minute"] for event in told if event["event"] == "rollback"]
    shapes = [
        {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": _ROLLBACK}
        for x in marks
    ]
    about += "; a dotted line is a rollback" if marks else ""
    return chart("Policy versions", about, traces, "minutes", shapes=shapes)


def _some(points: list[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """At most `MOST_POINTS` of them and the last one."""
    width = -(-len(points) // MOST_POINTS)
    return points[::width] + (points[-1:] if (len(points) - 1) % width else [])


def _lives_chart(
    names: list[str], lives: Sequence[Record], told: Sequence[Record], first: float, last: float
) -> Chart | None:
    if not names:
        return None
    bars: dict[str, list[Any]] = {"y": [], "x": [], "base": [], "text": []}
    by_role: dict[str, list[Record]] = {name: [] for name in names}
    for life in lives:
        by_role[life["role"]].append(life)
    for name, own in by_role.items():
        ends = [life["started"] for life in own[1:]] + [last]
        for number, (life, end) in enumerate(zip(own, ends, strict=True), start=1):
            bars["y"].append(label(name))
            bars["base"].append(round((life["started"] - first) / 60, 3))
            bars["x"].append(round((end - life["started"]) / 60, 3))
            what = f"life {number}, attempt {life.get('attempt', 0)}, pid {life.get('pid', '?')}"
            bars["text"].append(label(what))
    traces: list[dict[str, Any]] = [
        {
            **{"type": "bar", "orientation": "h", "name": "lives", **bars},
            **{"hovertemplate": "%{y}: %{text}<extra></extra>", "textposition": "none"},
            "marker": {"color": "#9db8d9", "line": {"color": "#ffffff", "width": 2}},
        }
    ]
    for kind, symbol, color in (("restart", "x", "#c2410c"), ("rollback", "diamond", "#7c3aed")):
        found = [event for event in told if event["event"] == kind and event.get("role") in names]
        if found:
            places = {"x": [e["minute"] for e in found], "y": [label(e["role"]) for e in found]}
            marker = {"symbol": symbol, "size": 10, "color": color}
            trace = {"type": "scatter", "mode": "markers", "name": kind, "marker": marker, **places}
            traces.append(trace)
    about = "from the start of each process to its next start or the end" + _beginning(first)
    axis = {"autorange": "reversed", "automargin": True, "dtick": 1}
    layout = {"yaxis": axis, "bargap": 0.35}
    return chart("Lives of the roles", about, traces, "minutes", rows=len(names), **layout)


def _beginning(first: float) -> str:
    """What ties the minutes to the clock of the logs."""
    try:
        return f"; minute 0 is {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # of a damaged record
        return ""


def _memory_chart(beats: Sequence[Record], first: float) -> Chart | None:
    by_role: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for beat in beats:
        if fits(beat, {"rss_mib": NUMBER}):
            by_role[beat["role"]].append(((beat["time"] - first) / 60, beat["rss_mib"] / 1024))
    if not by_role:
        return None
    traces = []
    for role, points in sorted(by_role.items()):
        kept = _some(points)
        traces.append(curve(role, [x for x, _ in kept], [y for _, y in kept]))
    about = "GiB of each process, without what it shares with others and without its children"
    layout = {"yaxis": {"rangemode": "tozero"}, "showlegend": True}
    return chart("Memory by role", about, traces, "minutes", **layout)


_ROLLBACK = {"color": "#7c3aed", "width": 1, "dash": "dot"}
