"""The page works without network, for any state of a run, and never renders a model's text."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from lib.rows import write_rows

from grpo_tools.report.__main__ import main
from grpo_tools.report.page import write_report

HOSTILE = (
    "</script><script>alert(1)</script><!--<script><img src=x onerror=alert(2)>"
    "\u202eright to left\u2066\x1b]0;owned\x07\x00\ud800\u2028'\"&lt;" + "{" * 500
)


class Page(HTMLParser):
    """Collects tags with their attributes, and the content of each script."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts and self.cdata_elem == "script":
            attrs, before = self.scripts[-1]
            self.scripts[-1] = (attrs, before + data)


AT = {"attempt": 0, "time": 3.0}
STEP = {"event": "step", **AT, "step": 1, "trained_from": 0, "policy_version": 1}
STEP |= {"token_versions": {}, "tokens": {}}


def start_of(num_steps):
    known = {"steps_done": 0, "carried": {}, "cpus": 2, "libraries": {HOSTILE: HOSTILE}}
    return {"event": "start", **AT, **known, "num_steps": num_steps}


def page(run, **options):
    return write_report(run, **options).read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run in which every text is hostile."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page
    folder = tmp_path / "run"

    def write(name, *records):
        write_rows(folder / name, *records, torn='{"torn": ')

    drop = {"groups": [0], "reason": HOSTILE, "reissue": True, "tokens": [None]}
    response = {
        **{"response": HOSTILE, "finish_reason": HOSTILE, "response_tokens": 3, "reward": None},
        **{"reward_terms": {HOSTILE: 1.0}, "success": False, "error": HOSTILE, "versions": None},
        **{"tokens": [HOSTILE], "generator_logprobs": [-1.0], "trainer_logprobs": [-1.5]},
        "turns": [{"by": "environment", "text": HOSTILE}],
    }
    group = {"step": 1, "attempt": 0, "group_id": 0, "prompt": HOSTILE, "answer": HOSTILE}
    write(
        "receipts.jsonl",
        start_of(9),
        {"event": "drop", **AT, **drop},
        {"event": "restart", **AT, "role": HOSTILE, "what": HOSTILE},
        STEP,
    )
    write("logs/phases.jsonl", {"attempt": 0, "phase": HOSTILE, "seconds": 1.5})
    write("logs/metrics.jsonl", {"step": 1, "attempt": 0, "rollout/reward_mean": 0.5, HOSTILE: 1})
    long = response | {"response": "x" * 100_000, "turns": None}
    write("logs/rollouts.jsonl", {**group, "responses": [response, long], "advantages": [0.0, 0.0]})
    start = {"role": HOSTILE, "started": 1.0, "attempt": 0, "pid": 1, "node": HOSTILE}
    write("logs/roles.jsonl", start)
    write("logs/heartbeats.jsonl", {"role": HOSTILE, "time": 2.0, "rss_mib": 100.0})
    write("logs/failed_samples.jsonl", {"group_id": 0, "errors": {HOSTILE: 2}})
    (folder / "config.yaml").write_text(f"output_dir: {HOSTILE!r}\n")
    return folder


def test_no_text_of_a_run_becomes_a_tag(run):
    write_rows(run / "logs/failures.jsonl", {"attempt": 0, "error": HOSTILE})
    html = page(run)
    found = Page(html)
    assert len(found.scripts) == 6, "four of data, plotly's and the page's"
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "link")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    data = [json.loads(script) for attrs, script in found.scripts if attrs]
    [group] = data[1]
    assert r"\u202e" in group["responses"][0]["response"]
    assert "alert(2)" in html, "it is shown as text"
    assert len(json.dumps(group["responses"][1])) < 20_000, "a long text is cut"
    assert not set(html) & {"\x1b", "\x07", "\x00", "\u202e", "\u2066", "\u2028"}
    assert "<!--" not in html
    assert "<" not in json.dumps(data[0]).replace("<extra></extra>", ""), "plotly renders some tags"


