"""A running run's page is rewritten until the run ends, and never disturbs the run."""

import json
import threading

import pytest

from grpo_components.report import live, page
from grpo_components.report.live import LiveReport

PATIENCE_S = 60


@pytest.fixture
def written(monkeypatch):
    """Pages as they are written: a list of their `live` arguments and an event for each one."""
    pages, some = [], threading.Event()

    def write_report(folder, live):
        pages.append(live)
        if len(pages) >= 3:
            some.set()

    monkeypatch.setattr(live, "write_report", write_report)
    monkeypatch.setattr(live, "_SHORTEST_S", 0.01)
    return pages, some


def test_pages_are_written_again_and_again_until_the_end(tmp_path, written):
    pages, some = written
    report = LiveReport(tmp_path, pytest.fail, first_s=0.0)
    report.stop()
    assert not pages, "it was not started"
    report = LiveReport(tmp_path, pytest.fail, first_s=0.0)
    report.start()
    report.start()
    assert some.wait(PATIENCE_S)
    assert sum(thread.name == "report" for thread in threading.enumerate()) == 1
    report.stop()
    count = len(pages)
    assert not any(thread.name == "report" for thread in threading.enumerate())
    report.stop()
    assert len(pages) == count and all(page.next_s >= 0.01 for page in pages)


def test_a_page_that_takes_long_is_written_less_often(tmp_path, written, monkeypatch):
    pages, some = written
    seconds = iter(range(0, 10**6, 100))  # each call of the clock is 100 s after the last
    monkeypatch.setattr(live.time, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(live, "_MAX_SHARE", 10_000.0)
    report = LiveReport(tmp_path, pytest.fail, first_s=0.0)
    report.start()
    assert some.wait(PATIENCE_S)
    report.stop()
    assert {page.next_s for page in pages[1:]} == {0.01}
    monkeypatch.setattr(live, "_MAX_SHARE", 1000.0)
    some.clear()
    pages.clear()
    report = LiveReport(tmp_path, pytest.fail, first_s=0.0)
    report.start()
    assert some.wait(PATIENCE_S)
    report.stop()
    assert {page.next_s for page in pages[1:]} == {0.1}


def test_a_failing_page_is_tried_again_and_shown_once(tmp_path, monkeypatch):
    notes, tries, enough = [], [], threading.Event()

    def broken(*_, **__):
        tries.append(1)
        if len(tries) == 3:
            enough.set()
        raise KeyError("a field")

    monkeypatch.setattr(live, "write_report", broken)
    monkeypatch.setattr(live, "_SHORTEST_S", 0.01)
    report = LiveReport(tmp_path, notes.append, first_s=0.0)
    report.start()
    assert enough.wait(PATIENCE_S)
    report.stop()
    assert len(notes) == 1 and "KeyError" in notes[0]


def test_before_the_first_step_there_is_no_page_and_no_error(tmp_path, monkeypatch):
    """The page appears once there is something to see."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/metrics.jsonl").touch()
    tries, tried, found = [], threading.Event(), threading.Event()

    def write_report(folder, live):
        try:
            path = page.write_report(folder, live=live)
        finally:
            tries.append(1)
            tried.set()
        found.set()
        return path

    monkeypatch.setattr(live, "write_report", write_report)
    monkeypatch.setattr(live, "_SHORTEST_S", 0.01)
    report = LiveReport(tmp_path, pytest.fail, first_s=0.01)
    report.start()
    assert tried.wait(PATIENCE_S) and not (tmp_path / "report.html").exists()
    record = {"step": 1, "attempt": 0, "my/own": 1.0}
    (tmp_path / "logs/metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert found.wait(PATIENCE_S)
    report.stop()
    assert '"next_s":' in (tmp_path / "report.html").read_text(encoding="utf-8")
