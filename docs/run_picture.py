r"""Draws README's picture from the folder of a finished run, as an SVG without dependencies.

    tune run async_grpo_full_finetune_distributed --config tiny_async_grpo num_steps=100 \
        output_dir=RUN
    python docs/run_picture.py RUN docs/run.svg --first-step 31

Above: the groups that each generator worked on, and the steps that were trained meanwhile.
Below: the success on held-out prompts over the whole run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from grpo_components.files import Record, records_of
from grpo_tools.report.run_files import read_run

WIDTH, LEFT, RIGHT = 840, 118, 822
LANE, BAR, CURVE = 7, 24, 150
"""Heights: of a group, of a training step, and of the chart of held-out success."""
STEPS_SHOWN = 10
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #3d444d }
.title { font-weight: 600; font-size: 14px } .quiet { fill: #59636e }
.strong { fill: #1f2328; font-weight: 600 }
.card { fill: #fff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0 }
.group { fill: #9cc4f5 } .group.one { fill: #1f6feb }
.step { fill: #f7c58a } .step.one { fill: #e8851c }
.push { stroke: #59636e; stroke-dasharray: 2 2 }
.band { fill: #1f6feb; opacity: .18 } .dot { fill: #1f6feb }
.held { fill: none; stroke: #1f6feb; stroke-width: 2 }
.trained { fill: none; stroke: #d9700a; opacity: .55 }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d7e0 } .quiet { fill: #9198a1 } .strong { fill: #1f2328 }
  .card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
  .group { fill: #27497a } .group.one { fill: #58a6ff }
  .step { fill: #6b4317 } .step.one { fill: #f0883e } .push { stroke: #9198a1 }
  .band, .dot { fill: #58a6ff } .held { stroke: #58a6ff } .trained { stroke: #f0883e }
}
"""


