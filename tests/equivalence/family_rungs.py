"""Rungs of the equivalence ladder that cover every model family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchtune.training import FullModelHFCheckpointer
from transformers import AutoModelForCausalLM

from equivalence.families import FAMILIES, Family, hf_config_of, save_random
from equivalence.hf_families import HF_FAMILIES
from equivalence.roles import ENGINES, RoleProcess, merged_export
from equivalence.rungs import (
    Bench,
    LogprobGap,
    full_logprobs,
    gradients,
    max_difference,
    saved_weights,
)
from grpo_components.exchange.weights import StateDict, pack_bucket
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.hugging_face_weights import load_hugging_face
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.meshes import Sharding
from grpo_components.trajectory import Trajectory, pack

TRAINERS = (
    *((name, 1, Sharding()) for name in FAMILIES),
    ("QWEN2 (tied)", 2, Sharding()),
    ("QWEN2 (untied)", 2, Sharding(tensor=2)),
)
"""Family, trainer ranks and their layout."""
HF_TRAINERS = (
    *((name, 1, Sharding()) for name in HF_FAMILIES),
    ("Qwen3", 2, Sharding(tensor=2)),
    ("Qwen3-MoE", 2, Sharding()),
)
"""As `TRAINERS`, for policies of transformers; two ranks also share the norm of each head, or each
layer's fused experts."""
PROMPTS = [[5, 6, 7, number] for number in range(2)] + [
    np.random.default_rng(number).integers(1, 256, 40).tolist() for number in range(2)
]
"""Short ones, and ones that are longer than the sliding windows and than a block of KV."""


@dataclass(frozen=True)
class Chain:
    """Differences along the way of a family's weights: trained, pushed, sampled from, saved."""

    family: str
    saved: float
    """Largest difference between what a trainer loads or saves and what it exports; 0 if equal."""
    logprobs: float
    """Largest difference between the logprobs of engine and trainer, in nats."""


def family_arguments(bench: Bench, family: Family, base: Path) -> dict[str, Any]:
    """Return the trainer arguments that replace the tiny policy by a family's model."""
    return {
        "build_model": family.build_model,
        "build_checkpointer": partial(
            FullModelHFCheckpointer,
            checkpoint_dir=str(base),
            checkpoint_files=["model.safetensors"],
            model_type=family.model_type,
            output_dir=str(bench.scratch / "unused"),
        ),
        "model_type": family.model_type,
        "base_model_path": str(base),
    }


def hf_arguments(base: Path) -> dict[str, Any]:
    """Return the trainer arguments that replace the tiny policy by a model of transformers."""
    return {
        "build_model": partial(hugging_face, path=str(base)),
        "build_checkpointer": None,
        "model_type": None,
        "base_model_path": str(base),
    }


def chains(bench: Bench) -> list[Chain]:
    """Take the weights of each of torchtune's families the whole way."""

    def start(name: str) -> tuple[Any, Callable[[Path], dict[str, Any]]]:
        family = FAMILIES[name]
        return hf_config_of(family), partial(family_arguments, bench, family)

    return bench.once("chains", lambda: _chains(bench, TRAINERS, start))


def hf_chains(bench: Bench) -> list[Chain]:
    """Take the weights of each family of transformers' policies the whole way."""

    def start(name: str) -> tuple[Any, Callable[[Path], dict[str, Any]]]:
        return HF_FAMILIES[name](), hf_arguments

    return bench.once("chains of transformers", lambda: _chains(bench, HF_TRAINERS, start))


