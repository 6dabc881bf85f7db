"""Measure a training pass of the same policy as a torchtune decoder and as a transformers model.

python benchmarks/policy_kinds.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from measuring import machine_line, markdown_table
from shared_prompts import SHAPES, Setting, build_model, plan_of, random_groups
from torch import nn
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from transformers import AutoConfig

from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.trajectory import TokenSequence

HEADER = ["prompt / response", "torchtune, CPU s", "transformers, CPU s", "ratio", "disagreement"]
SIZES = {
    **{"vocab_size": 384, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
}


def both_kinds() -> dict[str, nn.Module]:
    """Build the demo's policy twice, with the same random weights."""
    decoder = build_model("cpu")
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen2", **SIZES).save_pretrained(folder)
        model = hugging_face(folder)
    convert = partial(
        qwen2_tune_to_hf, num_heads=8, num_kv_heads=2, dim=256, tie_word_embeddings=True
    )
    model.load_state_dict(convert(decoder.state_dict()))
    return {"torchtune": decoder, "transformers": model}


def step_of(model: nn.Module, setting: Setting) -> Callable[[], float]:
    """Return a forward and backward pass over the groups of a setting, which gives the loss."""
    logprobs = ResponseLogprobs(model, chunk_tokens=1024)
    sequences: list[TokenSequence] = random_groups(setting)
    weights = np.random.default_rng(1).normal(size=len(sequences))

    def step() -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for indices in plan_of("shared", setting, sequences):
            members = [sequences[i] for i in indices]
            each = np.repeat(weights[indices], [len(s.response_ids) for s in members])
            loss = -(logprobs(token_batch(members))[0] * torch.from_numpy(each).float()).sum()
            loss.backward()
            total += loss.item()
        return total

    return step


def measure(setting: Setting, repeats: int) -> list[object]:
    """Time both kinds in alternation, in CPU seconds, and return a row of the table."""
    steps = {name: step_of(model, setting) for name, model in both_kinds().items()}
    losses = [step() for step in steps.values()]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            began = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - began)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return [
        f"{setting.prompt} / {setting.response}",
        *(statistics.median(values) for values in seconds.values()),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
        f"{abs(losses[1] / losses[0] - 1):.0e}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every shape and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES[:3], help="tokens prompt/response")
    parser.add_argument("--groups", type=int, default=8, help="of 8 responses each")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each kind")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for shape in parsed.shapes:
        prompt, response = map(int, shape.split("/"))
        rows.append(measure(Setting(prompt, response, parsed.groups), parsed.repeats))
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(HEADER, rows)}\n")


if __name__ == "__main__":
    main()
