"""Handles data set columns besides question and answer; rewards, worlds and agents get them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEED = "seed"
"""Field with the seed of one sample. Worlds (they reply to the policy) and agents receive it, but
no reward does."""
OWN_FIELDS = ("prompt_index", "prompt_ids", "prompt_text", "answer", SEED)
"""Fields of a prompt that this package sets; all others are columns of the data set."""
CALL = ("prompt_text", "response_text", "answer", "finish_reason")
"""Keyword arguments of every reward, in addition to the columns."""


def other_columns(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a prompt: its fields except those named in `OWN_FIELDS` or `CALL`."""
    taken = {*OWN_FIELDS, *CALL}
    return {name: value for name, value in prompt.items() if name not in taken}


def reward_input(
    prompt: Mapping[str, Any], response_text: str, finish_reason: str, answer: Any = None
) -> dict[str, Any]:
    """Return the input of a reward for one response to a prompt, with the prompt's columns.

    If the prompt has a seed, the input has it too, for `RewardPool`.
    """
    return {
        **other_columns(prompt),
        **({SEED: prompt[SEED]} if SEED in prompt else {}),
        "prompt_text": prompt["prompt_text"],
        "response_text": response_text,
        "answer": prompt["answer"] if answer is None else answer,
        "finish_reason": finish_reason,
    }


def plain_value(value: Any) -> Any:
    """Return a column's value as a checkpoint can store it: a date, for example, becomes a text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    return str(value)


def filled(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all prompts the same columns; the value is None where a row lacks the column."""
    names: dict[str, None] = {}
    for prompt in prompts:
        names.update(dict.fromkeys(other_columns(prompt)))
    return [{**names, **prompt} for prompt in prompts]
