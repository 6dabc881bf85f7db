"""Where and how long a run ran, what its roles did, and what the last evaluation found."""

import re

import plotly.graph_objects as go
import pytest
from lib.rows import write_rows

from grpo_tools.report.facts import held_out_table, read_facts
from grpo_tools.report.run_files import History
from grpo_tools.report.timeline import seconds_by_role, time_use_charts


@pytest.fixture
def write(tmp_path):
    def write(name, *records):
        write_rows(tmp_path / "logs" / name, *records, torn='{"torn')
        return tmp_path

    return write


def start(time, cpus=2, **libraries):
    return {"event": "start", "time": time, "cpus": cpus, "libraries": libraries}


def roles(*nodes, attempt=0):
    return [{"role": "x", "attempt": attempt, "node": node} for node in nodes]


def test_they_are_those_of_the_last_attempt_but_for_the_date(write):
    folder = write("roles.jsonl", *roles("old"), *roles("b", "a", "b", attempt=1))
    run = History(folder, [{"step": step, "time/wall_clock": 32.5 * step} for step in (1, 2)])
    run.starts = [start(1000.0, torch="1"), start(9000.0, 4, torch="2")]
    assert read_facts(run) == {
        **{"began": "1970-01-01 00:16 UTC", "duration": "1 min 5 s"},
        **{"host": "b, a (4 CPUs)", "versions": "torch 2"},
    }


def test_it_shows_each_metric_of_the_last_evaluation_with_its_interval():
    values = {"eval/success_rate": 0.5, "eval/success_rate_low": 0.25, "eval/success_rate_high": 1}
    more = {"eval/pass_at_2": 0.123456, "eval/policy_version": 7, "eval/prompts": 60}
    first, last = {"step": 0, "eval/success_rate": 0.1}, {"step": 10, "my/own": 1}
    html = held_out_table([first, {"step": 9, "eval/step": 8, **values, **more}, last])
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", html)
    assert rows == [("success_rate", "0.5", "0.25 to 1"), ("pass_at_2", "0.1235", "-")]
    assert "step 8: policy version 7, 60 prompts" in html


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
    idle = {"idle: no batch": 1.0, "idle: between steps": 2.0}
    assert seconds_by_role(BEATS, waited_s=1.0) == {
        "generator_0": {"starting": 7.0, "sampling": 14.0},
        "trainer_0": {"starting": 2.0, "train_step": 5.0, **idle},
    }


def test_the_charts_show_shares_of_the_wall_time_and_of_the_engine():
    times, sequences = time_use_charts(BEATS, 1.0)
    bars = go.Figure(times["figure"]).data
    for role in (0, 1):
        assert sum(bar.x[role] for bar in bars) == pytest.approx(1)
    [engine] = go.Figure(sequences["figure"]).data
    assert engine.y == pytest.approx((0.5, 1.0, 1.0))
