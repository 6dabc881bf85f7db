"""Draws charts of the metrics over steps, as plotly figures."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo_components.report.run_files import NUMBER, Record
from grpo_components.report.safe_text import label

MAX_POINTS = 1000
"""Maximum number of points in a curve; in a longer run, each point combines several steps."""
MAX_OTHER_CHARTS = 300
"""Maximum number of charts for metrics that have no panel of their own."""
_FEW_STEPS = 8
"""With at most this many steps, only steps get ticks; plotly would add ticks between them."""
_HEIGHT, _ROW_HEIGHT = 270, 20
"""Height in pixels of a chart, and of each extra row in its legend or on its vertical axis."""
_FREE_ROWS = 8
"""Number of rows on the vertical axis that fit into `_HEIGHT`."""
_LEGEND_COLUMNS = 2
"""Number of columns in a legend on a narrow screen."""
Chart = dict[str, Any]
"""Keys: `title`, `about` (one line) and `figure` (plotly's `data` and `layout`)."""


@dataclass(frozen=True)
class _Panel:
    """Says what a chart shows; `curves` maps metric keys to names in the legend."""

    title: str
    about: str
    curves: dict[str, str]
    smooth: bool = True
    range: tuple[float, float] | None = None
    log: bool = False
    from_zero: bool = False


def _training_and_held_out(metric: str) -> dict[str, str]:
    """Return the curves of a metric that both training and evaluation measure."""
    return {f"rollout/{metric}": "training", f"eval/{metric}": "held-out"}


_PANELS = {
    "Learning": (
        _Panel(
            "Reward",
            "mean over the responses of a step or an evaluation",
            _training_and_held_out("reward_mean"),
        ),
        _Panel(
            "Success",
            "share of responses with full reward",
            _training_and_held_out("success_rate"),
            range=(-0.02, 1.02),
        ),
        _Panel(
            "Response length",
            "sampled tokens per response",
            {"rollout/response_tokens_mean": "tokens"},
            from_zero=True,
        ),
        _Panel("Entropy", "of the trainer's next-token distribution, nats", {"entropy": "entropy"}),
        _Panel("Loss", "total, and its policy part", {"loss/total": "", "loss/policy": ""}),
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
            "probability of a token: trainer / generator",
            {"ratio/mean": "mean", "mismatch/ratio_p01": "1 %", "mismatch/ratio_p99": "99 %"},
        ),
        _Panel("Largest ratio", "over all tokens of a step", {"ratio/max": "largest"}, log=True),
        _Panel(
            "Clipped tokens",
            "share of tokens whose ratio is outside the clip range",
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
            "of the tokens under the ratios' weights, as a share",
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
            "seconds: whole step and its parts",
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
            "groups left after taking a batch",
            {"buffer/size": "groups"},
            from_zero=True,
        ),
        _Panel("Learning rate", "", {"lr": "learning rate"}, smooth=False, from_zero=True),
    ),
}
_BOOKKEEPING = {"step", "attempt", "policy_version", "eval/policy_version", "eval/prompts"}


def metric_charts(metrics: Sequence[Record]) -> dict[str, list[Chart]]:
    """Return charts of a run's metrics by section; a metric without values gets no chart.

    Args:
        metrics: metrics of each step, in order.
    """
    sections = {
        section: [chart for panel in panels if (chart := _chart(metrics, panel))]
        for section, panels in _PANELS.items()
    }
    drawn = {key for panels in _PANELS.values() for panel in panels for key in panel.curves}
    keys = dict.fromkeys(key for record in metrics for key in record)
    others = [_Panel(key, "", {key: key}) for key in keys if key not in drawn | _BOOKKEEPING]
    others = others[:MAX_OTHER_CHARTS]
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
    """Return a chart for the page.

    Args:
        title: title of the chart.
        about: one line that says what is drawn.
        traces: plotly traces.
        x_title: title of the horizontal axis.
        rows: number of names on the vertical axis.
        layout: additional settings of plotly's layout.
    """
    x_axis: dict[str, Any] = {"title": {"text": x_title}}
    if x_title == "step" and len({x for trace in traces for x in trace["x"]}) <= _FEW_STEPS:
        x_axis |= {"tickmode": "array", "tickvals": sorted({x for t in traces for x in t["x"]})}
    legend = max(
        0, math.ceil(len(traces) / _LEGEND_COLUMNS) - 2
    )  # the margin has room for two rows
    shared = {
        **{"xaxis": x_axis, "showlegend": len(traces) > 1},
        "height": _HEIGHT + _ROW_HEIGHT * max(legend, rows - _FREE_ROWS),
    }
    return {
        "title": title,
        "about": about,
        "figure": {"data": [*traces], "layout": shared | layout},
    }


def curve(name: str, x: Sequence[float], y: Sequence[float], **trace: Any) -> dict[str, Any]:
    """Return the plotly trace of a curve; `meta="smooth"` lets the page's slider smooth it.

    Args:
        name: name in the legend.
        x: steps or minutes.
        y: finite values.
        trace: additional plotly settings of the trace.
    """
    mode = "lines" if len(y) > 1 else "markers"  # a single point has no line
    lines = {"type": "scatter", "mode": mode, "name": label(name)}
    return {**lines, "x": short(x), "y": short(y), **trace}


def thinned(
    x: Sequence[float],
    y: Sequence[float],
    combine: Callable[[Sequence[float]], float],
) -> tuple[list[float], list[float]]:
    """Reduce a curve to at most `MAX_POINTS` points by combining neighbors.

    Args:
        x: steps; a combined point is drawn at its last step.
        y: values.
        combine: function that computes the value of a combined point from those of its steps.

    Returns:
        Steps and values of the points.
    """
    width = math.ceil(len(y) / MAX_POINTS) or 1
    starts = range(0, len(y), width)
    return (
        [x[min(start + width, len(x)) - 1] for start in starts],
        [combine(y[start : start + width]) for start in starts],
    )


def short(values: Sequence[float]) -> list[float]:
    """Round to six significant digits, more than a screen shows."""
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
    several = len(panel.curves) > 1  # even if only one of them has data
    return chart(panel.title, panel.about, traces, yaxis=axis, showlegend=several)


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMBER) and abs(value) < sys.float_info.max  # also False for NaN
