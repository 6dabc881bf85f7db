"""Rungs that compare engines, and a generator with its trainer."""

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equivalence.families import FAMILIES, HF_FAMILIES, random_checkpoint, save_random
from equivalence.ladder import Bench, LogprobGap, rung, saved_weights
from equivalence.roles import ENGINES, GENERATOR, TRAINER, change_options, tiny_arguments
from grpo_components.exchange.weights import Manifest, pack_bucket
from grpo_components.rendezvous import local_rendezvous
from grpo_components.settings import Settings
from grpo_components.trajectory import concatenate

_SHORT_PROMPTS = [[5, 6, 7, number + 1] for number in range(8)]
_LONG_PREFIX = [7 + number % 200 for number in range(150)]
"""Prompt tokens, more than one block of the prefix cache (32 tokens on a CPU)."""
_LONG_PROMPTS = [[*_LONG_PREFIX, number] for number in range(4)]


@rung(
    "generator logprobs = trainer logprobs",
    "every sampled token, in nats, float32; with the base weights at temperature 1, and with "
    "weights pulled after a step at temperature 0.7",
    1e-4,
)
def generator_is_trainer(bench: Bench) -> float:
    return generator_to_trainer(bench, bench.cfg)


def generator_to_trainer(bench: Bench, cfg: Settings) -> float:
    """Compare their logprobs before and after a step whose weights are pulled."""
    arguments, prompts = tiny_arguments(cfg)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    trained = change_options(arguments["trainer"], loss=LogprobGap(), build_optimizer=optimizer)
    first, worst = {"rank": 0, "rendezvous": local_rendezvous()}, 0.0
    with (
        closing(bench.process(GENERATOR, **arguments["generator"])) as generator,
        closing(bench.process(TRAINER, **first, **trained)) as trainer,
    ):
        for step, temperature in enumerate((1.0, 0.7)):
            groups = [
                generator.call("generate_group", *next(prompts), number, 0, temperature)[0]
                for number in range(8)
            ]
            batch = concatenate(groups)
            advantages = np.resize(np.array([1, -1], np.float32), len(batch["group_id"]))
            result = trainer.call("train_step", batch, advantages, step)
            worst = max(worst, result.metrics["gap/max"])
            version = trainer.call("gather_weights")
            generator.call("load_weights", version, trainer.call("export_weights", version)[0])
    return worst


@rung(
    "engine that pulled weights = freshly loaded engine",
    "sampled tokens and their logprobs in nats; tied and untied embeddings, cached prefixes",
    0.0,
)
def pulled_engine_is_fresh_engine(bench: Bench) -> float:
    prompts = _SHORT_PROMPTS[:6] + _LONG_PROMPTS[1:3]
    worst = 0.0
    with closing(bench.process(ENGINES)) as engines:
        for base, new in _weights_before_and_after(bench):
            pulled = engines.call("sample", str(base), _bucket(new), prompts)
            fresh = engines.call("sample", str(new), None, prompts)
            worst = max(worst, difference_of_completions(pulled, fresh))
    return worst


@rung(
    "engine that pulled weights under load = freshly loaded engine",
    "sampled tokens and their logprobs in nats, for requests made after the swap while earlier "
    "requests with the same prompts keep running and keep their KV; prompts of 151 tokens (the "
    "prefix cache has blocks of 32), tied and untied embeddings",
    1e-5,
)
def engine_pulled_under_load_is_fresh_engine(bench: Bench) -> float:
    worst = 0.0
    with closing(bench.process(ENGINES)) as engines:
        for base, new in _weights_before_and_after(bench):
            sample = ("sample_under_load", str(base), _bucket(new), _LONG_PROMPTS)
            pulled, load = engines.call(*sample)
            if any(set(completion.token_versions) != {0, 1} for completion in load):
                return math.inf  # a response lacks tokens of the old or of the new weights
            if any(set(completion.token_versions) != {1} for completion in pulled):
                return math.inf
            fresh = engines.call("sample", str(new), None, _LONG_PROMPTS)
            worst = max(worst, difference_of_completions(pulled, fresh))
    return worst


@rung(
    "generator with 2 tensor-parallel workers = 1 worker",
    "sampled tokens, their versions, and their logprobs in nats, of requests that run while "
    "the weights are swapped, and of requests made after the swap",
    1e-4,
    nightly=True,
)
def two_workers_are_one(bench: Bench) -> float:
    base, new = _weights_before_and_after(bench)[-1]
    with closing(bench.process(ENGINES)) as engines:
        one, two = (
            engines.call("sample_under_load", str(base), _bucket(new), _LONG_PROMPTS, num_workers)
            for num_workers in (1, 2)
        )
    for a, b in zip(one[1], two[1], strict=True):
        if not np.array_equal(a.token_versions, b.token_versions):
            return math.inf
    return max(difference_of_completions(one[n], two[n]) for n in (0, 1))


@rung(
    "transformers backend = vLLM backend",
    "greedy tokens, their versions, and their logprobs in nats, float32, of a fresh engine and "
    "after it pulled weights; Qwen2 with tied and untied embeddings, and gpt-oss (experts, "
    "attention sinks, a sliding window of 8 tokens)",
    1e-4,
)
def transformers_backend_is_vllm(bench: Bench) -> float:
    config, worst = HF_FAMILIES["gpt-oss"](), 0.0
    experts = save_random(config, bench.folder(), 0), save_random(config, bench.folder(), 1)
    with closing(bench.process(ENGINES)) as engines:
        for base, new in [*_weights_before_and_after(bench), experts]:
            given = (str(base), _bucket(new), _SHORT_PROMPTS + _LONG_PROMPTS)
            found = [
                engines.call("sample_greedily", *given, backend)
                for backend in ("vllm", "transformers")
            ]
            for completions in found:
                for version, sampled in enumerate(completions):
                    if any({*each.token_versions} != {version} for each in sampled):
                        return math.inf
            worst = max(worst, *map(difference_of_completions, *found))
    return worst


def _weights_before_and_after(bench: Bench) -> list[tuple[Path, Path]]:
    """Save old and new random models, with tied and untied embeddings; return their folders."""
    families = [FAMILIES["QWEN2 (tied)"], FAMILIES["QWEN2 (untied)"]]
    return [
        (random_checkpoint(family, bench.folder(), 0), random_checkpoint(family, bench.folder(), 1))
        for family in families
    ]


def _bucket(folder: Path) -> tuple[Manifest, Any]:
    return pack_bucket(list(saved_weights(folder).items()))


def difference_of_completions(left: list[Any], right: list[Any]) -> float:
    """Return the largest logprob difference in nats; infinite if any token differs."""
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        if not np.array_equal(a.token_ids, b.token_ids):
            return math.inf
        worst = max(worst, float(np.abs(a.logprobs - b.logprobs).max()))
    return worst
