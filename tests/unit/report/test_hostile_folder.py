"""What a model or a tool writes stays text, wherever the run logged it."""

import json
import re

import pytest

from grpo_tools.report.page import write_report

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "\u202eright to left\u2066",
    "\x1b]0;owned\x07",
    "\x00\ud800\u2028",
    "'\"&lt;",
    "{" * 500,
    "x" * 100_000,
]
PLACES = {
    "a response": lambda text: {"response": text},
    "a tool's answer": lambda text: {"turns": [{"by": "environment", "text": text}]},
    "a token": lambda text: {"tokens": [text], "generator_logprobs": [-1.0]},
    "the error of a reward": lambda text: {"error": text},
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page of a run whose model wrote these texts, and the groups in it."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page
    (tmp_path / "logs").mkdir()

    def page(responses, **logs):
        group = {"step": 1, "attempt": 0, "group_id": 0, "prompt_index": 1, "epoch": 0}
        group |= {"prompt": "p", "answer": "a", "advantages": [0.5] * len(responses)}
        logs = {"metrics": {"step": 1, "attempt": 0}, **logs}
        logs["rollouts"] = {**group, "responses": responses}
        for name, record in logs.items():
            (tmp_path / "logs" / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
        html = write_report(tmp_path).read_text(encoding="utf-8")
        found = re.search(r'id="data-rollouts">(.*?)</script>', html)
        assert found is not None
        return html, json.loads(found[1])

    return page


def response(**what):
    return {
        **{"response": "a", "finish_reason": "stop", "response_tokens": 3, "reward": 1.0},
        **{"reward_terms": {"r": 1.0}, "success": True, "error": None, "versions": [0, 1], **what},
    }


def assert_is_text(html):
    assert not set(html) & {"\x1b", "\x07", "\x00", "\u202e", "\u2066", "\u2028"}
    for tag in ("<script>alert", "<img", "<!--"):
        assert tag not in html, tag
    assert html.count("<script") == html.count("</script") == 6, (
        "four of data, plotly's, the page's"
    )


@pytest.mark.parametrize("place", PLACES)
def test_it_is_text_in_a_response(page, place):
    html, [group] = page([response(**PLACES[place](text)) for text in HOSTILE])
    assert_is_text(html)
    assert len(group["responses"]) == len(HOSTILE)
    shown = json.dumps(group)
    assert "<img src=x onerror=alert(1)>" in shown and r"\\x1b]0;owned\\x07" in shown
    assert len(shown) < 20_000, "a long text is cut"


def test_it_is_text_in_the_errors_of_failed_samples_and_of_the_run(page):
    failed = {"attempt": 0, "group_id": 0, "prompt_index": 1, "errors": dict.fromkeys(HOSTILE, 2)}
    failure = {"attempt": 0, "error": "".join(HOSTILE)}
    html, _ = page([response()], failed_samples=failed, failures=failure)
    assert_is_text(html)
    assert "&lt;img src=x" in html
