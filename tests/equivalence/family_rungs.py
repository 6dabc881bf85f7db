"""Rungs that take the weights of every model family the whole way, and those with adapters."""

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from lib.trainer_ranks import checkpointer_of, export
from lib.trajectories import trajectory
from numpy.typing import NDArray

from equivalence.engine_rungs import difference_of_completions, generator_to_trainer
from equivalence.families import FAMILIES, HF_FAMILIES, random_checkpoint, save_random
from equivalence.ladder import Bench, LogprobGap, max_difference, merged_export, rung, saved_weights
from equivalence.roles import ENGINES, tiny_config
from grpo_components.exchange.weights import StateDict, pack_bucket
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.meshes import Sharding
from grpo_components.settings import LoraSettings, LoraTarget
from grpo_components.trajectory import pack

_TRAINERS = (
    *((name, 1, Sharding()) for name in FAMILIES),
    ("QWEN2 (tied)", 2, Sharding()),
    ("QWEN2 (untied)", 2, Sharding(tensor=2)),
)
"""Family, trainer ranks and their layout."""
_HF_TRAINERS = (
    *((name, 1, Sharding()) for name in HF_FAMILIES),
    ("Qwen3", 2, Sharding(tensor=2)),
    ("Qwen3-MoE", 2, Sharding()),
)
"""As `_TRAINERS`, for policies of transformers; two ranks also share the norm of each head, or each
layer's fused experts."""
_ALL = get_args(LoraTarget)
_ADAPTED = (("Qwen3", 2, _ALL), ("LLAMA3_2", 1, _ALL), ("PHI4", 1, ("o_proj", "down_proj")))
"""Family, trainer ranks and adapted layers: a policy of transformers on two ranks, rows in another
order, fused layers."""
_PROMPTS = [[5, 6, 7, number] for number in range(2)] + [
    np.random.default_rng(number).integers(1, 256, 40).tolist() for number in range(2)
]
"""Short ones, and ones that are longer than the sliding windows and than a block of KV."""


class Chain(NamedTuple):
    """Differences along the way of a family's weights: trained, pushed, sampled from, saved."""

    saved: float
    """Largest difference between what a trainer loads or saves and what it exports; 0 if equal."""
    logprobs: float
    """Largest difference between the logprobs of engine and trainer, in nats."""


@rung(
    "reloaded Hugging Face export = exported weights",
    f"every tensor of {', '.join(FAMILIES)}: a checkpoint written by "
    "Hugging Face and the export of a trainer that loaded it; the weights after a step, pushed "
    "and saved, and the export of a trainer that loaded the saved ones; Qwen2 also with 2 "
    "trainer ranks: FSDP, tensor parallel",
    0.0,
)
def reloaded_is_exported(bench: Bench) -> float:
    return max(chain.saved for chain in _chains(bench, _TRAINERS))


@rung(
    "generator logprobs = trainer logprobs, every family",
    "every sampled token, in nats, float32; a random model of each family is trained for one "
    "step, pushed and saved; an engine pulls the weights under load and samples from them, and "
    "a trainer that loaded the saved ones computes the logprobs; Qwen2 also with 2 trainer "
    "ranks: FSDP, tensor parallel",
    1e-4,
)
def every_family_samples_from_what_it_trained(bench: Bench) -> float:
    return max(chain.logprobs for chain in _chains(bench, _TRAINERS))


@rung(
    "reloaded = exported, policies of transformers",
    f"as the rung of torchtune's families, of {', '.join(HF_FAMILIES)}; Qwen3 and Qwen3-MoE also "
    "with 2 trainer ranks: tensor parallel, FSDP",
    0.0,
    nightly=True,
)
def reloaded_is_exported_by_transformers(bench: Bench) -> float:
    return max(chain.saved for chain in _chains(bench, _HF_TRAINERS))


@rung(
    "generator logprobs = trainer logprobs, policies of transformers",
    "as the rung of torchtune's families, for the same policies; each one's figure is in "
    "docs/models.md",
    1e-4,
    nightly=True,
)
def every_policy_of_transformers_samples_from_what_it_trained(bench: Bench) -> float:
    return max(chain.logprobs for chain in _chains(bench, _HF_TRAINERS))


def _chains(bench: Bench, trainers: tuple[tuple[str, int, Sharding], ...]) -> list[Chain]:
    return bench.once(trainers, partial(_take_the_whole_way, bench, trainers))


def _take_the_whole_way(
    bench: Bench, trainers: tuple[tuple[str, int, Sharding], ...]
) -> list[Chain]:
    rng, found = np.random.default_rng(0), []
    options = {"loss": LogprobGap(), "build_optimizer": partial(torch.optim.AdamW, lr=1e-2)}
    with closing(bench.process(ENGINES)) as engines:
        for name, num_ranks, sharding in trainers:
            train = partial(bench.train, num_ranks=num_ranks, sharding=sharding, **options)
            found.append(_chain(bench, engines, name, train, _first_step(rng)))
    return found


