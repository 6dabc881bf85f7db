"""Rungs of the equivalence ladder for policies with adapters (LoRA)."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from equivalence.engine_rungs import difference_of_completions
from equivalence.families import FAMILIES, random_checkpoint, save_random
from equivalence.family_rungs import (
    PROMPTS,
    family_arguments,
    hf_arguments,
    train_step_of,
)
from equivalence.hf_families import HF_FAMILIES
from equivalence.roles import ENGINES, RoleProcess, merged_export, tiny_config
from equivalence.rungs import Bench, LogprobGap, generator_is_trainer
from grpo_components.exchange.weights import pack_bucket
from grpo_components.models.lora import TARGETS, LoraOptions

_RANK, _ALPHA = 4, 8.0
ADAPTED = (
    ("Qwen3", 2, TARGETS),
    ("LLAMA3_2", 1, TARGETS),
    ("PHI4", 1, ("o_proj", "down_proj")),
)
"""Family, trainer ranks and adapted layers: a policy of transformers on two ranks, rows in another
order, fused layers."""


def adapter_is_merged_weights(bench: Bench) -> float:
    """Compare an engine that pulled an adapter with one that loaded the merged weights.

    The engine pulls under load. The trainer that computes the logprobs has loaded the checkpoint.
    """
    rng, worst = np.random.default_rng(0), 0.0
    options: dict[str, Any] = {"build_optimizer": partial(torch.optim.AdamW, lr=3e-2)}
    options |= {"loss": LogprobGap(), "ppo_epochs": 3}  # the first update leaves A, as B is 0
    with closing(RoleProcess(ENGINES)) as engines:
        for name, num_ranks, targets in ADAPTED:
            base, copy = bench.folder(), bench.folder()
            if name in HF_FAMILIES:
                policy = hf_arguments(save_random(HF_FAMILIES[name](), base, seed=0))
            else:
                random_checkpoint(FAMILIES[name], base, seed=0)
                policy = family_arguments(bench, FAMILIES[name], base)
            lora = LoraOptions(rank=_RANK, alpha=_ALPHA, target_modules=targets, save_merged=True)
            arguments = policy | {"lora": lora} | options
            train = partial(bench.train, num_ranks=num_ranks, **arguments)
            step = train_step_of(
                [(ids, np.zeros(9, np.float32)) for ids in rng.integers(1, 256, (len(PROMPTS), 9))]
            )
            save = [("hold_state", False), ("write_state", str(copy))]
            calls = [step, *save, ("gather_weights",), ("export_weights", 1)]
            bucket = pack_bucket(list(merged_export(train(calls)).items()))
            sample = ("sample_under_load", str(base), bucket, PROMPTS, 1, lora)
            pulled, running = engines.call(*sample)
            if {0, 1} not in ({*completion.token_versions.tolist()} for completion in running):
                return math.inf  # nothing ran while the adapter was swapped in
            fresh = engines.call("sample", str(copy), None, PROMPTS)
            worst = max(worst, difference_of_completions(pulled, fresh))
            sampled = [(completion.token_ids, completion.logprobs) for completion in pulled]
            calls = [("load_state", str(copy)), train_step_of(sampled, version=1)]
            results: Any = train(calls, ppo_epochs=1)
            worst = max(worst, results[0][-1].metrics["gap/max"])
    return worst


def generator_is_adapted_trainer(bench: Bench) -> float:
    """Compare logprobs of generator and trainer, before and after an adapter was pulled."""
    adapter = ("lora.rank=8", "lora.alpha=16.0")
    return generator_is_trainer(
        bench, tiny_config(bench.scratch / "unused", *bench.policy, *adapter)
    )
