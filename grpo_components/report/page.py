"""One static page that shows a run: everything in it, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from grpo_components.report.curves import Chart, metric_charts
from grpo_components.report.dropped import dropped_section
from grpo_components.report.rollouts import MOST_GROUPS, Shown, read_rollouts
from grpo_components.report.run_files import (
    FAILURES,
    NUMBER,
    Receipts,
    Record,
    first_and_last,
    read_failures,
    read_metrics,
    read_receipts,
    read_records,
)
from grpo_components.report.shown import escaped, script_json
from grpo_components.report.tables import table
from grpo_components.report.timeline import timeline

_MOST_EVENTS = 200
_LONGEST_TILE = 80
_PAIRS = (("trainer", "generator"), ("trainer", "reference"), ("generator", "reference"))
"""Whose logprobs are compared."""
_ARROW = " \N{RIGHTWARDS ARROW} "
_LONGEST_ERROR = 4000
_LOGPROBS_HOW = "add <code>log_token_logprobs=true</code> to the command of the run"


class NoStepsError(FileNotFoundError):
    """A run has logged no step yet."""


def write_report(output_dir: Path, most_groups: int = MOST_GROUPS) -> Path:
    """Write `report.html` of a run that has ended, is running, or was killed.

    Args:
        output_dir: of the run.
        most_groups: rollouts to show.

    Returns:
        Path of the page.

    Raises:
        NoStepsError: if no step was logged yet.
        OSError: if the page cannot be written.
    """
    page = _page(output_dir, most_groups)
    target, unfinished = output_dir / "report.html", output_dir / ".report.html.part"
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _page(folder: Path, most_groups: int) -> str:
    from plotly.offline import get_plotlyjs  # 5 MB, of no use to a run before its end

    logs = folder / "logs"
    receipts = read_receipts(folder / "receipts.jsonl")
    metrics = read_metrics(logs / "metrics.jsonl", receipts.attempts)
    if not metrics:
        raise NoStepsError(f"no step is logged in {logs / 'metrics.jsonl'}")
    over_time, told = timeline(
        read_records(logs / "events.jsonl"),
        list(read_records(logs / "roles.jsonl", {"role": str, "started": NUMBER})),
        list(read_records(logs / "heartbeats.jsonl", {"role": str, "time": NUMBER})),
    )
    failures = read_failures(logs / FAILURES)
    rollouts = read_rollouts(logs / "rollouts.jsonl", receipts.attempts, most_groups)
    charts: list[Chart] = []
    sections = metric_charts(metrics)
    others = sections.pop("Other metrics")
    html = [_smoothing()]
    sections = {name: found for name, found in sections.items() if found}
    for name, found in sections.items():
        html.append(_section(name, _charts(found, charts)))
    history = _charts(over_time, charts) + _history(receipts, failures, told)
    html += [
        _section("Rollouts", _rollouts(rollouts)),
        _section("Timeline", history),
        _section("Dropped groups", dropped_section(receipts, logs / "failed_samples.jsonl")),
        _section("Config", _config(folder)),
    ]
    names = [*sections, "Rollouts", "Timeline", "Dropped groups", "Config"]
    if others:
        shown = f"<details><summary>{len(others)} more</summary>{_charts(others, charts)}</details>"
        html.append(_section("Other metrics", shown))
        names.append("Other metrics")
    package = files("grpo_components.report")
    script = (package / "page.js").read_text(encoding="utf-8")
    plotly = get_plotlyjs()
    return Template((package / "page.html").read_text(encoding="utf-8")).substitute(
        title=escaped(f"Run {folder.resolve().name}"),
        state=_state(receipts, failures, metrics),
        links="".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in names),
        tiles="".join(_tiles(metrics, receipts)),
        sections="\n".join(html),
        footer=f"written by <code>python -m grpo_components.report {escaped(folder)}</code>",
        style=(package / "page.css").read_text(encoding="utf-8"),
        charts=script_json([chart["figure"] for chart in charts]),
        rollouts=script_json(rollouts.groups),
        plotly=plotly,
        script=script,
        script_hashes=" ".join(map(_hash, (plotly, script))),
    )


def _hash(script: str) -> str:
    """What the page's policy lets run: these scripts, and no other."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _section(name: str, content: str) -> str:
    return f'<section><h2 id="{_anchor(name)}">{escaped(name)}</h2>{content}</section>'


