"""Trains the tiny policy and its tokenizer on word problems.

Reinforcement learning needs a policy that is sometimes right. So in the last part of the supervised
training, more than half of the answers are wrong. After it, greedy decoding is right nearly always,
and sampling at temperature 1 about two times in five.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

# Set before torch loads. Threads that spin as they wait make a build take twice as long on a busy
# machine; threads that never spin, a sixth longer on a quiet one. So they spin for microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.logging import disable_progress_bar

from grpo_components.examples.word_problems import Problem, make_problems

BATCH_SIZE = 64
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
CERTAIN_SHARE = 0.4  # share of the steps, the first ones, that train on right answers only
WRONG_SHARE = 0.55  # share of wrong answers in the other steps
END_OF_TEXT = "<|endoftext|>"
MAX_RESPONSE_TOKENS = 16  # a right answer takes at most 12, including end of text
SPECIAL_TOKENS = (  # all that torchtune's Qwen2.5 tokenizer requires, in Qwen2.5's order
    f"{END_OF_TEXT} <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>"
    " <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>"
    " <|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|>"
    " <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
# vLLM on CPU supports head dimensions of 32 and 64 (not 48). Up to hidden size 320, the logprobs of
# a request do not depend on the other requests in the batch.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
MOST_BUILDS = 3
_TRAINING, _SHOWN_STEPS = "warming up the tiny policy", 10


def _noisy_result(result: int, wrong_share: float, rng: random.Random) -> int:
    """Return the result or, with probability `wrong_share`, a number >= 0 that is off by 1 to 3."""
    if rng.random() >= wrong_share:
        return result
    return rng.choice([result + e for e in (-3, -2, -1, 1, 2, 3) if result + e >= 0])


def _make_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Train a small byte-level BPE tokenizer with Qwen2.5's pre-tokenization."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    bpe.train_from_iterator((p.prompt + p.answer(p.result) for p in problems), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, padding_side="left"
    )


def _warm_start(
    policy: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    seed: int,
    steps: int,
    console: Console,
) -> None:
    """Train the policy in place on worked answers, some of them wrong in the last steps."""
    rng = random.Random(seed)
    # Without instructions for bf16, a CPU takes up to 25 times as long in bf16 as in fp32.
    has_bf16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    # In bf16, the backward pass of fused attention would take 0.4 of the time: rows are short.
    policy.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.3, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (steps - step) / steps
    )
    for step in track(range(steps), _TRAINING, console=console):
        if not console.is_terminal and step % _SHOWN_STEPS == 0:  # it shows no bar
            console.print(f"{_TRAINING}: step {step} of {steps}")
        batch = rng.sample(problems, BATCH_SIZE)
        wrong_share = WRONG_SHARE if step >= CERTAIN_SHARE * steps else 0.0
        texts = [p.answer(_noisy_result(p.result, wrong_share, rng)) + END_OF_TEXT for p in batch]
        prompts = tokenizer([p.prompt for p in batch])["input_ids"]
        answers = tokenizer(texts)["input_ids"]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.zeros(BATCH_SIZE, width, dtype=torch.int64)
        is_answer = torch.zeros(BATCH_SIZE, width, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            length = len(prompt) + len(answer)
            ids[row, :length] = torch.tensor(prompt + answer)
            is_answer[row, len(prompt) : length] = True
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16):
            hidden = policy.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        # Logits in bf16 would leave one more greedy answer in twenty wrong.
        logits = policy.lm_head(hidden[is_answer[:, 1:]].float())
        cross_entropy(logits, ids[:, 1:][is_answer[:, 1:]]).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.inference_mode()
def success_rate(
    policy: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[Problem],
    samples: int,
) -> float:
    """Return the share of right answers at temperature 1; greedy answers if `samples` is 0."""
    prompts = tokenizer([p.prompt for p in problems], padding=True, return_tensors="pt")
    responses = policy.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=MAX_RESPONSE_TOKENS,
        do_sample=samples > 0,
        top_k=0 if samples else None,
        num_return_sequences=max(samples, 1),
    )[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    repeated = [p for p in problems for _ in range(max(samples, 1))]
    right = [t.endswith(f"#### {p.result}") for t, p in zip(texts, repeated, strict=True)]
    return sum(right) / len(right)


@torch.random.fork_rng(devices=[])
def build_into(
    folder: Path, seed: int, steps: int, least_greedy: float, console: Console
) -> dict[str, int | float]:
    """Train a policy, and write it, its tokenizer and its data to a new folder; return a record.

    If the success rate of greedy answers is below `least_greedy`, it trains again from other first
    weights, up to `MOST_BUILDS` times in all.
    """
    disable_progress_bar()
    started = time.perf_counter()
    train, held_out = make_problems(seed)
    tokenizer = _make_tokenizer(train)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    ends: dict[str, Any] = {"eos_token_id": end, "pad_token_id": end}
    tokenizer.save_pretrained(folder)  # now: `success_rate` switches padding on
    first_weights = seed
    while True:
        torch.manual_seed(first_weights)
        policy = Qwen2ForCausalLM(Qwen2Config(**ARCHITECTURE, **ends))
        policy.generation_config = GenerationConfig(**ends)
        _warm_start(policy, tokenizer, train, seed, steps, console)
        policy.eval()
        sampled, greedy = (success_rate(policy, tokenizer, held_out, n) for n in (4, 0))
        first_weights += 1
        if greedy >= least_greedy or first_weights == seed + MOST_BUILDS:
            break
        console.print(f"greedy success {greedy:.2f}: training again from other first weights")
    policy.save_pretrained(folder)
    tokenizer.backend_tokenizer.model.save(str(folder))  # vocab.json and merges.txt for torchtune
    (folder / "data").mkdir()
    for name, problems in (("train", train), ("held_out", held_out)):
        rows = [{"question": p.question, "answer": p.answer(p.result)} for p in problems]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{name}.jsonl").write_text(lines)
    return {
        "parameters": policy.num_parameters(),
        "train_problems": len(train),
        "held_out_problems": len(held_out),
        "held_out_success": sampled,
        "held_out_success_greedy": greedy,
        "seconds": round(time.perf_counter() - started, 1),
    }
