"""The benchmark of delta pushes: shares of what changed, and its arguments."""

import sys

import delta_push
import pytest
import torch


def test_shares_count_elements_and_bytes_that_changed():
    torch.manual_seed(0)
    weights = [("a", torch.randn(1000).bfloat16()), ("b", torch.randn(1000).bfloat16())]
    other = weights[0][1].clone()
    other[::10] *= 2
    steps = [weights, [("a", other), weights[1]], [("a", other), weights[1]]]
    first, second = delta_push.changes(steps)
    assert first.elements == 0.05 and second.elements == second.nbytes == 0.0
    assert 0.05 < first.nbytes < 0.15


@pytest.mark.parametrize(("delta", "mean"), [(0.6, 0.8), (0.25, 0.4), (0.01, 1.64 / 65)])
def test_the_mean_of_all_pushes_counts_the_whole_ones_between(delta, mean):
    assert delta_push.with_whole_pushes(delta) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--steps", "6"], "--steps: 6 given"), (["--size", "0"], "--size")]
)
def test_wrong_arguments_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["delta_push.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        delta_push.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_row_of_times_shows_the_size_of_the_delta():
    row = delta_push.times_row(2 * 10**6, "1e-6", "bf16", 1)
    assert row[0] == "bf16, 1e-6, 2M" and 1 < float(row[1]) < 10