def _charts(found: Sequence[Chart], charts: list[Chart]) -> str:
    """Cards of these charts, which go to the others of the page."""
    cards = []
    for chart in found:
        title, about = escaped(chart["title"]), escaped(chart["about"])
        cards.append(
            f'<div class="chart"><h3>{title}</h3><p>{about}</p>'
            f'<div class="plot" role="img" aria-label="{title}" data-chart="{len(charts)}" '
            f'style="height: {chart["figure"]["layout"]["height"]}px"></div></div>'
        )
        charts.append(chart)
    return f'<div class="charts">{"".join(cards)}</div>'


def _smoothing() -> str:
    return (
        '<div class="smoothing"><label for="smoothing">Smoothing of the curves</label>'
        '<input type="range" id="smoothing" min="0" max="50" value="8">'
        '<span id="smoothing-shown">over about 8 points</span>'
        "<span>Drag in a chart to zoom, double-click to come back.</span></div>"
    )


def _state(
    receipts: Receipts, failures: Mapping[int, str | None], metrics: Sequence[Record]
) -> str:
    last, attempts = metrics[-1]["step"], len(receipts.starts)
    how, planned, why = "running, or killed", "", None
    if receipts.starts:
        start = receipts.starts[-1]
        how = _ending(receipts, failures, start["attempt"]) or how
        planned = f" of {start.get('num_steps')}"
        why = failures.get(start["attempt"])
    several = f", {attempts} attempts" if attempts > 1 else ""
    state = f'<p class="state">{escaped(f"{how}; {last}{planned} steps{several}")}</p>'
    return state + (f'<pre class="warn">{escaped(why, _LONGEST_ERROR)}</pre>' if why else "")


def _ending(receipts: Receipts, failures: Mapping[int, str | None], attempt: int) -> str | None:
    """How an attempt ended, in a word or two; None where it told nothing."""
    if attempt in failures:
        return "interrupted" if failures[attempt] is None else "failed"
    end = receipts.ends.get(attempt)
    if end is None:
        return None
    return "finished" if end.get("finished") else "stopped before its end"


def _tiles(metrics: Sequence[Record], receipts: Receipts) -> list[str]:
    steps = [record for record in metrics if record["step"] > 0]
    first, last = first_and_last(steps)
    of_steps = f"first and last {len(first)} steps" if len(first) > 1 else "first and last step"
    held_out = _values(metrics, "eval/success_rate")
    dropped = Counter(str(drop.get("reason")) for drop in receipts.drops)
    tiles = {
        f"reward, {of_steps}": _from_to(
            *(_mean(part, "rollout/reward_mean", ".2f") for part in (first, last))
        ),
        f"success, {of_steps}": _from_to(
            *(_mean(part, "rollout/success_rate", ".2f") for part in (first, last))
        ),
        "held-out success": _ARROW.join(f"{rate:.3f}" for rate in held_out[:1] + held_out[1:][-1:])
        or "-",
        "staleness, mean and most": f"{_mean(steps, 'staleness/mean', '.2f')}, {max(stalest):.0f}"
        if (stalest := _values(steps, "staleness/max"))
        else "-",
        **{
            f"{kind} tokens per second": _per_second(
                steps, receipts, f"throughput/{kind}_tokens_per_second"
            )
            for kind in ("generated", "trained")
        },
        "groups dropped": ", ".join(f"{n} {why}" for why, n in dropped.items()) or "none",
    }
    return [
        f'<div class="tile"><b>{escaped(value, _LONGEST_TILE)}</b><span>{name}</span></div>'
        for name, value in tiles.items()
        if value != "-"  # an evaluation alone has no steps
    ]


def _from_to(before: str, after: str) -> str:
    return before if before == after == "-" else before + _ARROW + after


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [r[key] for r in records if isinstance(r.get(key), (int, float))]


def _mean(records: Sequence[Record], key: str, spec: str) -> str:
    values = _values(records, key)
    return format(sum(values) / len(values), spec) if values else "-"


