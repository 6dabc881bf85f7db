"""The benchmark of the weights path: what it compares brings the same weights over."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weights_path.py"


@pytest.mark.slow
def test_each_way_has_its_row_and_both_bring_the_engine_the_same_weights():
    # The script itself compares the engine's answers after each way, and ends with an error
    # where they are those of other weights, or of the weights before.
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--repeats", "1"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("| 3M")]
    assert len(rows) == 3
    push, pull, memory = ([cell.strip() for cell in row.split("|")[2:-1]] for row in rows)
    assert all(" ms (" in cell for cell in (push[0], push[1], pull[0], pull[1]))
    assert all("MiB" in cell for cell in memory)


@pytest.mark.parametrize("size", ["100M", "500M"])
def test_the_models_have_about_as_many_parameters_as_their_names_say(size):
    shape = runpy.run_path(str(SCRIPT))["SHAPES"][size]
    dim, hidden = shape["hidden_size"], shape["intermediate_size"]
    kv_dim = dim // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * dim * (dim + kv_dim) + 3 * dim * hidden
    parameters = shape["vocab_size"] * dim + shape["num_hidden_layers"] * layer
    assert parameters == pytest.approx(int(size[:-1]) * 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeats", "0"], "--repeats: must be at least 1, not 0"),
        (["--sizes", "7B"], "invalid choice: '7B'"),
    ],
)
def test_wrong_arguments_end_with_one_clear_line(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
