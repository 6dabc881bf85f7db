"""One page for several runs: their curves together, their key figures and what differs."""

import json
import re

import pytest
from lib.json_lines import write_lines

from grpo_tools.report.__main__ import main
from grpo_tools.report.comparison import write_comparison
from grpo_tools.report.run_files import NoStepsError


@pytest.fixture(autouse=True)
def _without_plotly(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page


@pytest.fixture
def make(tmp_path):
    def make(name, config="seed: 1\n", steps=2, **metrics):
        folder = tmp_path / name
        lines = ({"step": s + 1, "attempt": 0, "my/own": 1.5, **metrics} for s in range(steps))
        write_lines(folder / "logs/metrics.jsonl", lines)
        (folder / "config.yaml").write_text(config)
        return folder

    return make


def page(*folders):
    target = folders[0].parent / "page.html"
    html = write_comparison(folders, target).read_text(encoding="utf-8")
    data = re.search(r'id="data-charts">(.*?)</script>', html)
    assert data is not None
    return html, json.loads(data[1])


def test_the_curves_of_all_runs_are_in_the_same_chart(make):
    html, charts = page(make("a"), make("b"), make("c", steps=5))
    [own] = charts
    assert [trace["name"] for trace in own["data"]] == ["a", "b", "c"]
    assert [trace["x"][-1] for trace in own["data"]] == [2, 2, 5]
    assert [trace["meta"]["run"] for trace in own["data"]] == [0, 1, 2]
    assert html.count("<h2 ") == 3, "runs, other metrics, configs"


def test_config_keys_are_listed_that_differ(make):
    first = "seed: 1\nloss: {clip_low: 0.2, clip_high: 0.2}\nlr_scheduler: null\n"
    second = "seed: 2\nloss: {clip_low: 0.2, clip_high: 0.3}\nlr_scheduler: {name: cosine}\n"
    html, _ = page(make("a", first), make("b", second))
    differences = html.partition('id="differences-in-the-configs"')[2]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", differences)
    assert rows == [
        ("seed", "1", "2"),
        ("loss.clip_high", "0.2", "0.3"),
        *(("lr_scheduler", "null", "-"), ("lr_scheduler.name", "-", "cosine")),
    ]
    assert "configs are the same" in page(make("c"), make("d"))[0]


def test_runs_are_told_apart_by_as_much_of_their_paths_as_needed(make):
    _, [own] = page(make("x/run"), make("y/run"))
    assert [trace["name"] for trace in own["data"]] == ["x/run", "y/run"]


def test_a_run_without_a_step_is_named(make, tmp_path, capsys):
    with pytest.raises(NoStepsError, match=r"empty/logs/metrics\.jsonl"):
        page(make("a"), make("empty", steps=0))
    assert main([str(tmp_path / "a"), str(tmp_path / "empty")]) == 2
    assert "empty/logs/metrics.jsonl" in capsys.readouterr().err


def test_the_command_overlays_several_runs_in_the_current_folder_or_in_a_file(
    make, tmp_path, monkeypatch, capsys
):
    """And writes nothing into the folders of the runs."""
    runs = [str(make(name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert main(runs) == 0
    assert capsys.readouterr().out.startswith("comparison.html (")
    assert main([*runs, "--output", "both.html"]) == 0
    assert main([runs[0], "--output", "one.html"]) == 0
    assert {p.name for p in tmp_path.glob("*.html")} == {
        *("comparison.html", "both.html"),
        "one.html",
    }
    assert not list(tmp_path.glob("*/report.html"))
    assert main([*runs, "--output", "no/such/folder.html"]) == 2
