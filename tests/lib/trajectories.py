"""Builds responses of which a test cares for few fields."""

from typing import Any

import numpy as np

from grpo_components.trajectory import Trajectory


def response(group_id: int, versions: list[int], **fields: Any) -> Trajectory:
    """Return a response whose tokens these policy versions sampled."""
    size = len(versions)
    given = {
        "prompt_ids": np.arange(2),
        "response_ids": np.arange(size),
        "response_mask": np.ones(size, bool),
        "generator_logprobs": np.full(size, -1, np.float32),
        "token_versions": np.array(versions, np.int32),
        **{"prompt_index": 0, "epoch": 0, "group_id": group_id, "attempt": 0},
        "finish_reason": "stop",
    }
    return Trajectory(**given | fields)
