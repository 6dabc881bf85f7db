"""Converts metrics and sampled groups to JSON; logs sampled groups as a W&B table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_components.plain_text import plain


def as_json(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors to numbers or lists, NaN or infinity to None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        value = value.tolist()
        if isinstance(value, list):
            return value[0] if len(value) == 1 else as_json(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def log_rollout_table(step: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Log groups as the table `rollouts` to the W&B run of this process."""
    import wandb  # only if W&B is the logger: the import takes most of a second

    columns, rows = rollout_rows(step, groups)
    # Answers in a data set and values of a user's reward may have mixed types.
    table = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
    wandb.log({"rollouts": table, "global_step": step})


def rollout_rows(step: int, groups: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Convert groups to a table: return the names of non-empty columns, and a row per response."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        shared = {name: group[name] for name in group if name not in ("responses", "advantages")}
        for response, advantage in zip(group["responses"], group["advantages"], strict=True):
            row = {"step": step, **shared, **response}
            oldest, newest = row.pop("versions") or (None, None)
            terms = row.pop("reward_terms").items()
            row |= {"advantage": advantage, "oldest_version": oldest, "newest_version": newest}
            rows.append(row | {f"reward_terms/{name}": value for name, value in terms})
    columns = dict.fromkeys(name for row in rows for name in row if row[name] is not None)
    return [*columns], [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    # Lists as JSON text: W&B needs one type in a column, and some logprobs are null.
    value = json.dumps(value) if isinstance(value, list | dict) else value
    return plain(value) if isinstance(value, str) else value
