"""Reward that scores an answer with the scorer of its reasoning-gym task."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from grpo_components.environments.extras import imported_extra
from grpo_components.errors import fail, shown
from grpo_components.rewards.maths import RESPONSE_CPU_S, form_of_answers

_PROCESS = "whose rows differ from process to process"  # as the order of a set does
_OBJECTS = "whose rows hold objects of its code"  # which no checkpoint can store
_UNUSABLE = {
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "polynomial_multiplication"), _PROCESS),
    **dict.fromkeys(("ransom_note", "word_ladder"), _PROCESS),
    **dict.fromkeys(("codeio", "gsm_symbolic", "knights_knaves"), _OBJECTS),
    "composite": "which is several tasks, as mixed_dataset has them",
}


@lru_cache
def task_of(task: str, settings: str) -> Any:
    """Build the reasoning-gym task of this name; `settings`: its settings, as JSON text."""
    factory: Any = imported_extra("reasoning_gym.factory")
    known = sorted(factory.DATASETS.keys() - _UNUSABLE.keys())
    if task in _UNUSABLE:
        fail("dataset.task", f"{task} given, {_UNUSABLE[task]}", "others")
    if task not in known:
        near = get_close_matches(str(task), known, n=1)
        problem = f"reasoning-gym has no task {shown(task)}"
        fail("dataset.task", problem, f"did you mean {near[0]}?" if near else ", ".join(known))
    given = json.loads(settings)
    fields = [field.name for field in dataclasses.fields(factory.DATASETS[task][1])]
    for name in given.keys() - fields:
        others = ", ".join(field for field in fields if field not in ("size", "seed"))
        fail(f"dataset.options.{name}", f"not a setting of {task}", others)
    try:
        return factory.create_dataset(task, **given)
    except (AssertionError, TypeError, ValueError) as error:
        fail("dataset.options", f"{task}: {error}", "what reasoning-gym takes")


class ReasoningGymScore:
    """Reward from 0 to 1: the score that the prompt's reasoning-gym task gives the answer.

    Args:
        answer_format: where to find the answer, see `MathCorrectness`. A response without an
            answer gets 0.

    Raises:
        ValueError: the package is missing, or `answer_format` is unknown.
    """

    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        imported_extra("reasoning_gym")
        self._find, self._write = form_of_answers(answer_format)

    def __call__(self, *, response_text: str, reasoning_gym: Mapping[str, Any], **_: Any) -> float:
        """Score one response."""
        given = self._find(response_text)
        if given is None:
            return 0.0
        task = task_of(reasoning_gym["task"], json.dumps({**reasoning_gym["options"], "seed": 0}))
        entry = ast.literal_eval(reasoning_gym["entry"])
        try:
            return float(task.score_answer(given.strip(), entry))
        except Exception:  # some tasks' scorers raise at an answer that they cannot parse
            return 0.0

    def perfect_response(self, *, reasoning_gym: Mapping[str, Any]) -> str | None:
        """Return a response with the task's answer, to test the reward; None if it has none."""
        answer = ast.literal_eval(reasoning_gym["entry"])["answer"]
        return None if answer is None else self._write.format(answer)
