"""Rungs that compare one update of the tiny policy, or its logprobs and gradients."""

from functools import partial
from typing import Any

import numpy as np
import torch
from lib.logprobs import whole_logprobs
from lib.trainer_ranks import export
from torch import nn

from equivalence.ladder import (
    Bench,
    gradients,
    max_difference,
    merged_export,
    random_record,
    rung,
    saved_weights,
)
from equivalence.roles import tiny_arguments
from grpo_components.exchange.weights import StateDict
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.loading import load_whole_model
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean
from grpo_components.objective.losses import GRPOLoss, GSPOLoss
from grpo_components.objective.off_policy import NoCorrection, TokenTIS
from grpo_components.trajectory import Trajectory, pack

WHOLE, SMALL = 100_000, 64
"""Values of `tokens_per_micro_batch`: the whole batch, or about two trajectories per forward."""
OBJECTIVES = (
    (GRPOLoss(), TokenMean(), NoCorrection()),
    (GSPOLoss(clip_low=0.2, clip_high=0.2), SequenceMean(), NoCorrection()),
    (GRPOLoss(), ConstantLength(16), TokenTIS()),
)
"""Loss, aggregation and off-policy correction of the compared training steps."""


@rung(
    "FSDP on 2 ranks, micro-batched = 1 rank, whole batch",
    "weights after one SGD step, relative to the largest weight change of that step; for token "
    "mean, sequence mean, and constant length with an off-policy correction",
    1e-5,
)
def micro_batches_of_two_ranks_are_the_whole_batch(bench: Bench) -> float:
    trajectories, advantages = ragged_batch(bench)
    base, worst = saved_weights(bench.base), 0.0
    for loss, aggregation, off_policy in OBJECTIVES:
        objective = {"loss": loss, "aggregation": aggregation, "off_policy": off_policy}
        step = partial(weights_after_step, bench, trajectories, advantages, **objective)
        whole, cut = step(tokens_per_micro_batch=WHOLE), {"tokens_per_micro_batch": SMALL}
        gap = max_difference(whole, step(num_ranks=2, **cut))
        worst = max(worst, gap / max_difference(whole, base))
    return worst


@rung(
    "chunked = full logits",
    "logprobs of every response token in nats, and gradients relative to the largest gradient; "
    "chunks of 1, 7 and all tokens",
    5e-5,
)
def chunked_is_full_logits(bench: Bench) -> float:
    records, _ = ragged_batch(bench)
    model = whole_model(bench).requires_grad_(True)
    expected = torch.cat([whole_logprobs(model, record)[0] for record in records])
    weights = torch.linspace(-1, 1, len(expected))
    expected_gradients = gradients(model, expected @ weights)
    largest_gradient = max(float(g.abs().max()) for g in expected_gradients.values())
    worst = 0.0
    for chunk_tokens in (1, 7, 10_000):
        logprobs = ResponseLogprobs(model, chunk_tokens=chunk_tokens)(token_batch(records))[0]
        gap = max_difference({"": expected.detach()}, {"": logprobs.detach()})
        found = gradients(model, logprobs @ weights)
        relative = max_difference(expected_gradients, found) / largest_gradient
        worst = max(worst, gap, relative)
    return worst


@rung(
    "transformers policy = torchtune policy",
    "the tiny policy as a model of transformers and as torchtune's decoder: logprobs of every "
    "response token in nats, and the weights after one SGD step, relative to the largest "
    "weight change of that step",
    1e-5,
)
def transformers_is_torchtune(bench: Bench) -> float:
    trajectories, advantages = ragged_batch(bench)
    build = partial(hugging_face, str(bench.base))
    kinds = (whole_model(bench), load_whole_model(build, None, torch.device("cpu"), "fp32"))
    batch = token_batch(trajectories)
    with torch.no_grad():
        ours, theirs = (ResponseLogprobs(model, chunk_tokens=7)(batch)[0] for model in kinds)
    step = partial(
        weights_after_step, bench, trajectories, advantages, tokens_per_micro_batch=SMALL
    )
    expected, before = step(), saved_weights(bench.base)
    found = step(build_model=build, build_checkpointer=None, model_type=None)
    change = max_difference(expected, {name: before[name] for name in expected})
    gap = max_difference({"": ours}, {"": theirs})
    return max(gap, max_difference(expected, found) / change)


def weights_after_step(
    bench: Bench, trajectories: list[Trajectory], advantages: np.ndarray, **changes: Any
) -> StateDict:
    """Return the tiny policy's weights after one SGD step; they change by the scaled gradient."""
    sgd = {"build_optimizer": partial(torch.optim.SGD, lr=10.0), "clip_grad_norm": None}
    step = ("train_step", pack(trajectories), advantages, 0)
    return merged_export(bench.train([step, *export(1)], **sgd, **changes))


def ragged_batch(bench: Bench) -> tuple[list[Trajectory], np.ndarray]:
    """Return twelve random responses of several lengths, with the tiny policy's noisy logprobs."""
    return bench.once("ragged batch", partial(_ragged_batch, bench))


def _ragged_batch(bench: Bench) -> tuple[list[Trajectory], np.ndarray]:
    model = whole_model(bench)
    rng = np.random.default_rng(0)
    records = []
    for number in range(12):
        size = int(rng.integers(1, 17))
        prompt = rng.integers(30, 380, rng.integers(1, 13))
        own = {"prompt_index": number, "group_id": number // 4}
        own |= {"temperature": (1.0, 0.7)[number % 2]}
        record = random_record(rng, (30, 380), prompt, size, **own)
        with torch.no_grad():
            logprobs = whole_logprobs(model, record)[0].numpy()
        record.generator_logprobs = logprobs + rng.normal(0, 0.15, size).astype(np.float32)
        records.append(record)
    return records, rng.normal(0, 1, len(records)).astype(np.float32)


def whole_model(bench: Bench) -> nn.Module:
    model = tiny_arguments(bench.cfg)[0]["trainer"]["options"]
    return load_whole_model(
        model.build_model, model.build_checkpointer, torch.device("cpu"), "fp32"
    )
