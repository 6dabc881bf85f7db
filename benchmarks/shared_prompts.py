"""Measure a training pass that computes each prompt once against one padded row per response.

python benchmarks/shared_prompts.py
python benchmarks/shared_prompts.py --shapes 40/11 --groups 4 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from measuring import (
    Timing,
    in_child,
    in_lean_child,
    interleaved,
    machine_line,
    markdown_table,
    peak_memory_gib,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torchtune.models.qwen2 import qwen2

from grpo_components.models.flops import ModelFlops
from grpo_components.models.logprobs import ResponseLogprobs, parts_of, token_batch
from grpo_components.models.micro_batches import padded_micro_batches, plan_micro_batches
from grpo_components.trajectory import TokenSequence

SHAPES = ("40/11", "200/100", "300/40", "40/300")
HEADER = ["prompt / response", "padded, tokens", "shared, tokens", "padded, s", "shared, s"]
HEADER += ["time ratio", "padded, GiB", "shared, GiB", "memory ratio", "disagreement"]


@dataclass(frozen=True)
class Setting:
    """Lengths of the groups, and the token budget of a forward pass."""

    prompt: int
    """Mean tokens of a prompt; the lengths are uniform within 20 % of it."""
    response: int
    """Mean tokens of a response; the lengths are uniform within 50 % of it."""
    groups: int = 8
    group_size: int = 8
    tokens_per_micro_batch: int = 4096
    device: str = "cpu"


def build_model(device: str) -> nn.Module:
    """Build a decoder as large as the demo's, always with the same weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = qwen2(
            vocab_size=384,
            num_layers=2,
            num_heads=8,
            num_kv_heads=2,
            embed_dim=256,
            intermediate_dim=1024,
            max_seq_len=8192,
            tie_word_embeddings=True,
        )
    for parameter in model.parameters():
        if parameter.dim() > 1 and device != "meta":
            nn.init.normal_(parameter, std=0.02)
    return model


def random_groups(setting: Setting) -> list[TokenSequence]:
    """Responses of random tokens, group by group."""
    rng = np.random.default_rng(0)

    def tokens(mean: int, spread: float) -> np.ndarray:
        low, high = round(mean * (1 - spread)), round(mean * (1 + spread))
        return rng.integers(0, 384, rng.integers(max(low, 1), high, endpoint=True))

    prompts = [tokens(setting.prompt, 0.2) for _ in range(setting.groups)]
    return [
        TokenSequence(prompt, tokens(setting.response, 0.5), 1.0)
        for prompt in prompts
        for _ in range(setting.group_size)
    ]


Pass = Callable[[Sequence[TokenSequence]], Tensor]
"""Returns the logprobs [M] of all response tokens of a micro-batch, with a gradient."""


def shared_pass(model: nn.Module, device: str) -> Pass:
    """The project's forward pass."""
    logprobs = ResponseLogprobs(model, chunk_tokens=1024)
    return lambda sequences: logprobs(token_batch(sequences, device=torch.device(device)))[0]


def padded_pass(model: Any, device: str) -> Pass:
    """One row per response, padded on the right, through torchtune's own attention.

    The projection to the vocabulary is recomputed in the backward pass, like the project's.
    """
    model.unembed = lambda hidden: model.norm(hidden)

    def project(hidden: Tensor, targets: Tensor) -> Tensor:
        logprobs = torch.log_softmax(model.output(hidden).float(), dim=-1)
        return logprobs.gather(1, targets[:, None]).squeeze(1)

    def run(sequences: Sequence[TokenSequence]) -> Tensor:
        rows = [torch.from_numpy(np.concatenate(s[:2])) for s in sequences]
        tokens = pad_sequence(rows, batch_first=True)
        positions = [
            row * tokens.shape[1] + len(s.prompt_ids) - 1 + torch.arange(len(s.response_ids))
            for row, s in enumerate(sequences)
        ]
        targets = torch.cat([torch.from_numpy(s.response_ids) for s in sequences]).to(device)
        hidden = model(tokens.to(device)).flatten(0, 1)[torch.cat(positions).to(device)]
        return cast(Tensor, checkpoint(project, hidden, targets, use_reentrant=False))

    return run


PASSES = {"padded": padded_pass, "shared": shared_pass}


