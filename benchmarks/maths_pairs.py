"""Counts how often our maths reward and plain math-verify judge the tests' answer pairs rightly."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import math_verify

from grpo_components.rewards.maths import MathCorrectness

PAIRS = Path(__file__).parents[1] / "tests/unit/rewards/maths_pairs.tsv"


def plain(known: str, given: str) -> float:
    """Score a given answer against the known one with math-verify alone."""
    sides = [
        math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (f"${known}$", rf"\boxed{{{given}}}")
    ]
    try:
        return float(math_verify.verify(*sides, timeout_seconds=None))  # pyright: ignore
    except (TypeError, ValueError, ArithmeticError):
        return 0.0


def main() -> None:
    """Print how many verdicts of ours and of math-verify are right, too generous, or too strict."""
    reward = MathCorrectness("boxed")
    counts: dict[str, Counter[str]] = {"ours": Counter(), "math-verify": Counter()}
    for line in PAIRS.read_text(encoding="utf-8").splitlines()[1:]:
        known, given, verdict = line.split("\t")
        boxed = rf"\boxed{{{given}}}"
        scores = {
            "ours": reward(prompt_text="", response_text=boxed, answer=known, finish_reason="stop"),
            "math-verify": plain(known, given),
        }
        for name, score in scores.items():
            kind = "paid, but wrong" if score else "right, but not paid"
            counts[name]["as wanted" if score == float(verdict) else kind] += 1
    for name, count in counts.items():
        sys.stdout.write(f"{name}: {dict(count)}\n")


if __name__ == "__main__":
    main()
