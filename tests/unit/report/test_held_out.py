"""The table of held-out metrics has the last evaluation's, with their intervals."""

import re

from grpo_tools.report.held_out import held_out_table


def rows(html):
    return re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", html)


def test_it_shows_each_metric_of_the_last_evaluation_with_its_interval():
    values = {"eval/success_rate": 0.5, "eval/success_rate_low": 0.25, "eval/success_rate_high": 1}
    more = {"eval/pass_at_2": 0.123456, "eval/policy_version": 7, "eval/prompts": 60}
    first = {"step": 0, "eval/success_rate": 0.1}
    html = held_out_table(
        [first, {"step": 9, "eval/step": 8, **values, **more}, {"step": 10, "my/own": 1}]
    )
    assert rows(html) == [("success_rate", "0.5", "0.25 to 1"), ("pass_at_2", "0.1235", "-")]
    assert "step 8: policy version 7, 60 prompts" in html


def test_without_an_evaluation_there_is_no_table():
    assert held_out_table([]) == held_out_table([{"step": 1, "my/own": 2.0}]) == ""


def test_values_of_the_wrong_type_are_left_out():
    record = {"step": 1, "eval/<b>": "<script>", "eval/reward_mean": None, "eval/prompts": [1]}
    html = held_out_table([record | {"eval/policy_version": {}}])
    assert rows(html) == [("&lt;b&gt;", "-", "-"), ("reward_mean", "-", "-")]
    assert "script" not in html
