"""A running run's page is rewritten until the run ends, and never disturbs the run."""

import os
import select
import subprocess
import sys
from unittest.mock import Mock

import pytest
from lib.rows import write_rows

from grpo_components.records.run_log import LiveReport
from grpo_tools.report import live, page

PATIENCE_S = 60


@pytest.fixture
def folder(tmp_path):
    write_rows(tmp_path / "logs/metrics.jsonl")
    return tmp_path


def pauses(number, given):
    """Says how long each pause was, and that the run ends after so many."""

    def ends_within(seconds):
        given.append(seconds)
        return len(given) > number

    return ends_within


def test_before_the_first_step_there_is_no_page_and_no_error(folder, capsys):
    """The page appears once there is something to see, and says when the next one comes."""
    live.write_pages(folder, pauses(2, []))
    assert not (folder / "report.html").exists()
    write_rows(folder / "logs/metrics.jsonl", {"step": 1, "attempt": 0, "my/own": 1.0})
    live.write_pages(folder, pauses(1, []))
    assert '"next_s":' in (folder / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_a_page_that_takes_long_is_written_less_often(folder, monkeypatch):
    monkeypatch.setattr(page, "write_report", lambda *_, **__: None)
    seconds = iter(range(0, 10**6, 100))  # each call of the clock is 100 s after the last
    monkeypatch.setattr(live.time, "process_time", lambda: next(seconds))
    given = []
    live.write_pages(folder, pauses(3, given))
    assert given == [5.0, 5000.0, 5000.0, 5000.0]


def test_a_failing_page_is_tried_again_and_shown_once(folder, monkeypatch, capsys):
    broken = Mock(side_effect=KeyError("a field"))
    monkeypatch.setattr(page, "write_report", broken)
    live.write_pages(folder, pauses(3, []))
    assert broken.call_count == 3
    assert capsys.readouterr().err.count("KeyError") == 1


def test_the_child_ends_with_the_run_also_with_one_that_is_killed(folder):
    report = LiveReport(folder, pytest.fail)
    report.stop()
    report.start()
    child = report._child
    report.start()
    assert report._child is child and child.poll() is None
    report.stop()
    assert child.returncode == 0
    script = (
        "import os, pathlib, signal, sys; from grpo_components.records.run_log import *;"
        "report = LiveReport(pathlib.Path(sys.argv[1]), print); report.start();"
        "print(report._child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], stdout=subprocess.PIPE, text=True)
    try:
        child = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:  # it has ended already
        return
    assert select.select([child], [], [], PATIENCE_S)[0], "the child outlived the driver"
