"""Handles the data set columns, beyond question and answer, that worlds and rewards receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEED = "seed"
"""Field with the seed of one sample, which worlds and agents receive; no reward receives it."""
OWN_FIELDS = ("prompt_index", "prompt_ids", "prompt_text", "answer", SEED)
"""Fields of a prompt that this package sets; all others are columns of the data set."""
CALL = ("prompt_text", "response_text", "answer", "finish_reason")
"""Keyword arguments of every reward, in addition to the columns."""

OF_AGENTS = ("agent_reward", "transcript")
"""Further keyword arguments of rewards if an agent ran: the rewards that the agent gave, by
name, and the messages of its last chat, with the answer."""


def other_columns(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a prompt: its fields except those named in `OWN_FIELDS` or `CALL`."""
    taken = {*OWN_FIELDS, *CALL}
    return {name: value for name, value in prompt.items() if name not in taken}


def reward_input(
    prompt: Mapping[str, Any], response_text: str, finish_reason: str, answer: Any = None
) -> dict[str, Any]:
    """Return the input of a reward for one response to a prompt, with the prompt's columns.

    `RewardPool` also gets the seed of the sample, if the prompt has one.
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