def plan_of(case: str, setting: Setting, sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Micro-batches of a case under the token budget."""
    budget = setting.tokens_per_micro_batch
    if case == "padded":
        return padded_micro_batches([sum(map(len, s[:2])) for s in sequences], budget)
    with torch.device("meta"):
        flops = ModelFlops.of(build_model("meta"))
    return plan_micro_batches(parts_of(sequences), flops.layers, 1, budget)[0]


def tokens_of(case: str, setting: Setting) -> int:
    """Tokens that a case computes, padding included."""
    sequences = random_groups(setting)
    batches = [[sequences[i] for i in b] for b in plan_of(case, setting, sequences)]
    if case == "shared":
        return sum(len(token_batch(batch).tokens) for batch in batches)
    return sum(len(batch) * max(sum(map(len, s[:2])) for s in batch) for batch in batches)


def build_step(case: str, setting: Setting) -> Callable[[], tuple[float, list[Tensor]]]:
    """Build a step: plan, forward and backward of all micro-batches."""
    model = build_model(setting.device)
    run, sequences = PASSES[case](model, setting.device), random_groups(setting)
    weights = np.random.default_rng(1).normal(size=len(sequences))  # advantages

    def step() -> tuple[float, list[Tensor]]:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for indices in plan_of(case, setting, sequences):
            members = [sequences[i] for i in indices]
            sizes = [len(s.response_ids) for s in members]
            each = torch.from_numpy(np.repeat(weights[indices], sizes)).float()
            loss = -(run(members) * each.to(setting.device)).sum()
            loss.backward()
            total += loss.item()
        return total, [p.grad for p in model.parameters() if p.grad is not None]

    return step


def disagreement(setting: Setting) -> float:
    """The largest difference of two gradients, relative to the largest gradient."""
    (_, padded), (_, shared) = (build_step(case, setting)() for case in PASSES)
    largest = max(float(gradient.abs().max()) for gradient in padded)
    gaps = [float((a - b).abs().max()) for a, b in zip(padded, shared, strict=True)]
    return max(gaps) / largest


def measure(setting: Setting, repeats: int) -> tuple[dict[str, Timing], float]:
    """Time both cases in alternation; call it in a fresh process."""
    cases = {case: build_step(case, setting) for case in PASSES}
    return interleaved(cases, repeats, setting.device), disagreement(setting)


def peak_of(case: str, setting: Setting) -> float:
    """Peak memory of a step in GiB, above weights and gradients; call it in a fresh process."""
    build_step(case, replace(setting, prompt=8, response=2, groups=1))()
    step = build_step(case, setting)
    return peak_memory_gib(step, setting.device)


def row(setting: Setting, repeats: int) -> list[object]:
    """One row of the table."""
    timings, gap = in_child(measure, setting, repeats)
    padded, shared = timings["padded"], timings["shared"]
    peaks = {case: in_lean_child(peak_of, case, setting) for case in PASSES}
    ratios = [a / b for a, b in zip(padded.seconds, shared.seconds, strict=True)]
    return [
        f"{setting.prompt} / {setting.response}",
        *(tokens_of(case, setting) for case in PASSES),
        padded,
        shared,
        statistics.median(ratios),
        peaks["padded"],
        peaks["shared"],
        peaks["padded"] / peaks["shared"],
        f"{gap:.0e}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every shape and print the table."""
    default = Setting(0, 0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="tokens of prompt/response")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each case")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default.device)
    for name in ("groups", "group-size", "tokens-per-micro-batch"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parsed = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(parsed.threads)  # of the child processes
    torch.set_num_threads(parsed.threads)
    rows: list[list[object]] = []
    for shape in parsed.shapes:
        prompt, _, response = shape.partition("/")
        if not (prompt.isdigit() and response.isdigit() and int(prompt) * int(response)):
            parser.error(f"--shapes: {shape} given; allowed: two numbers such as 40/11")
        setting = Setting(
            int(prompt),
            int(response),
            parsed.groups,
            parsed.group_size,
            parsed.tokens_per_micro_batch,
            parsed.device,
        )
        rows.append(row(setting, parsed.repeats))
    table = markdown_table(HEADER, rows)
    sys.stdout.write(f"{machine_line(parsed.device)}\n\n{table}\n")


if __name__ == "__main__":
    main()
