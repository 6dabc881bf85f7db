"""Rungs that compare shared prompts with one row per response, for every model family."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lib.logprobs import whole_logprobs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from equivalence.families import FAMILIES, HF_FAMILIES, save_random
from equivalence.ladder import Bench, gradients, max_difference, random_record, rung
from grpo_components.models.loading import load_hugging_face
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.trajectory import Trajectory


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context manager, or decorator: small models are slower with two threads on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@rung(
    "shared prompts = one row per response",
    f"logprobs, loss and gradient, relative to the largest, of {', '.join(FAMILIES)}: groups of 1, "
    "2 and 5, masked tokens, two temperatures; against torchtune's decoder one by one",
    1e-5,
)
@_one_thread()
def shared_prompts_are_one_row_per_response(bench: Bench) -> float:
    worst = 0.0
    for family in FAMILIES.values():
        torch.manual_seed(0)
        model, plain = family.build_model(), family.build_model()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        plain.load_state_dict(model.state_dict())
        worst = max(worst, _difference(model, plain))
    return worst


@rung(
    "shared prompts = one row per response, policies of transformers",
    f"as the rung before, of {', '.join(HF_FAMILIES)}; against transformers' eager attention; "
    "sliding windows of 8 tokens, capped scores, attention sinks, experts",
    1e-5,
)
@_one_thread()
def shared_prompts_are_rows_of_transformers(bench: Bench) -> float:
    worst = 0.0
    for config in HF_FAMILIES.values():
        folder = save_random(config(), bench.folder(), seed=0)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        worst = max(worst, _difference(load_hugging_face(folder), plain.eval()))
    return worst


def _difference(model: nn.Module, plain: nn.Module) -> float:
    records = _grouped_batch()
    masks = [record.response_mask for record in records]
    logprobs = ResponseLogprobs(model, chunk_tokens=50)(token_batch(records, masks))[0]
    expected = torch.cat([whole_logprobs(plain, r, r.response_mask)[0] for r in records])
    weights = torch.linspace(-1.0, 1.5, len(expected))
    losses, expected_losses = logprobs * weights, expected * weights
    found = gradients(model, losses.mean())
    wanted = gradients(plain, expected_losses.mean())
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    return max(
        _relative(logprobs, expected, expected.abs().max()),
        _relative(losses.mean(), expected_losses.mean(), expected_losses.abs().mean()),
        max_difference(wanted, found) / largest,
    )


def _relative(value: Tensor, expected: Tensor, size: Tensor) -> float:
    return float(((value - expected).abs().max() / size).detach())


def _grouped_batch() -> list[Trajectory]:
    """Return random groups of one, two and five responses, two of which have no trained token."""
    rng = np.random.default_rng(0)
    records: list[Trajectory] = []
    for prompt_tokens, sizes in ((40, (9,)), (90, (60, 1)), (12, (30, 2, 0, 17, 8))):
        prompt = rng.integers(0, 256, prompt_tokens)
        for size in sizes:
            own = {"group_id": prompt_tokens, "temperature": (1.0, 0.7)[len(records) % 2]}
            record = random_record(rng, (0, 256), prompt, size, **own)
            record.response_mask &= size != 8  # 8: a failed sample
            records.append(record)
    return records
