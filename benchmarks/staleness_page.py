"""The page of the staleness atlas: prediction, map, and the answer that follows from the figures."""

from __future__ import annotations

from collections.abc import Sequence

from staleness_lines import Line

PREDICTIONS = (
    "At a learning rate of 2e-4 each objective keeps, at each bound up to 8, at least three quarters "
    "of what it gains without staleness.",
    "At 8e-4 none keeps three quarters of its gain at a bound of 8.",
    "At a bound of 8 GRPO, whose clip takes the gradient from tokens that have moved, ends above "
    "truncated IS and REINFORCE, which keep it, at 4e-4 and at 8e-4.",
    "At 8e-4 and a bound of 8 decoupled PPO ends between GRPO and REINFORCE.",
    "A bound of 1 costs nothing that shows: at 2e-4 and 4e-4 the mean over the objectives is within "
    "0.05 of that without staleness.",
)
"""Written before the first run of the map."""


def page(lines: Sequence[Line]) -> str:
    """Return the text of the page.

    Args:
        lines: results of the runs.
    """
    return "\n".join(PREDICTIONS) + f"\n{len(lines)} runs\n"
