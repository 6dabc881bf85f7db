"""Draws charts over a run's time: policy versions, role processes, their use of time and memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from grpo_components.files import Record
from grpo_components.rollout.engine_use import NO_GROUP, NO_REWARD
from grpo_components.time_use import IDLE, STARTING
from grpo_tools.report.curves import Chart, chart, curve
from grpo_tools.report.safe_text import label

_MARKS = {"restart": ("x", "#c2410c"), "rollback": ("diamond", "#7c3aed")}
"""Name of an event of a role -> symbol and color that mark the event in a chart."""
_ROLLBACK = {"color": "#7c3aed", "width": 1, "dash": "dot"}
_ROLES: dict[str, Any] = {"autorange": "reversed", "automargin": True, "dtick": 1}
_NO_BATCH, _BETWEEN_STEPS = f"{IDLE}: no batch", f"{IDLE}: between steps"
_KINDS = {
    "working": (),
    "weights, checkpoints": (
        *("loading weights", "gather_weights", "export_weights", "load_weights", "send_weights"),
        *("transfer_group", "hold_state", "write_state", "load_state", "read_state"),
    ),
    **{"starting": (STARTING,), "no reward": (NO_REWARD,), "no group": (NO_GROUP,)},
    **{"idle": (IDLE, _BETWEEN_STEPS), "no batch": (_NO_BATCH,)},
}
"""Colored part of a bar -> activities whose time it shows, in the order of the page's colors; all
activities that are not listed belong to `working`."""
_KIND_OF = {activity: kind for kind, activities in _KINDS.items() for activity in activities}
_Points = list[tuple[float, float]]
"""Times and values of a curve."""


def timeline(
    events: Iterable[Record],
    starts: Sequence[Record],
    heartbeats: Sequence[Record],
    waited_s: float = 0.0,
) -> tuple[list[Chart], list[Record]]:
    """Draw charts over time, and collect the starts, restarts and rollbacks of roles."""
    versions, memory = defaultdict[str, _Points](list), defaultdict[str, _Points](list)
    found: list[Record] = []
    times = [beat["time"] for beat in heartbeats] + [start["started"] for start in starts]
    first, last = min(times, default=0.0), max(times, default=0.0)
    for event in events:
        time, kind = event["time"], event["event"]
        first, last = min(first or time, time), max(last, time)
        if kind in ("publish", "load"):
            name = "published" if kind == "publish" else event["role"]
            versions[name].append((time, event["version"]))
        elif kind == "start" or kind in _MARKS:
            found.append(event)
    for beat in heartbeats:
        if "rss_mib" in beat:
            memory[beat["role"]].append((beat["time"], beat["rss_mib"] / 1024))
    happened = [{**event, "minute": round((event["time"] - first) / 60, 2)} for event in found]
    charts = [*_versions_chart(versions, happened, first)]
    charts += _processes_chart(starts, happened, first, last)
    charts += time_use_charts(heartbeats, waited_s)
    if memory:
        about = "GiB of each process, without shared memory and child processes"
        traces = [curve(role, *_minutes(memory[role], first)) for role in sorted(memory)]
        charts.append(_over_minutes("Memory by role", about, traces))
    return charts, happened


def seconds_by_role(
    heartbeats: Sequence[Record], waited_s: float = 0.0
) -> dict[str, dict[str, float]]:
    """Return role -> activity -> seconds; `waited_s` of trainer idle time is named `no batch`."""
    total: dict[str, dict[str, float]] = {}
    for role, processes in _processes(heartbeats).items():
        seconds: Any = Counter()
        for beats in processes:
            seconds.update(beats[-1]["seconds"])
        if role.startswith("trainer_") and IDLE in seconds:
            idle = seconds.pop(IDLE)
            seconds[_NO_BATCH] = min(idle, waited_s)
            seconds[_BETWEEN_STEPS] = idle - seconds[_NO_BATCH]
        total[role] = dict(seconds)
    return total


def time_use_charts(heartbeats: Sequence[Record], waited_s: float) -> list[Chart]:
    """Draw each role's time by activity, and each engine's used share of `max_num_seqs`."""
    by_role = dict(sorted(seconds_by_role(heartbeats, waited_s).items()))
    if not by_role:
        return []
    walls, traces = [sum(seconds.values()) for seconds in by_role.values()], []
    for color, kind in enumerate(_KINDS):
        parts = [
            sum(s for what, s in seconds.items() if _KIND_OF.get(what, "working") == kind)
            for seconds in by_role.values()
        ]
        if any(parts):
            both = [*zip(parts, walls, strict=True)]
            bars = {"y": [*map(label, by_role)], "x": [round(s / wall, 5) for s, wall in both]}
            bars["text"] = [f"{s:.1f} s of {wall:.1f} s" for s, wall in both]
            template = "%{y}: %{text}, %{x:.1%}<extra>%{fullData.name}</extra>"
            traces.append(_bars(label(kind), bars, template) | {"meta": {"color": color}})
    about = "share of the time of each role's processes, from their start to the last heartbeat"
    layout: dict[str, Any] = {"yaxis": _ROLES, "barmode": "stack", "bargap": 0.35}
    layout["xaxis"] = {"range": [0, 1], "tickformat": ".0%", "title": {"text": "share"}}
    charts = [chart("Time of each role", about, traces, "share", rows=len(by_role), **layout)]
    first, engines = min(beat["time"] for beat in heartbeats), []
    for role, processes in sorted(_processes(heartbeats).items()):
        if points := [point for beats in processes for point in _sequence_shares(beats)]:
            engines.append(curve(role, *_minutes(points, first)))
    if engines:
        about = "mean share of generator.max_num_seqs in use between two heartbeats"
        charts.append(_over_minutes("Sequences in the engine", about, engines, tickformat=".0%"))
    return charts


def _sequence_shares(beats: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """Yield each heartbeat's time, and the share of `max_num_seqs` in use since the one before."""
    used = before = 0.0  # seconds: full-engine time, and all time
    for beat in beats:
        wall = sum(value for key, value in beat["seconds"].items() if key != STARTING)
        if "sequence_share" in beat and wall > before:
            yield beat["time"], (beat["sequence_share"] * wall - used) / (wall - before)
            used, before = beat["sequence_share"] * wall, wall


