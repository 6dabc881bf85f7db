"""The score of a task of reasoning-gym as a reward."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from grpo_components.environments.extras import imported_extra
from grpo_components.errors import fail, shown
from grpo_components.rewards.maths import RESPONSE_CPU_S, WRITE

DEPENDS_ON_PROCESS = (
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
)
"""Tasks whose rows depend on the order of sets: another process, such as a resumed run, would get
other rows."""
_NOT_ONE_TASK = "composite"
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####([^\n]*)")
_MARKED = {"tag": _TAG, "gsm8k": _HASHES, "plain": re.compile(r"(.*)", re.DOTALL)}


@lru_cache
def task_of(task: str, settings: str) -> Any:
    """Build a task of reasoning-gym."""
    factory: Any = imported_extra("reasoning_gym.factory")
    known = sorted(factory.DATASETS.keys() - {*DEPENDS_ON_PROCESS, _NOT_ONE_TASK})
    if task == _NOT_ONE_TASK:
        fail("dataset.task", f"{task} given", "one task, or several in a mixed_dataset")
    if task in DEPENDS_ON_PROCESS:
        fail("dataset.task", f"{task} given, whose rows differ from process to process", "others")
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
    """Score that the task itself gives an answer, from 0 to 1.

    Args:
        answer_format: where to find the answer: `tag` (the last <answer>5</answer>), `gsm8k` (the
            last #### 5), or `plain` (the whole response). A response without one gets 0.

    Raises:
        ValueError: the package is missing, or `answer_format` is none of these.
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        imported_extra("reasoning_gym")
        if answer_format not in tuple(_MARKED):
            allowed = ", ".join(_MARKED)
            raise ValueError(f"answer_format: {answer_format!r} given; allowed: {allowed}")
        self._marked, self._write = _MARKED[answer_format], WRITE[answer_format]

    def __call__(
        self,
        *,
        prompt_text: str,
        response_text: str,
        answer: str,
        finish_reason: str,
        reasoning_gym: Mapping[str, Any],
    ) -> float:
        """Score one response."""
        found = self._marked.findall(response_text)
        if not found:
            return 0.0
        given = found[0] if self._marked is _MARKED["plain"] else found[-1]
        task = task_of(reasoning_gym["task"], json.dumps({**reasoning_gym["options"], "seed": 0}))
        return float(task.score_answer(given.strip(), ast.literal_eval(reasoning_gym["entry"])))

    def perfect_response(self, *, reasoning_gym: Mapping[str, Any]) -> str | None:
        """Return the task's own answer in the form of a response; None if the task gives none.

        Args:
            reasoning_gym: the row's column of this name.
        """
        answer = ast.literal_eval(reasoning_gym["entry"])["answer"]
        return None if answer is None else self._write.format(answer)
