"""The time of each role: over restarts, with the trainers' idle time by cause."""

import plotly.graph_objects as go
import pytest

from grpo_tools.report.time_use import seconds_by_role, time_use_charts


def beat(role, time, seconds, **more):
    return {"role": role, "time": time, "seconds": seconds, **more}


BEATS = [
    beat("generator_0", 10.0, {"starting": 4.0, "sampling": 6.0}, sequence_share=0.5),
    beat("trainer_0", 10.0, {"starting": 2.0, "train_step": 5.0, "idle": 3.0}),
    beat("generator_0", 15.0, {"starting": 4.0, "sampling": 6.0, "idle: no group": 5.0}),
    beat("generator_0", 20.0, {"starting": 4.0, "sampling": 12.0}, sequence_share=0.75),
    {"role": "driver", "time": 20.0, "rss_mib": 1.0},
    beat("generator_0", 30.0, {"starting": 3.0, "sampling": 2.0}, sequence_share=1.0),
]


def test_processes_of_a_role_add_up_and_idle_trainers_wait_for_a_batch_or_for_the_rest():
    assert seconds_by_role(BEATS, waited_s=1.0) == {
        "generator_0": {"starting": 7.0, "sampling": 14.0},
        "trainer_0": {
            "starting": 2.0,
            "train_step": 5.0,
            "idle: no batch": 1.0,
            "idle: between steps": 2.0,
        },
    }


def test_the_charts_show_shares_of_the_wall_time_and_of_the_engine():
    times, sequences = time_use_charts(BEATS, 1.0)
    bars = go.Figure(times["figure"]).data
    for role in (0, 1):
        assert sum(bar.x[role] for bar in bars) == pytest.approx(1)
    [engine] = go.Figure(sequences["figure"]).data
    assert engine.y == pytest.approx((0.5, 1.0, 1.0))


def test_without_times_there_is_no_chart():
    assert time_use_charts(BEATS[4:5], 0.0) == time_use_charts([], 0.0) == []
