"""Draws the three pictures of concepts.md, as SVG files without dependencies.

    python docs/concept_pictures.py docs/pictures

The schedule in `staleness.svg` is computed by the run's own rule, `StalenessContract`.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from run_picture import line, rect, text

from grpo_components.exchange.staleness import StalenessContract

WIDTH = 820
AGES = ("fresh", "one", "two")
"""Style of staleness 0, 1 and 2, and of versions in turn."""
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #3d444d }
.title { font-weight: 600; font-size: 14px } .quiet { fill: #59636e; font-size: 12px }
.strong { fill: #1f2328 } .card { fill: #fff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0 }
.box { fill: #f6f8fa; stroke: #8c959f } .arrow { stroke: #59636e; fill: none; marker-end: url(#to) }
.head { fill: #59636e } .step { fill: #f7c58a } .wait { fill: #eaeef2; stroke: #b1bac4 }
.fresh { fill: #a8dab5 } .one { fill: #9cc4f5 } .two { fill: #d2b8f0 }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d7e0 } .quiet { fill: #9198a1 } .strong { fill: #1f2328 }
  .card { fill: #0d1117; stroke: #3d444d } .grid { stroke: #3d444d }
  .box { fill: #161b22; stroke: #6e7681 } .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
  .wait { fill: #21262d; stroke: #484f58 }
}
"""


def picture(title: str, height: int, parts: list[str]) -> str:
    """Return the text of an SVG file."""
    head = '<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    head += 'orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"',
            f'  viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<style>{STYLE}</style><defs>{head}</defs>",
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            text(16, 28, title, "title"),
            *parts,
            "</svg>\n",
        ]
    )


def box(x: float, y: float, width: float, name: str, note: str, kind: str = "box") -> list[str]:
    """Return a box with a name and a note below it."""
    middle = x + width / 2
    return [
        rect(x, y, width, 44, kind),
        text(middle, y + 18, name, "" if kind == "box" else "strong", "middle"),
        text(middle, y + 35, note, "quiet" if kind == "box" else "strong", "middle"),
    ]


def arrow(*points: float) -> str:
    """Return a line through points x, y, x, y, ... with a head at its end."""
    path = " ".join(f"{x:g},{y:g}" for x, y in zip(points[::2], points[1::2], strict=True))
    return f'<polyline class="arrow" points="{path}"/>'


def loops() -> str:
    """Draw the two loops, which meet in the buffer and in the parameter server."""
    left, right, width, parts = 40, 590, 190, []
    rollout = [
        ("admit", "may another group start?"),
        ("pull, if due", "newest weights"),
        ("generate", "a group, with rewards"),
        ("filter", "failed, or all rewards equal"),
        ("reference logprobs", "if a KL needs them"),
    ]
    training = [
        ("take", "a batch of whole groups"),
        ("advantages", "from the rewards"),
        ("train step", "version + 1"),
        ("push, every n steps", "new weights"),
        ("finish step", "log, evaluate, save"),
    ]
    for x, name, steps in ((left, "rollout loop", rollout), (right, "training loop", training)):
        parts.append(text(x + width / 2, 62, name, "title", "middle"))
        for number, (step, note) in enumerate(steps):
            y = 76 + 66 * number
            parts += box(x, y, width, step, note)
            if number:
                parts.append(arrow(x + width / 2, y - 22, x + width / 2, y - 1))
    bottom = 76 + 66 * 4 + 22
    parts += [arrow(left, bottom, 18, bottom, 18, 98, left - 1, 98)]
    parts += [arrow(right + width, bottom, 802, bottom, 802, 98, right + width + 1, 98)]
    parts += box(330, 76, 160, "replay buffer", "finished groups", "one")
    parts += box(330, 274, 160, "parameter server", "published weights", "two")
    parts += [arrow(left + width, bottom - 8, 304, bottom - 8, 304, 98, 329, 98)]
    parts += [arrow(490, 98, right - 1, 98)]
    parts += [
        arrow(right, 296, 491, 296),
        arrow(330, 296, 262, 296, 262, 164, left + width + 1, 164),
    ]
    parts += [text(308, 92, "add", "quiet", "end"), text(540, 92, "take", "quiet", "middle")]
    parts += [text(540, 290, "push", "quiet", "middle"), text(267, 180, "pull", "quiet")]
    return picture("Two loops at the same time", 404, parts)


def schedule(
    contract: StalenessContract, lanes: int, steps: int
) -> tuple[list[tuple[int, float, float, int]], dict[int, tuple[float, float, list[int]]]]:
    """Return the groups (lane, start, end, version at the start) and the steps of a small run."""
    lengths, step_s, tick = (1.2, 2.3, 1.6, 2.8, 1.4, 1.9), 1.5, 0.1
    groups: list[tuple[int, float, float, int]] = []
    trained: dict[int, tuple[float, float, list[int]]] = {}
    free, busy_until, version, taken, now = [0.0] * lanes, 0.0, 0, set[int](), 0.0
    while len(trained) < steps or now < busy_until:
        if trained and now >= busy_until:
            version = max(trained)
        for lane in range(lanes):
            running = version < len(trained)
            living = len(groups) - len(taken) + (contract.groups_per_step if running else 0)
            if free[lane] <= now and contract.needed_version(version, living) <= version:
                free[lane] = now + lengths[len(groups) % len(lengths)]
                groups.append((lane, now, free[lane], version))
        ready = [n for n, each in enumerate(groups) if each[2] <= now and n not in taken]
        if now >= busy_until and len(ready) >= contract.groups_per_step and len(trained) < steps:
            batch = ready[: contract.groups_per_step]
            taken.update(batch)
            busy_until = now + step_s
            trained[len(trained) + 1] = (now, busy_until, batch)
        now = round(now + tick, 3)
    return groups, trained


