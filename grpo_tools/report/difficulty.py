"""Draws how difficult a run's prompts were, when they were first and when they were last tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_components.shapes import fits
from grpo_tools.report.curves import Chart, chart
from grpo_tools.report.run_files import Receipts

_BINS = ("0 %", "to 20 %", "to 40 %", "to 60 %", "to 80 %", "over 80 %", "100 %")


def difficulty_charts(receipts: Receipts) -> Sequence[Chart]:
    """Return a histogram of prompts by success rate; nothing if the run had no curriculum."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for prompt, successes, scored in (g for each in receipts.results for g in each["groups"]):
        if fits(prompt, int) and 0 <= successes <= scored > 0:
            first.setdefault(prompt, _bin(successes, scored))
            last[prompt] = _bin(successes, scored)
    if not first:
        return ()
    about = f"{len(first):,} prompts by the share of right responses in a group"
    traces = [_bars("first group", 0, first), _bars("last group", 1, last)]
    return [chart("Difficulty of the prompts", about, traces, x_title="success rate")]


def _bin(successes: int, scored: int) -> int:
    """Return the number of a bin: none right, five equal ones, all right."""
    if successes in (0, scored):
        return len(_BINS) - 1 if successes else 0
    return -(-5 * successes // scored)  # rounded up


def _bars(name: str, color: int, places: Mapping[int, int]) -> dict[str, Any]:
    counts = Counter(places.values())
    heights = [counts[place] for place in range(len(_BINS))]
    trace = {"type": "bar", "name": name, "meta": {"color": color}}
    return {**trace, "x": list(_BINS), "y": heights}
