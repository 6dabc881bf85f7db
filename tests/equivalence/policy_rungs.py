"""Rung of the equivalence ladder that compares the two kinds of policy on the same weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from equivalence.rungs import (
    SMALL,
    Bench,
    max_difference,
    ragged_batch,
    saved_weights,
    weights_after_step,
    whole_model,
)
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.loading import load_whole_model
from grpo_components.models.logprobs import ResponseLogprobs, token_batch


def transformers_is_torchtune(bench: Bench) -> float:
    """Compare the tiny policy as a transformers model and as a torchtune decoder."""
    trajectories, advantages = ragged_batch(bench)
    base = Path(bench.cfg.base_model_path)
    build = partial(hugging_face, str(base))
    kinds = (whole_model(bench), load_whole_model(build, None, torch.device("cpu"), "fp32"))
    batch = token_batch(trajectories)
    with torch.no_grad():
        ours, theirs = (ResponseLogprobs(model, chunk_tokens=7)(batch)[0] for model in kinds)
    gap = max_difference({"": ours}, {"": theirs})
    step = partial(
        weights_after_step, bench, trajectories, advantages, tokens_per_micro_batch=SMALL
    )
    expected, before = step(), saved_weights(base)
    found = step(build_model=build, build_checkpointer=None, model_type=None)
    change = max_difference(expected, {name: before[name] for name in expected})
    return max(gap, max_difference(expected, found) / change)
