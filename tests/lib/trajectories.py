"""Builds records of responses for tests that look at a few of their fields."""

from typing import Any

import numpy as np

from grpo_components.trajectory import GroupSummary, Trajectory


def trajectory(response, mask=None, **fields):
    """Return a response of these token ids, or of this many tokens; `mask`: which are sampled."""
    ids = np.arange(response) if isinstance(response, int) else np.asarray(response)
    mask = np.ones(len(ids), bool) if mask is None else np.array(mask, bool)
    made = {
        "prompt_ids": np.array([1, 2]),
        "response_ids": ids,
        "response_mask": mask,
        "generator_logprobs": np.zeros(len(ids), np.float32),
        "token_versions": np.where(mask, 0, -1).astype(np.int32),
        "finish_reason": "stop",
        **dict.fromkeys(("prompt_index", "epoch", "group_id", "attempt"), 0),
    }
    return Trajectory(**made | fields)


def response(group_id: int, versions: list[int], **fields: Any) -> Trajectory:
    sampled = {"token_versions": np.array(versions, np.int32), "group_id": group_id}
    return trajectory(len(versions), **sampled | fields)


def summary(rewards: list[float], **fields: Any) -> GroupSummary:
    """Return the summary of a group with these rewards; a failed sample has the reward NaN."""
    size = len(rewards)
    made: dict[str, Any] = {
        "rewards": rewards,
        "successes": [reward == 1 for reward in rewards],
        "finish_reasons": ["stop"] * size,
        "reward_terms": [{} for _ in rewards],
        "errors": [],
        **dict.fromkeys(("group_id", "prompt_index", "oldest_version", "newest_version"), 0),
        **{name: [1] * size for name in ("response_tokens", "response_lengths", "turns")},
    }
    return GroupSummary(**made | fields)
