"""Builds prompt data sets from tasks of the package reasoning-gym."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from grpo_components.data.datasets import (
    PromptDataset,
    passes_on_to_prompt_dataset,
    prompt_dataset,
)
from grpo_components.data.rows import Row
from grpo_components.environments.extras import imported_extra
from grpo_components.environments.reasoning_gym_score import task_of
from grpo_components.errors import fail, shown


@passes_on_to_prompt_dataset
def reasoning_gym_dataset(
    tokenizer: Any,
    *,
    task: str,
    num_rows: int = 500,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    prompt_template: str = "{question}\n",
    **prompts: Any,
) -> PromptDataset:
    """Generate the prompts of a reasoning-gym task.

    Args:
        tokenizer: torchtune's tokenizer.
        task: name of the task in reasoning-gym, such as `chain_sum`.
        num_rows: number of rows to generate.
        seed: seed of the rows; a data set for evaluation needs a different one.
        options: settings of the task by name; the others keep reasoning-gym's defaults.
        prompt_template: text of the prompt; contains `{question}` once.
        **prompts: chat_template, system_prompt, max_prompt_tokens, ...; see `prompt_dataset`.

    Returns:
        The prompts; each has a column `reasoning_gym`, which `ReasoningGymScore` takes.

    Raises:
        ValueError: the package is missing, a setting is wrong, or the task cannot be used.
    """
    imported_extra("reasoning_gym")
    if type(num_rows) is not int or num_rows < 1:
        fail("dataset.num_rows", f"{shown(num_rows)} given", "a whole number above 0")
    if type(seed) is not int:
        fail("dataset.seed", f"{shown(seed)} given", "a whole number")
    settings: Any = OmegaConf.to_container(OmegaConf.create(dict(options or {})))
    task_rows = task_of(task, json.dumps({**settings, "size": num_rows, "seed": seed}))
    return prompt_dataset(
        tokenizer,
        source=f"reasoning_gym {task}",
        rows=_rows(task, settings, task_rows),
        read=_question_and_answer,
        prompt_template=prompt_template,
        **prompts,
    )


def _rows(task: str, options: Mapping[str, Any], rows: Any) -> Iterator[dict[str, Any]]:
    for number in range(len(rows)):
        entry = rows[number]
        # As Python literals, because the scorers read types that JSON lacks, such as tuples.
        known = {"task": task, "options": dict(options), "entry": repr(entry)}
        yield {"question": entry["question"], "answer": entry["answer"], "reasoning_gym": known}


def _question_and_answer(row: Row) -> tuple[str, str]:
    """Return a row's question and answer; the answer is empty if only the scorer can judge."""
    answer = row.value("answer")
    return row.text("question"), "" if answer is None else str(answer)
