"""The benchmark of the weights path: sizes of its models, and its arguments."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weights_path.py"


@pytest.mark.parametrize("size", ["100M", "500M"])
def test_the_models_have_as_many_parameters_as_their_names_say(size):
    shape = runpy.run_path(str(SCRIPT))["SHAPES"][size]
    dim, hidden = shape["hidden_size"], shape["intermediate_size"]
    kv_dim = dim // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * dim * (dim + kv_dim) + 3 * dim * hidden
    parameters = shape["vocab_size"] * dim + shape["num_hidden_layers"] * layer
    assert parameters == pytest.approx(int(size[:-1]) * 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--repeats", "0"], "--repeats: 0 given"),
        (["--sizes", "7B"], "invalid choice: '7B'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, key, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert key in capsys.readouterr().err
