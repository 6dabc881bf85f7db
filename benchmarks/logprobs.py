"""Measure how `logprob_chunk_tokens` trades time for memory, compared with full logits [B, T, V].

    python benchmarks/logprobs.py [--quick]

One forward and backward pass of a decoder with one narrow layer, so that the projection to the
vocabulary and the following operations dominate. The baseline computes float32 logits of all
positions, their log-softmax, and gathers; unlike ours, it computes no entropies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from torch import Tensor
from torch.nn.functional import log_softmax
from torchtune.models.qwen2 import qwen2

from grpo_components.models.logprobs import ResponseLogprobs, TokenBatch, token_batch
from grpo_components.models.shared_prompts import share_prompts
from grpo_components.trajectory import Trajectory

VOCABULARIES = (4096, 32768, 151936)
CHUNKS = (16, 64, 256, 1024)
WHOLE = "full logits"


@dataclass(frozen=True)
class Setting:
    """Sizes of the micro-batch of equally long sequences, and of the model."""

    vocabulary: int = VOCABULARIES[0]
    sequences: int = 6
    prompt_tokens: int = 64
    response_tokens: int = 256
    width: int = 128
    device: str = "cpu"

    @property
    def num_positions(self) -> int:
        """Number of response tokens, whose logprobs are computed."""
        return self.sequences * self.response_tokens

    @property
    def cases(self) -> dict[str, int | None]:
        """Name of a case -> positions per chunk; None is the baseline."""
        smaller = {str(chunk): chunk for chunk in CHUNKS if chunk < self.num_positions}
        return {WHOLE: None, **smaller, f"all ({self.num_positions})": self.num_positions}


def random_batch(setting: Setting) -> TokenBatch:
    """A batch of random tokens."""
    rng = np.random.default_rng(0)
    size = setting.response_tokens
    trajectories = [
        Trajectory(
            prompt_ids=rng.integers(0, setting.vocabulary, setting.prompt_tokens),
            response_ids=rng.integers(0, setting.vocabulary, size),
            response_mask=np.ones(size, bool),
            generator_logprobs=np.zeros(size, np.float32),
            token_versions=np.zeros(size, np.int32),
            prompt_index=number,
            epoch=0,
            group_id=number,
            attempt=0,
            finish_reason="length",
        )
        for number in range(setting.sequences)
    ]
    return token_batch(trajectories, device=torch.device(setting.device))


def build_pass(setting: Setting, chunk: int | None) -> Callable[[TokenBatch], tuple[float, float]]:
    """Build a model (always with the same weights) and a forward and backward pass of it."""
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = qwen2(
            vocab_size=setting.vocabulary,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=setting.width,
            intermediate_dim=setting.width,
            max_seq_len=setting.prompt_tokens + setting.response_tokens,
            tie_word_embeddings=True,
        )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    share_prompts(model)
    ours = None if chunk is None else ResponseLogprobs(model, chunk_tokens=chunk)

    def logprobs(batch: TokenBatch) -> Tensor:
        if ours is not None:
            return ours(batch)[0]
        logits = model(batch.tokens, mask=batch.layout, input_pos=batch.input_pos)
        everywhere = log_softmax(logits, dim=-1).flatten(0, 1)
        return everywhere[batch.positions, batch.targets]

    def run(batch: TokenBatch) -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        total = logprobs(batch).sum()
        total.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return total.item(), float(torch.nn.utils.get_total_norm(gradients))

    return run


def time_all(setting: Setting, repeats: int) -> dict[str, Timing]:
    """Seconds of every case; call it in a fresh process."""
    batch = random_batch(setting)
    passes = {name: build_pass(setting, chunk) for name, chunk in setting.cases.items()}
    cases = {name: partial(run, batch) for name, run in passes.items()}
    return interleaved(cases, repeats, setting.device)


def peak_of(setting: Setting, chunk: int | None) -> float:
    """Peak memory in GiB of one pass, including gradients; call it in a fresh process."""
    run = build_pass(setting, chunk)
    run(random_batch(replace(setting, sequences=1, prompt_tokens=4, response_tokens=4)))
    batch = random_batch(setting)
    return peak_memory_gib(lambda: run(batch), setting.device)


def table(setting: Setting, vocabularies: Sequence[int], repeats: int) -> str:
    """Table of every case at every vocabulary, relative to full logits."""
    rows = []
    for vocabulary in vocabularies:
        case = replace(setting, vocabulary=vocabulary)
        timings = in_child(time_all, case, repeats)
        peaks = {name: in_lean_child(peak_of, case, chunk) for name, chunk in case.cases.items()}
        for name, timing in timings.items():
            rows.append(
                [
                    vocabulary,
                    name,
                    timing,
                    timings[WHOLE].median / timing.median,
                    peaks[name],
                    peaks[WHOLE] / peaks[name],
                ]
            )
    header = ["vocabulary", "chunk", "seconds", "time ratio", "peak, GiB", "memory ratio"]
    return markdown_table(header, rows)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; fill in `vocabulary` and `repeats`."""
    default = Setting()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smallest vocabulary, one repeat")
    parser.add_argument("--vocabulary", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, help="timed passes of each case (default 3)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default.device)
    for name in ("sequences", "prompt-tokens", "response-tokens", "width"):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda given, but torch finds no GPU; allowed: cpu")
    if min(parsed.sequences, parsed.prompt_tokens, parsed.response_tokens) < 1:
        parser.error("--sequences, --prompt-tokens, --response-tokens: allowed: at least 1")
    if parsed.width < 8 or parsed.width % 8:
        parser.error(
            f"--width: {parsed.width} given; allowed: a multiple of 8 (four heads of even size)"
        )
    if parsed.vocabulary is None:
        parsed.vocabulary = list(VOCABULARIES[:1] if parsed.quick else VOCABULARIES)
    if parsed.repeats is None:
        parsed.repeats = 1 if parsed.quick else 3
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Print machine, batch and table."""
    parsed = parse_arguments(arguments)
    fields = Setting.__dataclass_fields__.keys() - {"vocabulary"}
    setting = Setting(**{name: getattr(parsed, name) for name in fields})
    each = setting.prompt_tokens + setting.response_tokens
    sys.stdout.write(
        f"{machine_line(setting.device)}\n\n"
        f"{setting.sequences} sequences of {each} tokens, {setting.num_positions} logprobs; "
        f"width {setting.width}, float32.\n\n"
    )
    sys.stdout.flush()  # the table takes minutes
    sys.stdout.write(f"{table(setting, parsed.vocabulary, parsed.repeats)}\n")


if __name__ == "__main__":
    main()
