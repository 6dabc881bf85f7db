"""Timing and memory measurement are checked against known sizes and times."""

import os

import measuring
import pytest
import torch


def grows_by(mib):
    """Measured peak of a temporary tensor, in a process that held memory before."""
    torch.ones(64 * 2**18).sum()
    return measuring.peak_memory_gib(lambda: torch.ones(mib * 2**18).sum())


def test_peak_memory_counts_freed_tensors():
    assert measuring.in_child(grows_by, 256) == pytest.approx(0.25, abs=0.02)


def held_after_freeing():
    """Growth while many buffers are allocated with small ones in between."""

    def run():
        kept = []
        for _ in range(40):
            kept.append((torch.ones(2**20), torch.ones(2**10)))
        del kept[:]

    run()
    return measuring.peak_memory_gib(run), os.environ["MALLOC_MMAP_THRESHOLD_"]


def test_a_lean_child_returns_freed_buffers(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    grown, threshold = measuring.in_lean_child(held_after_freeing)
    assert grown == pytest.approx(160 / 1024, abs=0.02)  # the second run needs all of it anew
    assert threshold == "65536"
    assert "MALLOC_MMAP_THRESHOLD_" not in os.environ


def test_cases_alternate_after_one_untimed_run_each(monkeypatch):
    monkeypatch.setattr(measuring.gc, "collect", lambda: 0)  # takes seconds in a test process
    order = []
    timings = measuring.interleaved({c: lambda c=c: order.append(c) for c in "ab"}, repeats=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


def test_a_timing_prints_median_and_range():
    assert str(measuring.Timing((3.0, 1.0, 2.0))) == "2 (1..3)"


def test_the_table_has_a_rule_and_three_digits():
    table = measuring.markdown_table(["case", "ratio"], [["a", 1.23456], ["b", 2]])
    assert table.splitlines() == ["| case | ratio |", "| --- | ---: |", "| a | 1.23 |", "| b | 2 |"]


def test_the_machine_line_names_torch_and_threads():
    line = measuring.machine_line()
    assert f"PyTorch {torch.__version__}" in line
    assert "threads" in line
