"""Tasks of the package reasoning-gym: its rows as prompts, and its own scores as the reward."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from grpo_components.data.datasets import PromptDataset, prompt_dataset
from grpo_components.data.rows import Row
from grpo_components.environments.extras import imported_extra
from grpo_components.errors import fail, shown
from grpo_components.rewards.maths import RESPONSE_CPU_S

_DEPENDS_ON_PROCESS = (
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"),
    "word_ladder",
)
"""Tasks whose rows depend on the order of sets: another process, such as a resumed run, would get
other rows."""
_NOT_ONE_TASK = "composite"
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####([^\n]*)")
_MARKED = {"tag": _TAG, "gsm8k": _HASHES, "plain": re.compile(r"(.*)", re.DOTALL)}


def reasoning_gym_dataset(
    tokenizer: Any,
    *,
    task: str,
    num_rows: int = 500,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    prompt_template: str = "{question}\n",
    chat_template: str | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptDataset:
    """Generate the rows of a task of reasoning-gym.

    Args:
        tokenizer: torchtune's tokenizer.
        task: name of the task there, such as `chain_sum`.
        num_rows: number of rows to generate.
        seed: seed of the rows; a data set for evaluation has another one.
        options: settings of the task, by their names there; its defaults for the others.
        prompt_template: text of the prompt; contains `{question}` once.
        chat_template: see `prompt_dataset`.
        system_prompt: see `prompt_dataset`.
        max_prompt_tokens: see `prompt_dataset`.
        too_long: see `prompt_dataset`.
        tools: see `prompt_dataset`.

    Returns:
        The prompts; each has a column `reasoning_gym`, which `ReasoningGymScore` takes.

    Raises:
        ValueError: the package is missing, a setting is wrong, or the task cannot be used.
    """
    imported_extra("reasoning_gym")
    if not isinstance(num_rows, int) or isinstance(num_rows, bool) or num_rows < 1:
        fail("dataset.num_rows", f"{shown(num_rows)} given", "a whole number above 0")
    if not isinstance(seed, int) or isinstance(seed, bool):
        fail("dataset.seed", f"{shown(seed)} given", "a whole number")
    options = OmegaConf.to_container(OmegaConf.create(dict(options or {})))  # pyright: ignore
    task_rows = _task(task, json.dumps({**options, "size": num_rows, "seed": seed}))
    return prompt_dataset(
        tokenizer,
        source=f"reasoning_gym {task}",
        rows=_rows(task, options, task_rows),
        read=_question_and_answer,
        prompt_template=prompt_template,
        chat_template=chat_template,
        system_prompt=system_prompt,
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long,
        tools=tools,
    )


@lru_cache
def _task(task: str, settings: str) -> Any:
    """Build a task from its settings as JSON."""
    factory: Any = imported_extra("reasoning_gym.factory")
    known = sorted(factory.DATASETS.keys() - {*_DEPENDS_ON_PROCESS, _NOT_ONE_TASK})
    if task == _NOT_ONE_TASK:
        fail("dataset.task", f"{task} given", "one task, or several in a mixed_dataset")
    if task in _DEPENDS_ON_PROCESS:
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


def _rows(task: str, options: Mapping[str, Any], rows: Any) -> Iterator[dict[str, Any]]:
    for number in range(len(rows)):
        entry = rows[number]
        # The scores read types that JSON has not, such as tuples: the text of Python's literals.
        text = repr(entry)
        try:
            is_same = ast.literal_eval(text) == entry
        except (ValueError, SyntaxError):
            is_same = False
        if not is_same:
            fail("dataset.task", f"{task} given, whose rows hold objects of its code", "others")
        known = {"task": task, "options": dict(options), "entry": text}
        yield {"question": entry["question"], "answer": entry["answer"], "reasoning_gym": known}


def _question_and_answer(row: Row) -> tuple[str, str]:
    """Return a row's question, and its answer; empty where only the task's score can tell."""
    answer = row.value("answer")
    return row.text("question"), "" if answer is None else str(answer)


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
        self._marked = _MARKED[answer_format]

    def __call__(
        self,
        *,
        prompt_text: str,
        response_text: str,
        answer: str,
        finish_reason: str,
        reasoning_gym: Mapping[str, Any],
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: searched for the answer.
            answer: not used.
            finish_reason: not used.
            reasoning_gym: the row's column of this name, as `reasoning_gym_dataset` writes it.
        """
        found = self._marked.findall(response_text)
        if not found:
            return 0.0
        given = found[0] if self._marked is _MARKED["plain"] else found[-1]
        task = _task(reasoning_gym["task"], json.dumps({**reasoning_gym["options"], "seed": 0}))
        return float(task.score_answer(given.strip(), ast.literal_eval(reasoning_gym["entry"])))