def _processes(heartbeats: Sequence[Record]) -> dict[str, list[list[Record]]]:
    """Return the heartbeats that carry times: by role, and by process of that role."""
    by_role: dict[str, list[list[Record]]] = {}
    for beat in heartbeats:
        if seconds := beat.get("seconds"):
            processes = by_role.setdefault(beat["role"], [])
            if not processes or sum(seconds.values()) < sum(processes[-1][-1]["seconds"].values()):
                processes.append([])  # its clock began again: a new process
            processes[-1].append(beat)
    return by_role


def _versions_chart(
    versions: dict[str, _Points], happened: Sequence[Record], first: float
) -> Iterator[Chart]:
    traces = []
    for name in sorted(versions, key=lambda name: (name != "published", name)):
        line = {"shape": "hv", "width": 2.5 if name == "published" else 1.2}
        traces.append(curve(name, *_minutes(versions[name], first), line=line))
    rollbacks = [event["minute"] for event in happened if event["event"] == "rollback"]
    line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": _ROLLBACK}
    about = "policy version published by the trainers and loaded by each generator"
    about += "; a dotted line is a rollback" if rollbacks else ""
    if traces:
        shapes = [{**line, "x0": x, "x1": x} for x in rollbacks]
        yield chart("Policy versions", about, traces, "minutes", shapes=shapes)


def _processes_chart(
    starts: Sequence[Record], happened: Sequence[Record], first: float, last: float
) -> Iterator[Chart]:
    by_role: dict[str, list[Record]] = {}
    for start in starts:
        by_role.setdefault(start["role"], []).append(start)
    bars: dict[str, list[Any]] = {"y": [], "x": [], "base": [], "text": []}
    for name, own in by_role.items():
        ends = [start["started"] for start in own[1:]] + [last]
        for number, (start, end) in enumerate(zip(own, ends, strict=True), start=1):
            process = f"process {number}, attempt {start['attempt']}, pid {start['pid']}"
            begin, length = start["started"] - first, end - start["started"]
            row = (label(name), round(length / 60, 3), round(begin / 60, 3), label(process))
            for values, value in zip(bars.values(), row, strict=True):
                values.append(value)
    traces = [_bars("processes", bars, "%{y}: %{text}<extra></extra>")]
    for kind, (symbol, color) in _MARKS.items():
        events = [e for e in happened if e["event"] == kind and e.get("role") in by_role]
        if events:
            places = {"x": [e["minute"] for e in events], "y": [label(e["role"]) for e in events]}
            marker = {"symbol": symbol, "size": 10, "color": color}
            traces.append({"type": "scatter", "mode": "markers", "name": kind, "marker": marker})
            traces[-1] |= places
    about = "from the start of each process to the next one or the end of the run; "
    about += f"minute 0 is {datetime.fromtimestamp(first, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if by_role:
        layout, rows = {"yaxis": _ROLES, "bargap": 0.35}, len(by_role)
        yield chart("Role processes", about, traces, "minutes", rows=rows, **layout)


def _bars(name: str, bars: dict[str, Any], template: str) -> dict[str, Any]:
    shown = {"type": "bar", "orientation": "h", "name": name, "textposition": "none"}
    return {**shown, **bars, "hovertemplate": template}


def _over_minutes(title: str, about: str, traces: Sequence[Any], **axis: str) -> Chart:
    layout: dict[str, Any] = {"yaxis": {"rangemode": "tozero", **axis}, "showlegend": True}
    return chart(title, about, traces, "minutes", **layout)


def _minutes(points: _Points, first: float) -> tuple[list[float], list[float]]:
    return [(time - first) / 60 for time, _ in points], [value for _, value in points]
