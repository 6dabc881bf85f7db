"""The columns of a row besides question and answer, which worlds and rewards receive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEED = "seed"
"""Field with a sample's own seed, the key of its recorded rewards; no reward receives it."""
OWN_FIELDS = ("prompt_index", "prompt_ids", "prompt_text", "answer", SEED)
"""Fields of a prompt that the recipe sets; all others are columns of its row."""
CALL = ("prompt_text", "response_text", "answer", "finish_reason")
"""Keyword arguments of every reward, besides the columns."""

OF_AGENTS = ("agent_reward", "transcript")
"""Further arguments for rewards of an agent's session: the rewards that the agent gave, by name,
and the messages of its last chat, the answer included."""


def other_columns(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a prompt's row, except those named like another argument."""
    taken = {*OWN_FIELDS, *CALL}
    return {name: value for name, value in prompt.items() if name not in taken}


def reward_input(
    prompt: Mapping[str, Any], response_text: str, finish_reason: str, answer: Any = None
) -> dict[str, Any]:
    """Return a reward's input: one response to one prompt, with the columns of its row.

    The sample's seed, if the prompt has one, is added for `RewardPool`.
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
    """Return prompts that all have the same columns: a column that a row lacks is None."""
    names: dict[str, None] = {}
    for prompt in prompts:
        names.update(dict.fromkeys(other_columns(prompt)))
    return [{**names, **prompt} for prompt in prompts]
