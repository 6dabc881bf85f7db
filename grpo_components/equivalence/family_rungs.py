"""Rungs of the equivalence ladder that cover every model family."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchtune.training import FullModelHFCheckpointer

from grpo_components.equivalence.families import FAMILIES, Family, random_checkpoint
from grpo_components.equivalence.roles import ENGINES, RoleProcess, merged_export
from grpo_components.equivalence.rungs import (
    Bench,
    LogprobGap,
    full_logprobs,
    gradients,
    max_difference,
    saved_weights,
)
from grpo_components.exchange.weights import pack_bucket
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.meshes import Sharding
from grpo_components.models.qwen3_weights import Qwen3Checkpointer
from grpo_components.trajectory import Trajectory, pack

PROMPTS = [[5, 6, 7, number] for number in range(4)]
"""Token ids of the prompts that the families answer."""
TRAINERS = (
    *((name, 1, Sharding()) for name in FAMILIES),
    ("QWEN3 (tied)", 2, Sharding()),
    ("QWEN3 (untied)", 2, Sharding(tensor=2)),
)
"""Family, trainer ranks and their layout: one rank for every family, and two where the ranks must
also agree on a tensor of each head (its norm)."""


def family_arguments(bench: Bench, family: Family, base: Path) -> dict[str, Any]:
    """Return the trainer arguments that replace the tiny policy by a model of a family.

    Args:
        bench: owner of the scratch folder.
        family: the model family.
        base: folder of the model's checkpoint.
    """
    is_qwen3 = family.model_type == "QWEN3"
    return {
        "build_model": family.build_model,
        "build_checkpointer": partial(
            Qwen3Checkpointer if is_qwen3 else FullModelHFCheckpointer,
            checkpoint_dir=str(base),
            checkpoint_files=["model.safetensors"],
            model_type=family.model_type,
            output_dir=str(bench.scratch / "unused"),
        ),
        "model_type": family.model_type,
        "base_model_path": str(base),
    }


def reloaded_is_exported(bench: Bench) -> float:
    """Compare a Hugging Face model with a trainer's copy and with the reloaded copy's export."""
    worst = 0.0
    for name, num_ranks, sharding in TRAINERS:
        family = FAMILIES[name]
        base, copy = random_checkpoint(family, bench.folder(), seed=0), bench.folder()
        train = partial(bench.train, num_ranks=num_ranks, sharding=sharding)
        save = [("hold_state", False), ("write_state", str(copy))]
        train(save, **family_arguments(bench, family, base))
        again = [("gather_weights",), ("export_weights", 0)]
        for weights in (
            saved_weights(copy),
            merged_export(train(again, **family_arguments(bench, family, copy))),
        ):
            worst = max(worst, max_difference(saved_weights(base), weights))
    return worst


def every_family_samples_from_what_it_trained(bench: Bench) -> float:
    """Compare logprobs of an engine that pulled trained weights with those of their trainer.

    The engine pulls under load. The weights are also saved, and the trainer that computes the
    logprobs has loaded them from there.
    """
    rng, worst = np.random.default_rng(0), 0.0
    options = {"loss": LogprobGap(), "build_optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with closing(RoleProcess(ENGINES)) as engines:
        for name, num_ranks, sharding in TRAINERS:
            family = FAMILIES[name]
            base, copy = random_checkpoint(family, bench.folder(), seed=0), bench.folder()
            train = partial(bench.train, num_ranks=num_ranks, sharding=sharding, **options)
            responses = rng.integers(1, 256, (len(PROMPTS), 9))
            calls = [
                train_step_of([(ids, np.zeros(9, np.float32)) for ids in responses]),
                *(("hold_state", False), ("write_state", str(copy))),
                *(("gather_weights",), ("export_weights", 1)),
            ]
            pushed = merged_export(train(calls, **family_arguments(bench, family, base)))
            if max_difference(saved_weights(base), pushed) < 1e-3:
                return math.inf  # the step did not change the weights
            if max_difference(saved_weights(copy), pushed) > 0:
                return math.inf
            bucket = pack_bucket(list(pushed.items()))
            new, running = engines.call("sample_under_load", str(base), bucket, PROMPTS)
            versions = [{*completion.token_versions.tolist()} for completion in (*new, *running)]
            if versions[: len(new)] != [{1}] * len(new) or {0, 1} not in versions:
                return math.inf  # not the new weights, or nothing ran while they were swapped in
            sampled = [(completion.token_ids, completion.logprobs) for completion in new]
            calls = [train_step_of(sampled)]
            result = train(calls, **family_arguments(bench, family, copy))[0][-1]
            worst = max(worst, result.metrics["gap/max"])
    return worst


def shared_prompts_are_one_row_per_response(bench: Bench) -> float:
    """Compare logprobs, loss and gradient with those of torchtune's own decoder, row by row."""
    records = _grouped_batch()
    masks = [record.response_mask for record in records]
    worst = 0.0
    for family in FAMILIES.values():
        torch.manual_seed(0)
        model, plain = family.build_model(), family.build_model()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        plain.load_state_dict(model.state_dict())
        logprobs = ResponseLogprobs(model, chunk_tokens=50)(token_batch(records, masks))[0]
        rows = [
            full_logprobs(plain, record)[torch.from_numpy(mask)]
            for record, mask in zip(records, masks, strict=True)
        ]
        expected = torch.cat(rows)
        weights = torch.linspace(-1.0, 1.5, len(expected))
        losses, expected_losses = logprobs * weights, expected * weights
        found = gradients(model, losses.mean())
        wanted = gradients(plain, expected_losses.mean())
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        worst = max(
            worst,
            _relative(logprobs, expected),
            _relative(losses.mean(), expected_losses.mean(), expected_losses.abs().mean()),
            max_difference(wanted, found) / largest,
        )
    return worst