def _per_second(steps: Sequence[Record], receipts: Receipts, key: str) -> str:
    """Mean over the time of the steps, so that short ones do not count as much as long ones."""
    tokens = seconds = 0.0
    for record in steps:
        trained = receipts.trained_tokens.get(record["step"], 0)
        speed = sum(_values([record], "throughput/trained_tokens_per_second"))
        took = trained / speed if trained and speed else sum(_values([record], "time/step"))
        for rate in _values([record], key):
            tokens, seconds = tokens + rate * took, seconds + took
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _history(receipts: Receipts, failures: Mapping[int, str | None], told: Sequence[Record]) -> str:
    rows = []
    for start in receipts.starts:
        attempt, done = start["attempt"], start["steps_done"]
        how = _ending(receipts, failures, attempt) or "no end was written"
        if why := failures.get(attempt):
            how += f": {why}"
        rows.append((attempt, done, receipts.last_steps.get(attempt, done), how))
    parts = [
        '<div class="box"><h3>Attempts</h3>',
        '<p class="about">A later attempt replaces the steps from where it goes on, '
        "as soon as it has done one.</p>",
        table(("attempt", "goes on after step", "last step", "how it ended"), rows),
        "</div>",
    ]
    if not rows:
        parts = ['<p class="about">no receipts.jsonl, which would tell of attempts</p>']
    events = [event for event in told if event["event"] != "start"]
    if events:
        shown = [
            (
                event["minute"],
                event["event"],
                event.get("attempt"),
                event.get("role"),
                f"{event.get('what')}{'; given up' if event.get('given_up') else ''}",
            )
            for event in events[-_MOST_EVENTS:]
        ]
        told_all = f"the last {len(shown)} of {len(events)}" if len(events) > len(shown) else "all"
        columns = ("minute", "what", "attempt", "role", "why")
        head = f'<div class="box"><h3>Restarts and rollbacks</h3><p class="about">{told_all}</p>'
        parts += [head, table(columns, shown), "</div>"]
    return "".join(parts)


def _config(folder: Path) -> str:
    parts = []
    earlier = sorted(folder.glob("config_attempt_*.yaml"))
    for path in [folder / "config.yaml", *earlier]:
        if path.is_file():
            is_last = path.name == "config.yaml"
            name = f"{path.name}, of the last attempt" if is_last and earlier else path.name
            said = path.read_text(encoding="utf-8", errors="replace")
            parts.append(
                f'<details class="box"><summary>{escaped(name)}</summary>'
                f"<pre>{escaped(said, 100_000)}</pre></details>"
            )
    return "".join(parts) or '<p class="about">no config.yaml</p>'


def _rollouts(shown: Shown) -> str:
    if not shown.groups and shown.logged:
        return f'<p class="about">none of the {shown.logged:,} groups that are logged</p>'
    if not shown.groups:
        return (
            '<p class="about">no rollouts are logged: <code>rollouts_logged_per_step</code> '
            "groups of each step would be, but of what <code>train_from</code> reads, which has no "
            "text</p>"
        )
    about = f"{len(shown.groups):,} of the {shown.logged:,} groups in logs/rollouts.jsonl"
    if len(shown.groups) < shown.logged:
        about += ", spread evenly over the run (<code>--rollouts N</code> shows another number)"
    if shown.superseded:
        about += f"; {shown.superseded:,} more are of steps that a later attempt has done again"
    differences = [" - ".join(pair) for pair in _PAIRS if shown.logprobs.issuperset(pair)]
    colors = [*((name, name) for name in differences), ("", "nothing")]
    if shown.logprobs:
        logprobs = (
            "Point at a token for its logprobs, click on it, or use the arrow keys in its box. "
            "A dot stands for a token without text of its own."
        )
    else:
        logprobs = f"Tokens have no logprobs here: {_LOGPROBS_HOW}."
    kinds = {
        **{"all": "all", "mixed": "some right, some wrong", "right": "all right"},
        **{"wrong": "none right", "failed": "with a failed sample"},
    }
    orders = ("newest first", "oldest first", "lowest reward", "highest reward", "longest")
    orders += ("largest logprob difference",) if differences else ()
    filters = [
        _input("words", "text in it", "search"),
        _select("kind", "responses", list(kinds.items())),
        _select("finish", "finish reason", [("", "any")]),
        _input("from", "from step", "number"),
        _input("to", "to step", "number"),
        _select("order", "order", [(order, order) for order in orders]),
        _select("color", "tokens coloured by", colors),
    ]
    return (
        f'<p class="about">{about}. {logprobs}</p>'
        f'<div class="box"><div class="filters">{"".join(filters)}</div>'
        '<div class="legend" id="rollout-legend"><span></span><span class="scale"></span>'
        '<span></span></div><div class="about" id="rollout-count" role="status"></div></div>'
        '<div id="rollout-list"></div><button id="rollout-more" hidden>show more</button>'
    )


def _input(name: str, label: str, kind: str) -> str:
    return f'<label>{label}<input type="{kind}" id="filter-{name}"></label>'


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    chosen = "".join(f'<option value="{value}">{said}</option>' for value, said in options)
    return f'<label>{label}<select id="filter-{name}">{chosen}</select></label>'