def test_it_needs_no_network_and_lets_only_its_own_scripts_run(run):
    found = Page(page(run))
    places = [v for _, attrs in found.tags for k, v in attrs.items() if k in ("src", "href")]
    assert places and all(place.startswith("#") for place in places)
    targets = {attrs["id"] for _, attrs in found.tags if "id" in attrs}
    assert {place[1:] for place in places} <= targets
    [policy] = [a["content"] for _, a in found.tags if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ") and "http" not in policy
    allowed = map(base64.b64decode, re.findall(r"'sha256-([^']+)'", policy))
    own = [script.encode() for attrs, script in found.scripts if not attrs]
    assert [*allowed] == [hashlib.sha256(script).digest() for script in own]


@pytest.mark.parametrize(
    ("end", "state"),
    [(None, "running or killed"), (True, "finished"), (False, "stopped early")],
)
def test_the_state_line_shows_how_the_run_ended(run, end, state):
    last = {"event": "end", **AT, "step": 1, "finished": end, "living": []}
    write_rows(run / "receipts.jsonl", start_of(9), STEP, *([] if end is None else [last]))
    assert f"{state}; 1 of 9 steps" in page(run)


def test_what_the_last_attempts_start_and_end_took_is_on_the_page(run):
    phases = [(0, "starting Ray", 3.0), (1, "starting Ray", 2.0), (1, "training", 9.26)]
    rows = ({"attempt": a, "phase": phase, "seconds": seconds} for a, phase, seconds in phases)
    write_rows(run / "logs/phases.jsonl", *rows)
    shown = re.findall(r"<tr><td>(starting Ray|training)</td><td[^>]*>([0-9.]+)", page(run))
    assert shown == [("starting Ray", "2.0"), ("training", "9.3")]


def test_metrics_alone_are_enough(run):
    for path in [*run.glob("*"), *run.glob("logs/*")]:
        if path.is_file() and path.name != "metrics.jsonl":
            path.unlink()
    html = page(run)
    assert "no rollouts are logged" in html and "No group was dropped" in html


def test_without_logprobs_the_page_names_the_key_that_logs_them(run):
    path = run / "logs/rollouts.jsonl"
    path.write_text(path.read_text().replace('"trainer_logprobs": [-1.5]', '"other": 1'))
    of_generator_only = page(run)  # all that a run without a trainer has
    assert "log_token_logprobs=true" not in of_generator_only
    assert '<option value="trainer - generator">' not in of_generator_only
    path.write_text(path.read_text().replace('"generator_logprobs": [-1.0]', '"another": 1'))
    assert "log_token_logprobs=true" in page(run)


def test_the_command_prints_the_path_or_the_reason(run, tmp_path, capsys):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'} (")
    assert main([str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"no report: {tmp_path / 'nowhere'}: no such folder\n"
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
    assert "no report: no step is logged" in capsys.readouterr().err


def test_an_evaluation_alone_shows_what_it_has(run):
    write_rows(run / "logs/metrics.jsonl", {"step": 0, "attempt": 0, "eval/success_rate": 0.25})
    html = page(run)
    assert "<b>0.250</b><span>held-out success</span>" in html and "<b>-" not in html
    headings = re.findall(r'<h2 id="([^"]*)">', html)
    assert {"evaluation", "config"} <= set(headings)
    assert not {"learning", "speed", "other-metrics"} & set(headings), "one point is no curve"
    assert 'id="smoothing"' not in html


def test_throughput_is_total_tokens_over_total_time(run):
    """100 tokens in 1 s, then 100 in 9 s: 20 per second, not the mean of the two rates."""
    rate = "throughput/trained_tokens_per_second"
    whole = {"attempt": 0, "rollout/trained_tokens": 100}
    metrics = ({"step": s, **whole, rate: 100 / took} for s, took in ((1, 1), (2, 9)))
    write_rows(run / "logs/metrics.jsonl", *metrics)
    assert "<b>20</b><span>trained tokens per second</span>" in page(run)


def data_of(html, name):
    found = Page(html).scripts
    return next(json.loads(text) for attrs, text in found if attrs.get("id") == f"data-{name}")


def test_only_a_live_page_says_that_it_reloads_itself(run):
    live = page(run, next_page_s=30.0)
    assert data_of(live, "page")["live"]["next_s"] == 30.0
    assert "running; 1 of 9 steps" in live
    assert data_of(page(run), "page")["live"] is None


def test_answers_of_evaluations_are_on_the_page_as_text(run):
    line = json.loads((run / "logs/rollouts.jsonl").read_text().splitlines()[0])
    line = {key: line[key] for key in line if key not in ("advantages", "group_id")}
    assert "no evaluation samples are logged" in page(run)
    write_rows(run / "logs/evaluation_answers.jsonl", line | {"policy_version": 3})
    html = page(run)
    [shown] = data_of(html, "answers")
    assert shown["policy_version"] == 3 and "alert(2)" in shown["responses"][0]["response"]
    assert not [tag for tag, _ in Page(html).tags if tag in ("img", "iframe")]


def test_minutes_can_be_the_horizontal_axis_if_they_were_measured(run):
    without = page(run)
    assert data_of(without, "page")["clocks"] == [{}] and 'id="axis"' not in without
    steps = [{"step": s, "attempt": 0, "time/wall_clock": 90.0 * s} for s in (1, 2)]
    write_rows(run / "logs/metrics.jsonl", *steps)
    html = page(run)
    assert data_of(html, "page")["clocks"] == [{"steps": [1, 2], "minutes": [1.5, 3.0]}]
    assert 'id="axis"' in html
