"""Repeats the draws of a curriculum from the recorded success rates."""

from __future__ import annotations

from grpo_components.data.curriculum import curriculum_of
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import History, Prompt, Record

_DRAWS = "seed", "curriculum", "prompts"
"""Fields of a start record that only a run with a curriculum has."""


def begin_draws(start: Record, before: Record, h: History, findings: Findings) -> None:
    """Check that an attempt draws from the same prompts as the one before it, by the same rule."""
    described, known = ([record.get(key) for key in _DRAWS] for record in (start, before))
    if before and (described != known):
        findings.check("curriculum", False, "draws otherwise than the attempt before")
    if "curriculum" in start and h.curriculum is None:
        try:
            h.curriculum = curriculum_of(start)
        except ValueError as error:
            findings.check("curriculum", False, str(error))


def check_draw(prompt: Prompt, number: int, h: History, findings: Findings) -> None:
    """Check that a new group has the prompt that the success rates and the seed give."""
    if h.curriculum is not None:
        row, epoch = h.curriculum.draw()
        problem = f"group {number} has prompt {prompt[0]} of epoch {prompt[1]}, "
        problem += f"but seed and success rates draw {row} of epoch {epoch}"
        findings.check("curriculum", prompt == (row, epoch), problem)


def check_result(
    event: Record, prompt: Prompt, start: Record, h: History, findings: Findings
) -> None:
    """Check that a generated group has a possible result exactly if there is a curriculum."""
    number, has = event["generated"], "scored" in event
    if "curriculum" not in start and not has:
        return
    wanted = "curriculum" in start
    problem = f"group {number} has {'no' if wanted else 'a'} result"
    findings.check("curriculum", has == wanted, problem)
    if has:
        result = event["successes"], event["scored"]
        possible = result[0] <= result[1] <= start["group_size"]
        findings.check("curriculum", possible, f"group {number} has {result[0]} of {result[1]}")
        if h.curriculum is not None and h.curriculum.knows(prompt[0]):
            h.curriculum.add_result(prompt[0], *result)