def staleness() -> str:
    """Draw when groups start, and how old they are when they are trained."""
    contract = StalenessContract(max_staleness=1, groups_per_step=2)
    groups, trained = schedule(contract, lanes=3, steps=6)
    left, right, top, lane_height = 110, 790, 66, 34
    end = trained[6][1]
    step_of = {group: step for step, (_, _, batch) in trained.items() for group in batch}
    parts = []

    def x_of(time: float) -> float:
        return left + (right - left) * min(time, end) / end

    for lane in range(3):
        y = top + lane * lane_height
        parts.append(text(16, y + 18, "generator" if not lane else ""))
        parts.append(rect(left, y, right - left, 26, "wait"))
    for group, (lane, start, stop, version) in enumerate(groups):
        if start >= end:
            continue
        y, step = top + lane * lane_height, step_of.get(group)
        kind = "box" if step is None else AGES[contract.staleness(version, step - 1)]
        parts.append(rect(x_of(start), y, x_of(stop) - x_of(start), 26, kind))
        shown = f"v{version}" if step is None else f"v{version} → step {step}"
        wide = x_of(stop) - x_of(start) > 90
        style = "quiet" if step is None else "strong"
        middle = (x_of(start) + x_of(stop)) / 2
        parts.append(text(middle, y + 18, shown if wide else f"v{version}", style, "middle"))
    y = top + 3 * lane_height + 20
    parts.append(text(16, y + 18, "trainer"))
    for step, (start, stop, _) in trained.items():
        parts.append(rect(x_of(start), y, x_of(stop) - x_of(start) - 1, 26, "step"))
        middle = (x_of(start) + x_of(stop)) / 2
        parts.append(text(middle, y + 18, f"step {step}", "strong", "middle"))
        parts.append(line(x_of(stop), top - 6, x_of(stop), y + 26, "grid"))
        parts.append(text(x_of(stop), top - 10, f"v{step}", "quiet", "middle"))
    x, y = left, y + 44
    for kind, words in (
        ("fresh", "trained at staleness 0"),
        ("one", "trained at staleness 1"),
        ("box", "trained later"),
        ("wait", "waits: may not start yet"),
    ):
        parts += [rect(x, y, 16, 14, kind), text(x + 22, y + 12, words, "quiet")]
        x += 172
    return picture("Staleness, with max_staleness 1 and two groups per step", y + 30, parts)


def push_and_pull() -> str:
    """Draw how weights travel, and which version samples which token."""
    left, unit, parts = 110, 69, []
    steps, pull_at = 10, {2: 3.4, 4: 5.3, 8: 9.3}
    parts.append(text(16, 74, "trainer"))
    for step in range(1, steps + 1):
        x = left + unit * (step - 1)
        parts.append(rect(x, 56, unit - 3, 26, "step"))
        parts.append(text(x + unit / 2 - 1, 74, f"v{step}", "strong", "middle"))
        if step % 2 == 0 and step < steps:
            parts.append(arrow(x + unit - 2, 83, x + unit - 2, 105))
            parts.append(text(x + unit - 8, 99, "push", "quiet", "end"))
    parts.append(text(16, 126, "server"))
    for number, version in enumerate(range(0, steps, 2)):
        parts.append(rect(left + unit * version, 108, 2 * unit - 3, 26, AGES[number % 3]))
        parts.append(text(left + unit * (version + 1), 126, f"has v{version}", "strong", "middle"))
    bounds = [(0.0, 0), *((time, version) for version, time in pull_at.items()), (10.0, 10)]
    for time in pull_at.values():
        x = left + unit * time
        parts += [arrow(x, 135, x, 163), text(x + 6, 153, "pull", "quiet")]
    parts.append(text(16, 184, "generator"))
    responses = [
        [(0, 1.1), (1.15, 2.6), (2.65, 4.5), (4.55, 6.2), (6.25, 8.2), (8.25, 10)],
        [(0, 1.9), (1.95, 3.1), (3.45, 5.0), (5.3, 7.1), (7.15, 8.8), (9.3, 10)],
        [(0, 0.8), (0.85, 2.2), (2.25, 3.9), (3.95, 5.8), (5.85, 7.6), (7.65, 9.8)],
    ]
    for lane, row in enumerate(responses):
        y = 166 + 24 * lane
        for start, stop in row:
            for (since, version), (until, _) in pairwise(bounds):
                low, high = max(start, since), min(stop, until)
                if low < high:
                    kind = AGES[(version // 2) % 3]
                    parts.append(rect(left + unit * low, y, unit * (high - low), 19, kind))
            parts.append(line(left + unit * stop, y, left + unit * stop, y + 19, "grid"))
    note = "A bar is a response. Its colour is the version that sampled each token: "
    note += "a response in progress goes on with new weights."
    parts.append(text(16, 262, note, "quiet"))
    return picture("Push every 2 steps; pull every few groups", 278, parts)


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (loops, staleness, push_and_pull):
        (folder / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
