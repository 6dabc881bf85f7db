"""Draws what each role's process spent its time on, and how full the engines were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from grpo_components.files import Record
from grpo_components.rollout.engine_use import NO_GROUP, NO_REWARD
from grpo_components.time_use import IDLE, STARTING
from grpo_tools.report.curves import Chart, chart, curve
from grpo_tools.report.safe_text import label

_NO_BATCH, _BETWEEN_STEPS = f"{IDLE}: no batch", f"{IDLE}: between steps"
_KINDS = {
    "working": (),
    "weights, checkpoints": (
        *("loading weights", "gather_weights", "export_weights", "load_weights"),
        *("send_weights", "next_request"),
        *("hold_state", "write_state", "load_state", "read_state"),
    ),
    "starting": (STARTING,),
    "no reward": (NO_REWARD,),
    "no group": (NO_GROUP,),
    "idle": (IDLE, _BETWEEN_STEPS),
    "no batch": (_NO_BATCH,),
}
"""What a bar shows as one part, in the order of the page's colors; what is not listed is work."""
_KIND_OF = {activity: kind for kind, activities in _KINDS.items() for activity in activities}


def seconds_by_role(
    heartbeats: Sequence[Record], waited_s: float = 0.0
) -> dict[str, dict[str, float]]:
    """Add up the time of each role's processes by activity."""
    total: dict[str, dict[str, float]] = {}
    for role, processes in _processes(heartbeats).items():
        seconds: defaultdict[str, float] = defaultdict(float)
        for beats in processes:
            for activity, value in beats[-1]["seconds"].items():
                seconds[activity] += value
        if role.startswith("trainer_") and IDLE in seconds:
            idle = seconds.pop(IDLE)
            seconds[_NO_BATCH] = min(idle, waited_s)
            seconds[_BETWEEN_STEPS] = idle - seconds[_NO_BATCH]
        total[role] = dict(seconds)
    return total


def time_use_charts(heartbeats: Sequence[Record], waited_s: float) -> list[Chart]:
    """Draw the time of each role by activity, and the share of each engine's sequences in use."""
    by_role = dict(sorted(seconds_by_role(heartbeats, waited_s).items()))
    if not by_role:
        return []
    walls = [sum(seconds.values()) for seconds in by_role.values()]
    traces = []
    for color, kind in enumerate(_KINDS):
        parts = [
            sum(s for what, s in seconds.items() if _KIND_OF.get(what, "working") == kind)
            for seconds in by_role.values()
        ]
        if not any(parts):
            continue
        both = [*zip(parts, walls, strict=True)]
        trace: dict[str, Any] = {"type": "bar", "orientation": "h", "name": label(kind)}
        trace |= {"y": [*map(label, by_role)], "x": [round(part / wall, 5) for part, wall in both]}
        trace |= {"text": [f"{part:.1f} s of {wall:.1f} s" for part, wall in both]}
        trace |= {"textposition": "none", "meta": {"color": color}}
        trace["hovertemplate"] = "%{y}: %{text}, %{x:.1%}<extra>%{fullData.name}</extra>"
        traces.append(trace)
    about = "share of the time of each role's processes, from their start to the last heartbeat"
    axis = {"autorange": "reversed", "automargin": True, "dtick": 1}
    layout: dict[str, Any] = {"yaxis": axis, "barmode": "stack", "bargap": 0.35}
    layout["xaxis"] = {"range": [0, 1], "tickformat": ".0%", "title": {"text": "share"}}
    charts = [chart("Time of each role", about, traces, "share", rows=len(by_role), **layout)]
    return charts + [each for each in [_sequences_chart(heartbeats)] if each]


def _sequences_chart(heartbeats: Sequence[Record]) -> Chart | None:
    """Draw the share of `max_num_seqs` in use between one heartbeat and the next."""
    first = min(beat["time"] for beat in heartbeats)
    traces = []
    for role, processes in sorted(_processes(heartbeats).items()):
        minutes, shares = [], []
        for beats in processes:
            used = before = 0.0  # seconds: full-engine time, and all time
            for beat in beats:
                wall = sum(value for key, value in beat["seconds"].items() if key != STARTING)
                if "sequence_share" in beat and wall > before:
                    minutes.append((beat["time"] - first) / 60)
                    shares.append((beat["sequence_share"] * wall - used) / (wall - before))
                    used, before = beat["sequence_share"] * wall, wall
        if minutes:
            traces.append(curve(role, minutes, shares))
    if not traces:
        return None
    about = "mean share of generator.max_num_seqs in use between two heartbeats"
    layout = {"yaxis": {"rangemode": "tozero", "tickformat": ".0%"}, "showlegend": True}
    return chart("Sequences in the engine", about, traces, "minutes", **layout)


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