def _chain(bench: Bench, engines: Any, name: str, train: Any, step: tuple[Any, ...]) -> Chain:
    base, copy = _random_policy(bench, name), bench.folder()
    save = [("hold_state", False), ("write_state", str(copy))]
    results = train([*export(0), step, *save, *export(1)], **_trainer_arguments(bench, name, base))
    pushed = merged_export(results)
    saved = max(
        max_difference(saved_weights(base), _first_export(results)),
        max_difference(saved_weights(copy), pushed),
    )
    bucket = pack_bucket(list(pushed.items()))
    new, running = engines.call("sample_under_load", str(base), bucket, _PROMPTS)
    results = train([*export(0), _step_of(new)], **_trainer_arguments(bench, name, copy))
    saved = max(saved, max_difference(saved_weights(copy), _first_export(results)))
    versions = [{*completion.token_versions.tolist()} for completion in (*new, *running)]
    if versions[: len(new)] != [{1}] * len(new) or {0, 1} not in versions:
        return Chain(saved, math.inf)  # not the new weights, or nothing ran during the swap
    if np.concatenate([completion.logprobs for completion in new]).mean() > -1:
        return Chain(saved, math.inf)  # the engine is certain of its tokens, whatever its weights
    if max_difference(saved_weights(base), pushed) < 1e-3:
        return Chain(saved, math.inf)  # the step did not change the weights
    return Chain(saved, results[0][-1]["gap/max"])


def _first_export(results: list[list[Any]]) -> StateDict:
    return merged_export([rank_results[:2] for rank_results in results])


@rung(
    "LoRA: adapter pulled under load = merged weights",
    f"every sampled token's logprob in nats, float32, of {', '.join(a[0] for a in _ADAPTED)}"
    ": an engine that pulled a trained adapter while requests ran, a fresh engine with the "
    "merged checkpoint, and a trainer that loaded the checkpoint; Qwen3 with 2 trainer ranks",
    1e-4,
)
def adapter_is_merged_weights(bench: Bench) -> float:
    rng, worst = np.random.default_rng(0), 0.0
    options: dict[str, Any] = {"build_optimizer": partial(torch.optim.AdamW, lr=3e-2)}
    options |= {"loss": LogprobGap(), "ppo_epochs": 3}  # the first update leaves A, as B is 0
    with closing(bench.process(ENGINES)) as engines:
        for name, num_ranks, targets in _ADAPTED:
            base, copy = _random_policy(bench, name), bench.folder()
            lora = LoraSettings(rank=4, alpha=8.0, target_modules=targets, save_merged=True)
            arguments = _trainer_arguments(bench, name, base) | {"lora": lora} | options
            train = partial(bench.train, num_ranks=num_ranks, **arguments)
            save = [("hold_state", False), ("write_state", str(copy))]
            weights = merged_export(train([_first_step(rng), *save, *export(1)]))
            bucket = pack_bucket(list(weights.items()))
            sample = ("sample_under_load", str(base), bucket, _PROMPTS, 1, lora)
            pulled, running = engines.call(*sample)
            if {0, 1} not in ({*completion.token_versions.tolist()} for completion in running):
                return math.inf  # nothing ran while the adapter was swapped in
            fresh = engines.call("sample", str(copy), None, _PROMPTS)
            worst = max(worst, difference_of_completions(pulled, fresh))
            calls = [("load_state", str(copy)), _step_of(pulled, version=1)]
            worst = max(worst, train(calls, ppo_epochs=1)[0][-1]["gap/max"])
    return worst


@rung(
    "LoRA: generator logprobs = trainer logprobs",
    "every sampled token, in nats, float32; with a new adapter at temperature 1, and with one "
    "pulled after a step at temperature 0.7",
    1e-4,
)
def generator_is_adapted_trainer(bench: Bench) -> float:
    adapter = ("lora.rank=8", "lora.alpha=16.0")
    cfg = tiny_config(bench.scratch / "unused", *bench.policy, *adapter)
    return generator_to_trainer(bench, cfg)


def _random_policy(bench: Bench, name: str) -> Path:
    if name in FAMILIES:
        return random_checkpoint(FAMILIES[name], bench.folder(), seed=0)
    return save_random(HF_FAMILIES[name](), bench.folder(), seed=0)


def _trainer_arguments(bench: Bench, name: str, base: Path) -> dict[str, Any]:
    """Return the trainer arguments that replace the tiny policy by a family's model."""
    if name in HF_FAMILIES:
        own = (partial(hugging_face, path=str(base)), None, None)
    else:
        family = FAMILIES[name]
        checkpointer = checkpointer_of(base, bench.scratch / "unused", family.model_type)
        own = (family.build_model, checkpointer, family.model_type)
    names = ("build_model", "build_checkpointer", "model_type")
    return {**dict(zip(names, own, strict=True)), "base_model_path": str(base)}


def _first_step(rng: np.random.Generator) -> tuple[Any, ...]:
    nothing = np.zeros(9, np.float32)
    return _train_step([(ids, nothing) for ids in rng.integers(1, 256, (len(_PROMPTS), 9))])


def _step_of(sampled: list[Any], version: int = 0) -> tuple[Any, ...]:
    return _train_step([(each.token_ids, each.logprobs) for each in sampled], version)


def _train_step(
    responses: list[tuple[NDArray[np.int64], NDArray[np.float32]]], version: int = 0
) -> tuple[Any, ...]:
    """Return a `train_step` call with one response, its ids and generator logprobs, per prompt."""
    records = []
    for prompt, (ids, logprobs) in zip(_PROMPTS, responses, strict=True):
        sampled = {"generator_logprobs": logprobs, "finish_reason": "length"}
        versions = {"token_versions": np.full(len(ids), version, np.int32)}
        records.append(trajectory(ids, prompt_ids=np.array(prompt), **sampled, **versions))
    advantages = np.resize(np.array([1, -1], np.float32), len(records))
    return "train_step", pack(records), advantages, 0
