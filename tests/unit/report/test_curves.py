"""Every metric is drawn as a valid plotly figure with a bounded number of points."""

from itertools import chain

import plotly.graph_objects as go
import pytest

from grpo_tools.report.curves import MAX_POINTS, metric_charts
from grpo_tools.report.timeline import timeline


def metrics(num_steps):
    keys = ("rollout/reward_mean", "staleness/mean", "staleness/max", "ratio/max", "my/own")
    steps = [{"step": s, "attempt": 0, **dict.fromkeys(keys, s / 7)} for s in range(1, num_steps)]
    first = {"step": 0, "attempt": 0, "eval/success_rate": 0.1, "eval/reward_mean": 0.1}
    return [first, *(record | {"loss/kl_reference": None} for record in steps)]


def events():
    yield {"event": "start", "time": 100.0, "attempt": 0}
    for step in range(1, 9):
        now = 100.0 + 60 * step
        yield {"event": "issue", "time": now, "group": step, "role": "generator_0"}
        yield {"event": "finish", "time": now + 9, "group": step}
        yield {"event": "sample", "time": now + 10, "step": step}
        yield {"event": "publish", "time": now + 20, "version": step}
        yield {"event": "step", "time": now + 21, "step": step, "version": step}
        yield {"event": "load", "time": now + 22, "role": "generator_0", "version": step}
    yield {"event": "restart", "time": 400.0, "role": "generator_0", "what": "died"}
    yield {"event": "rollback", "time": 500.0, "role": "trainer_0", "what": "died"}


STARTS = [
    {"role": role, "started": started, "attempt": 0, "pid": 1}
    for role, started in (("generator_0", 90.0), ("trainer_0", 95.0), ("generator_0", 410.0))
]
USE = {"rss_mib": 512.0, "seconds": {"starting": 9.0, "idle: no group": 1.0}, "sequence_share": 0.5}
HEARTBEATS = [{"role": "generator_0", "time": 100.0 + i, **USE} for i in range(3)]


def test_plotly_accepts_every_figure():
    over_time, role_events = timeline(events(), STARTS, HEARTBEATS)
    charts = [*chain(*metric_charts(metrics(30)).values()), *over_time]
    assert {chart["title"] for chart in charts} >= {
        *("Reward", "Success", "Staleness", "my/own", "Policy versions", "Role processes"),
        *("Memory by role", "Time of each role", "Sequences in the engine"),
    }
    assert "KL" not in {chart["title"] for chart in charts}, "it was never measured"
    for chart in charts:
        figure = go.Figure(chart["figure"])  # raises for unknown properties
        assert all(len(trace.x) == len(trace.y) > 0 for trace in figure.data), chart["title"]
    assert [(e["event"], e["minute"]) for e in role_events] == [
        ("start", pytest.approx(10 / 60, abs=0.01)),
        ("restart", pytest.approx(310 / 60, abs=0.01)),
        ("rollback", pytest.approx(410 / 60, abs=0.01)),
    ]


def test_a_long_run_has_no_more_points_than_a_screen():
    for chart in chain(*metric_charts(metrics(12_345)).values()):
        assert all(len(trace["y"]) <= MAX_POINTS for trace in chart["figure"]["data"])


def test_each_reward_term_has_a_chart_of_its_mean_and_deviation():
    """A name may contain anything."""
    names = ("format", "a_mean", "x/y_std", "two\nlines")
    keys = [f"reward_terms/{name}_{kind}" for name in names for kind in ("mean", "std")]
    charts = metric_charts([{"step": s, **dict.fromkeys(keys, s / 2)} for s in (1, 2)])
    assert [chart["title"] for chart in charts["Reward terms"]] == [*names]
    assert all(len(chart["figure"]["data"]) == 2 for chart in charts["Reward terms"])
    assert not charts["Other metrics"]


def test_an_evaluation_is_drawn_at_the_step_after_which_it_began():
    evaluated = {"step": 13, "rollout/reward_mean": 1.0, "eval/reward_mean": 0.5, "eval/step": 10}
    [chart] = metric_charts([{"step": 0, "eval/reward_mean": 0.25}, evaluated])["Learning"]
    found = {trace["name"]: trace["x"] for trace in chart["figure"]["data"]}
    assert found == {"training": [13], "held-out": [0, 10]}


def test_several_runs_have_a_color_each_and_their_curves_a_dash_each():
    first = [{"step": s, "rollout/reward_mean": 1, "eval/reward_mean": 1} for s in (1, 2)]
    second = [{"step": s, "rollout/reward_mean": 2, "my/own": 3} for s in (1, 2, 3)]
    charts = metric_charts(first, second, names=("a<b>", "b"))
    [reward] = charts["Learning"]
    found = [(t["name"], t["meta"]["color"], t["meta"]["dash"]) for t in reward["figure"]["data"]]
    first = [("a&lt;b&gt;: training", 0, 0), ("a&lt;b&gt;: held-out", 0, 1)]
    assert found == [*first, ("b: training", 1, 0)]
    [own] = charts["Other metrics"]
    assert own["figure"]["layout"]["showlegend"] and own["figure"]["data"][0]["name"] == "b"
    assert go.Figure(reward["figure"])