def _relative(value: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Return the largest difference, relative to a size: by default the largest expected value."""
    size = expected.abs().max() if size is None else size
    return float(((value - expected).abs().max() / size).detach())


def _grouped_batch() -> list[Trajectory]:
    """Return random groups of one, two and five responses, two of which have no trained token."""
    rng = np.random.default_rng(0)
    records: list[Trajectory] = []
    for prompt_tokens, sizes in ((40, (9,)), (90, (60, 1)), (12, (30, 2, 0, 17, 8))):
        prompt = rng.integers(0, 256, prompt_tokens)
        for size in sizes:
            record = Trajectory(
                prompt_ids=prompt,
                response_ids=rng.integers(0, 256, size),
                response_mask=(np.arange(size) % 5 != 3) & (size != 8),  # 8: a failed sample
                generator_logprobs=np.zeros(size, np.float32),
                token_versions=np.zeros(size, np.int32),
                prompt_index=0,
                epoch=0,
                group_id=prompt_tokens,
                attempt=0,
                finish_reason="stop",
                temperature=(1.0, 0.7)[len(records) % 2],
            )
            records.append(record)
    return records


def train_step_of(
    responses: list[tuple[NDArray[np.int64], NDArray[np.float32]]], version: int = 0
) -> tuple[Any, ...]:
    """Return a `train_step` call with one response per prompt.

    Args:
        responses: token ids [R] and generator logprobs [R] of each response.
        version: policy version that sampled them.
    """
    records = [
        Trajectory(
            prompt_ids=np.array(prompt),
            response_ids=ids,
            response_mask=np.ones(len(ids), bool),
            generator_logprobs=logprobs,
            token_versions=np.full(len(ids), version, np.int32),
            prompt_index=0,
            epoch=0,
            group_id=0,
            attempt=0,
            finish_reason="length",
        )
        for prompt, (ids, logprobs) in zip(PROMPTS, responses, strict=True)
    ]
    advantages = np.resize(np.array([1, -1], np.float32), len(records))
    return "train_step", pack(records), advantages, 0