@dataclass
class Events:
    """What the receipts say about the last attempt; times are in seconds since 1970."""

    groups: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Group -> its generator, and when it started."""
    finished: dict[int, float] = field(default_factory=dict)
    """Group -> when its last response was scored."""
    batches: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    """Step -> the groups that it trained, and when it began."""
    done: dict[int, float] = field(default_factory=dict)
    """Step -> when it was trained and pushed."""
    published: dict[int, float] = field(default_factory=dict)
    """Policy version -> when generators could pull it."""
    loads: list[Record] = field(default_factory=list)
    """Loads of new weights by the generators."""


def read_events(receipts: Iterable[Record]) -> Events:
    """Return the events of the last attempt."""
    found = Events()
    for event in receipts:
        kind, time = event["event"], event["time"]
        if kind == "start":
            found = Events()
        elif kind == "issue":
            found.groups[event["group"]] = (event["role"], time)
        elif kind == "finish":
            found.finished[event["group"]] = time
        elif kind == "sample":
            found.batches[event["step"]] = (event["groups"], time)
        elif kind == "step":
            found.done[event["step"]] = time
        elif kind == "publish":
            found.published[event["version"]] = time
        elif kind == "load":
            found.loads.append(event)
    return found


def overlap(events: Events, first_step: int, y: float) -> tuple[list[str], float]:
    """Draw groups and training steps on one time axis; return the parts and where they end."""
    steps = [step for step in sorted(events.done) if step >= first_step][:STEPS_SHOWN]
    if not steps:
        raise ValueError(f"first_step: {first_step} given, and the last attempt trained none such")
    start, end = events.batches[steps[0]][1], events.done[steps[-1]]
    one = steps[len(steps) // 2]
    parts, feet = [], {}

    def x_of(time: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(time, start), end) - start) / (end - start)

    for role in sorted({role for role, _ in events.groups.values()}):
        parts += [text(12, y + 12, role), text(12, y + 28, "groups", "quiet")]
        lanes: list[float] = []  # end of the last group in each lane
        for group, (owner, since) in events.groups.items():
            until = events.finished.get(group, end)
            if owner != role or until <= start or since >= end:
                continue
            lane = next((n for n, last in enumerate(lanes) if last <= since), len(lanes))
            lanes[lane : lane + 1] = [until]
            kind = "group one" if group in events.batches[one][0] else "group"
            x, height = x_of(since), LANE - 1
            parts.append(rect(x, y + lane * LANE, x_of(until) - x, height, kind))
        feet[role] = y + max(len(lanes) * LANE, 34)
        y = feet[role] + 10
    y += 16
    parts += [text(12, y + 16, "trainer"), text(12, y + 32, "steps", "quiet")]
    for load in events.loads:
        since = events.published.get(load["version"], end)
        if start < since and load["time"] < end:
            parts.append(line(x_of(since), y, x_of(load["time"]), feet[load["role"]], "push"))
    for step in steps:
        x = x_of(events.batches[step][1])
        width = x_of(events.done[step]) - x
        parts.append(rect(x, y, width, BAR, "step one" if step == one else "step"))
        if width > 24:
            kind = "strong" if step == one else ""
            parts.append(text(x + width / 2, y + 16, str(step), kind, "middle"))
    y += BAR + 18
    apart = next(
        s for n in range(-2, 6) for s in (10**n, 2 * 10**n, 5 * 10**n) if end - start < 7 * s
    )
    for tick in range(int((end - start) / apart) + 1):
        x = x_of(start + tick * apart)
        parts.append(
            text(x, y, f"{tick * apart:g} s", "quiet", "middle" if x < RIGHT - 20 else "end")
        )
    note = f"Strong colours: step {one} and the groups it trains. "
    note += "Dashed: new weights, from push to pull."
    return [*parts, text(12, y + 24, note, "quiet")], y + 24


def learning(metrics: Sequence[Record], top: float) -> tuple[list[str], float]:
    """Draw the success on held-out prompts with its interval, and that of the trained groups."""
    last = max(record["step"] for record in metrics)
    held = [r for r in metrics if r.get("eval/success_rate") is not None]
    parts = []

    def y_of(share: float) -> float:
        return top + CURVE * (1 - share)

    def points(records: Iterable[Record], key: str) -> list[str]:
        places = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        return [f"{LEFT + (RIGHT - LEFT) * s / last:.1f},{y_of(v):.1f}" for s, v in places]

    for quarter in range(5):
        y = y_of(quarter / 4)
        parts.append(line(LEFT, y, RIGHT, y, "grid"))
        parts.append(text(LEFT - 8, y + 4, f"{quarter / 4:g}", "quiet", "end"))
    trained = " ".join(points(metrics, "rollout/success_rate"))
    parts.append(f'<polyline class="trained" points="{trained}"/>')
    low = points(held, "eval/success_rate_low")
    band = low + points(held, "eval/success_rate_high")[::-1]
    parts.append(f'<polygon class="band" points="{" ".join(band)}"/>')
    middle = points(held, "eval/success_rate")
    parts.append(f'<polyline class="held" points="{" ".join(middle)}"/>')
    for x, y in (point.split(",") for point in middle):
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>')
    for fifth in range(6):
        x, anchor = LEFT + (RIGHT - LEFT) * fifth / 5, "middle" if fifth < 5 else "end"
        parts.append(text(x, top + CURVE + 18, f"step {last * fifth // 5}", "quiet", anchor))
    first, final = held[0]["eval/success_rate"], held[-1]["eval/success_rate"]
    note = f"Blue: {held[0]['eval/prompts']} held-out prompts, {first:.3f} to {final:.3f}, with "
    note += "95 % intervals. Orange: what each step trained."
    return [*parts, text(12, top + CURVE + 42, note, "quiet")], top + CURVE + 42


def draw(folder: Path, first_step: int) -> str:
    """Return the picture of a finished run, as the text of an SVG file."""
    metrics = read_run(folder).metrics
    events = read_events(records_of(folder / "receipts.jsonl"))
    above, y = overlap(events, first_step, 46)
    below, end = learning(metrics, y + 58)
    height = round(end + 16)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"',
        f'  viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text(12, 26, "Ten steps of a run: generation and training at the same time", "title"),
        *above,
        text(12, y + 40, "The whole run: share of responses that are right", "title"),
        *below,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {where}>{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a bar."""
    size = f'width="{max(width, 1):.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" {size} rx="1.5"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def main() -> None:
    """Draw the run that the command line names."""
    parser = argparse.ArgumentParser(description="Draw README's picture.")
    parser.add_argument("folder", type=Path, help="output_dir of a finished run")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--first-step", type=int, default=1, help="first of the ten steps shown")
    given = parser.parse_args()
    given.svg.write_text(draw(given.folder, given.first_step), encoding="utf-8")


if __name__ == "__main__":
    main()