def _chains(
    bench: Bench,
    trainers: Sequence[tuple[str, int, Sharding]],
    start: Callable[[str], tuple[Any, Callable[[Path], dict[str, Any]]]],
) -> list[Chain]:
    rng, found = np.random.default_rng(0), []
    options = {"loss": LogprobGap(), "build_optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with closing(RoleProcess(ENGINES)) as engines:
        for name, num_ranks, sharding in trainers:
            config, arguments = start(name)
            train = partial(bench.train, num_ranks=num_ranks, sharding=sharding, **options)
            responses = rng.integers(1, 256, (len(PROMPTS), 9))
            saved, logprobs = _chain(bench, engines, config, arguments, train, responses)
            found.append(Chain(name, saved, logprobs))
    return found


def _chain(
    bench: Bench,
    engines: RoleProcess,
    config: Any,
    arguments: Callable[[Path], dict[str, Any]],
    train: Callable[..., list[list[Any]]],
    responses: NDArray[np.int64],
) -> tuple[float, float]:
    """Return the differences of `Chain`; infinite ones if the weights took another way."""
    base, copy = save_random(config, bench.folder(), seed=0), bench.folder()
    step = train_step_of([(ids, np.zeros(9, np.float32)) for ids in responses])
    calls = [*_EXPORT, step, ("hold_state", False), ("write_state", str(copy))]
    calls += [("gather_weights",), ("export_weights", 1)]
    results = train(calls, **arguments(base))
    pushed = merged_export(results)
    saved = max(
        max_difference(saved_weights(base), _first_export(results)),
        max_difference(saved_weights(copy), pushed),
    )
    bucket = pack_bucket(list(pushed.items()))
    new, running = engines.call("sample_under_load", str(base), bucket, PROMPTS)
    sampled = train_step_of([(completion.token_ids, completion.logprobs) for completion in new])
    results = train([*_EXPORT, sampled], **arguments(copy))
    saved = max(saved, max_difference(saved_weights(copy), _first_export(results)))
    versions = [{*completion.token_versions.tolist()} for completion in (*new, *running)]
    if versions[: len(new)] != [{1}] * len(new) or {0, 1} not in versions:
        return saved, math.inf  # not the new weights, or nothing ran while they were swapped in
    if np.concatenate([completion.logprobs for completion in new]).mean() > -1:
        return saved, math.inf  # the engine is certain of its tokens, whatever its weights
    if max_difference(saved_weights(base), pushed) < 1e-3:
        return saved, math.inf  # the step did not change the weights
    return saved, results[0][-1].metrics["gap/max"]


_EXPORT = [("gather_weights",), ("export_weights", 0)]
"""A new trainer's first calls, which return the weights that it loaded."""


def _first_export(results: list[list[Any]]) -> StateDict:
    return merged_export([rank_results[: len(_EXPORT)] for rank_results in results])


def reloaded_is_exported(bench: Bench) -> float:
    """Compare checkpoints, by Hugging Face and by trainers, with what their trainers export."""
    return max(chain.saved for chain in chains(bench))


def every_family_samples_from_what_it_trained(bench: Bench) -> float:
    """Compare logprobs of an engine that pulled trained weights with those of their trainer.

    The engine pulls under load. The weights are also saved, and the trainer that computes the
    logprobs has loaded them from there.
    """
    return max(chain.logprobs for chain in chains(bench))


def reloaded_is_exported_by_transformers(bench: Bench) -> float:
    """As `reloaded_is_exported`, for policies of transformers."""
    return max(chain.saved for chain in hf_chains(bench))


def every_policy_of_transformers_samples_from_what_it_trained(bench: Bench) -> float:
    """As `every_family_samples_from_what_it_trained`, for policies of transformers."""
    return max(chain.logprobs for chain in hf_chains(bench))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager, or decorator: small models are slower with two threads on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def shared_prompts_are_one_row_per_response(bench: Bench) -> float:
    """Compare logprobs, loss and gradient with those of torchtune's own decoder, row by row."""
    worst = 0.0
    for family in FAMILIES.values():
        torch.manual_seed(0)
        model, plain = family.build_model(), family.build_model()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        plain.load_state_dict(model.state_dict())
        worst = max(worst, _shared_difference(model, plain))
    return worst


@_one_thread()
def shared_prompts_are_rows_of_transformers(bench: Bench) -> float:
    """Compare logprobs, loss and gradient with transformers' own eager attention, row by row."""
    return max(hf_shared_difference(bench, name) for name in HF_FAMILIES)


def hf_shared_difference(bench: Bench, name: str) -> float:
    """Return the difference of `shared_prompts_are_rows_of_transformers` for one family."""
    folder = save_random(HF_FAMILIES[name](), bench.folder(), seed=0)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return _shared_difference(load_hugging_face(folder), plain.eval())


def _shared_difference(model: nn.Module, plain: nn.Module) -> float:
    records = _grouped_batch()
    masks = [record.response_mask for record in records]
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
    return max(
        _relative(logprobs, expected),
        _relative(losses.mean(), expected_losses.mean(), expected_losses.abs().mean()),
        max_difference(wanted, found) / largest,
    )


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
