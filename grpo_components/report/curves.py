"""The curves of a report: metrics over steps, as charts for plotly."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_components.report.run_files import NUMBER, Record
from grpo_components.report.shown import label

MOST_POINTS = 1000
"""Of one curve; where a run has more steps, each point stands for several."""
MOST_OTHERS = 300
"""Charts of other metrics."""
_FEW_STEPS = 8
"""Each of which gets its tick: plotly would put some between them."""
_HEIGHT, _ROW, _ROWS = 270, 20, 8
"""Pixels of a chart, and of a row in its legend or on its axis; so many rows need no more."""
_NAMES_IN_A_ROW = 2
"""Of a legend, on a narrow screen."""
Chart = dict[str, Any]
"""`title`, `about` (one line) and `figure` (plotly's `data` and `layout`)."""


@dataclass(frozen=True)
class _Panel:
    """One chart: its curves by metric key, each with its name in the legend."""

    title: str
    about: str
    curves: dict[str, str]
    smooth: bool = True
    range: tuple[float, float] | None = None
    log: bool = False
    from_zero: bool = False


def _both(metric: str) -> dict[str, str]:
    """Curves of what is measured in training and at evaluations."""
    return {f"rollout/{metric}": "training", f"eval/{metric}": "held-out"}


_PANELS = {
    "Learning": (
        _Panel(
            "Reward", "mean over the responses of a step or an evaluation", _both("reward_mean")
        ),
        _Panel(
            "Success",
            "share of responses with the full reward",
            _both("success_rate"),
            range=(-0.02, 1.02),
        ),
        _Panel(
            "Response length",
            "sampled tokens per response",
            {"rollout/response_tokens_mean": "tokens"},
            from_zero=True,
        ),
        _Panel("Entropy", "of the trainer's next-token distribution, nats", {"entropy": "entropy"}),
        _Panel("Loss", "aggregated, and its policy part", {"loss/total": "", "loss/policy": ""}),
        _Panel("Gradient norm", "before clipping", {"grad_norm": "norm"}, from_zero=True),
    ),
    "How far apart generator and trainer are": (
        _Panel(
            "Staleness",
            "policy versions between a trained token and the trainer",
            {"staleness/mean": "mean", "staleness/max": "oldest token"},
            from_zero=True,
        ),
        _Panel(
            "Ratio",
            "trainer's probability of a token over the generator's",
            {"ratio/mean": "mean", "mismatch/ratio_p01": "1 %", "mismatch/ratio_p99": "99 %"},
        ),
        _Panel("Largest ratio", "of all tokens in a step", {"ratio/max": "largest"}, log=True),
        _Panel(
            "Clipped tokens",
            "share whose ratio lies outside the clip range",
            {"ratio/clip_fraction_low": "below", "ratio/clip_fraction_high": "above"},
            from_zero=True,
        ),
        _Panel(
            "KL",
            "nats per token: generator to trainer before the update, and policy to reference",
            {"mismatch/generator_kl": "generator", "loss/kl_reference": "reference"},
        ),
        _Panel(
            "Effective sample size",
            "share of the tokens that the ratios leave",
            {"mismatch/effective_sample_size": "share"},
        ),
    ),
    "Machinery": (
        _Panel(
            "Throughput",
            "tokens per second of wall time, evaluations included",
            {
                "throughput/generated_tokens_per_second": "generated",
                "throughput/trained_tokens_per_second": "trained",
            },
            from_zero=True,
        ),
        _Panel(
            "Time of a step",
            "seconds: the whole step, and its parts",
            {
                "time/step": "step",
                "time/wait_for_batch": "waiting for a batch",
                "time/train": "training",
                "time/push": "push",
            },
            from_zero=True,
        ),
        _Panel(
            "Buffer",
            "groups left after a batch was taken",
            {"buffer/size": "groups"},
            from_zero=True,
        ),
        _Panel("Learning rate", "", {"lr": "learning rate"}, smooth=False, from_zero=True),
    ),
}
_BOOKKEEPING = {"step", "attempt", "policy_version", "eval/policy_version", "eval/prompts"}


def metric_charts(metrics: Sequence[Record]) -> dict[str, list[Chart]]:
    """Charts of a run's metrics by section; what was never measured is left out.

    Args:
        metrics: of each step, in order.
    """
    sections = {
        section: [chart for panel in panels if (chart := _chart(metrics, panel))]
        for section, panels in _PANELS.items()
    }
    drawn = {key for panels in _PANELS.values() for panel in panels for key in panel.curves}
    keys = dict.fromkeys(key for record in metrics for key in record)
    others = [_Panel(key, "", {key: key}) for key in keys if key not in drawn | _BOOKKEEPING]
    others = others[:MOST_OTHERS]
    sections["Other metrics"] = [chart for panel in others if (chart := _chart(metrics, panel))]
    return sections


def chart(
    title: str,
    about: str,
    traces: Sequence[dict[str, Any]],
    x_title: str = "step",
    rows: int = 0,
    **layout: Any,
) -> Chart:
    """A chart as the page draws it.

    Args:
        title: of the chart.
        about: one line that says what is drawn.
        traces: plotly's.
        x_title: of the horizontal axis.
        rows: that the vertical axis names.
        layout: plotly's, besides what all charts share.
    """
    x_axis: dict[str, Any] = {"title": {"text": x_title}}
    if x_title == "step" and len({x for trace in traces for x in trace["x"]}) <= _FEW_STEPS:
        x_axis |= {"tickmode": "array", "tickvals": sorted({x for t in traces for x in t["x"]})}
    legend = max(0, math.ceil(len(traces) / _NAMES_IN_A_ROW) - 2)  # two rows have their room
    shared = {
        **{"xaxis": x_axis, "showlegend": len(traces) > 1},
        "height": _HEIGHT + _ROW * max(legend, rows - _ROWS),
    }
    return {
        "title": title,
        "about": about,
        "figure": {"data": [*traces], "layout": shared | layout},
    }


def curve(name: str, x: Sequence[float], y: Sequence[float], **trace: Any) -> dict[str, Any]:
    """A plotly trace of at most `MOST_POINTS` points; a `meta` of "smooth" lets the reader smooth.

    Args:
        name: in the legend.
        x: where the values lie.
        y: the values, finite.
        trace: plotly's other settings.
    """
    mode = "lines" if len(y) > 1 else "markers"  # a single point has no line
    lines = {"type": "scatter", "mode": mode, "name": label(name)}
    return {**lines, "x": short(x), "y": short(y), **trace}


def thinned(
    x: Sequence[float],
    y: Sequence[float],
    combine: Callable[[Sequence[float]], float],
) -> tuple[list[float], list[float]]:
    """The same curve in at most `MOST_POINTS` points, each of them of equally many others.

    Args:
        x: where the values lie.
        y: the values.
        combine: values -> the value of their point.
    """
    width = math.ceil(len(y) / MOST_POINTS) or 1
    starts = range(0, len(y), width)
    return (
        [x[min(start + width, len(x)) - 1] for start in starts],
        [combine(y[start : start + width]) for start in starts],
    )


def short(values: Sequence[float]) -> list[float]:
    """Numbers in six digits, which is more than a screen shows."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def _chart(metrics: Sequence[Record], panel: _Panel) -> Chart | None:
    traces = []
    for key, name in panel.curves.items():
        points = [(r["step"], float(r[key])) for r in metrics if _is_number(r.get(key))]
        if not points:
            continue
        steps, values = [list(column) for column in zip(*points, strict=True)]
        if key.startswith("eval/"):
            trace = curve(name, steps, values, mode="lines+markers", line={"dash": "dot"})
        else:
            steps, values = thinned(steps, values, max if key.endswith("max") else fmean)
            smooth = panel.smooth and not key.endswith("max")
            trace = curve(name or key, steps, values)
            trace |= {"meta": "smooth"} if smooth else {}
        traces.append(trace)
    if not traces:
        return None
    axis: dict[str, Any] = {"type": "log"} if panel.log else {}
    axis |= {"range": list(panel.range)} if panel.range else {}
    axis |= {"rangemode": "tozero"} if panel.from_zero else {}
    several = len(panel.curves) > 1  # the name of one tells that the others were not measured
    return chart(panel.title, panel.about, traces, yaxis=axis, showlegend=several)


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBER) and abs(value) < sys.float_info.max  # no NaN, either
