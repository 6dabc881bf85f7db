"""Logs sampled groups to Weights & Biases as a table with one row per response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_components.plain_text import plain

_OF_GROUP = ("attempt", "group_id", "prompt_index", "epoch", "prompt", "answer")
_OF_RESPONSE = ("response", "reward", "success", "finish_reason", "response_tokens", "error")
_LOGPROBS = (
    *("tokens", "generator_logprobs", "trainer_logprobs"),
    *("reference_logprobs", "teacher_logprobs"),
)


def log_rollout_table(step: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Log groups as the table `rollouts` to the W&B run of this process."""
    import wandb  # only if W&B is the logger: the import takes most of a second

    columns, rows = rollout_rows(step, groups)
    # Answers in a data set and values of a user's reward may have mixed types.
    table = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
    wandb.log({"rollouts": table, "global_step": step})


def rollout_rows(step: int, groups: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the table's column names, and one row per response."""
    responses = [response for group in groups for response in group["responses"]]
    terms = list(dict.fromkeys(name for r in responses for name in r["reward_terms"]))
    logprobs = [name for name in _LOGPROBS if any(r.get(name) for r in responses)]
    columns = ["step", *_OF_GROUP, *_OF_RESPONSE, "advantage", "oldest_version", "newest_version"]
    columns += [f"reward_terms/{name}" for name in terms] + logprobs
    rows = []
    for group in groups:
        for response, advantage in zip(group["responses"], group["advantages"], strict=True):
            values = [step, *map(group.get, _OF_GROUP), *map(response.get, _OF_RESPONSE), advantage]
            values += response["versions"] or [None, None]
            values += [response["reward_terms"].get(name) for name in terms]
            rows.append([*map(_cell, values), *(_sequence(response.get(k)) for k in logprobs)])
    return columns, rows


def _cell(value: Any) -> Any:
    return plain(value) if isinstance(value, str) else value


def _sequence(values: Sequence[Any] | None) -> str:
    """Return a list as JSON text: W&B needs one type in a column, and some logprobs are null."""
    return "" if values is None else json.dumps(values)
