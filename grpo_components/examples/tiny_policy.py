"""Builds a tiny Qwen2.5-shaped policy and its word problems for the CPU demo and the tests.

Reinforcement learning needs a policy that is sometimes right. So in the last part of the supervised
training, more than half of the answers are wrong. After it, greedy decoding is right nearly always,
and sampling at temperature 1 about two times in five.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Set before torch loads: spinning while waiting makes training 4x slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

FORMAT_VERSION = 2  # increase it when the same seed and steps give a different model or data
DEFAULT_OUTPUT_DIR = Path("/tmp/torchtune-async-grpo/tiny_policy")
DEFAULT_STEPS = 400
RECORD_FILE = "tiny_policy.json"
PROMPT_TEMPLATE = "Question: {question}\nAnswer:\n"
MAX_RESPONSE_TOKENS = 16  # a right answer takes at most 12, including end of text
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
CERTAIN_SHARE = 0.6  # share of the steps, the first ones, that train on right answers only
WRONG_SHARE = 0.55  # share of wrong answers in the other steps
END_OF_TEXT = "<|endoftext|>"
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
NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
THINGS = ("apples", "pens", "cups", "books", "coins", "cards", "eggs", "balls")
TEMPLATES = (  # text and sign; a and b are digits, the result is never negative
    ("{name} has {a} {things} and gets {b} more. How many now?", "+"),
    ("{name} has {a} {things} and {other} has {b}. How many in all?", "+"),
    ("{name} sees {a} {things}, then {b} more. How many in all?", "+"),
    ("{name} buys {a} {things} and finds {b}. How many now?", "+"),
    ("{name} has {a} {things} and gives away {b}. How many are left?", "-"),
    ("{name} had {a} {things} and lost {b}. How many are left?", "-"),
    ("{name} has {a} {things} and {other} has {b}. How many more?", "-"),
    ("{name} buys {a} {things} and sells {b}. How many are left?", "-"),
)

console = Console(stderr=True)


class Problem(NamedTuple):
    """A word problem with the parts of its worked answer."""

    question: str
    sum: str
    """The calculation, e.g. `3+4`."""
    result: int

    def answer(self, result: int) -> str:
        """Return the worked answer in GSM8K's form, ending in `#### result`."""
        return f"{self.sum}={result}\n#### {result}"

    @property
    def prompt(self) -> str:
        """The question as a prompt for the policy."""
        return PROMPT_TEMPLATE.replace("{question}", self.question)


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Make training and held-out problems; a template with the same numbers is never in both."""
    rng = random.Random(seed)
    digits = range(10)
    keys = [(*t, a, b) for t in TEMPLATES for a in digits for b in digits if t[1] == "+" or a >= b]
    rng.shuffle(keys)

    def write(keys: list[tuple[str, str, int, int]], times: int) -> list[Problem]:
        problems = {}
        for text, sign, a, b in keys * times:
            name, other = rng.sample(NAMES, 2)
            question = text.format(name=name, other=other, a=a, b=b, things=rng.choice(THINGS))
            result = a + b if sign == "+" else a - b
            problems[question] = Problem(question, f"{a}{sign}{b}", result)
        return list(problems.values())

    held_out = len(keys) // 6
    return write(keys[held_out:], 4), write(keys[:held_out], 2)


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
) -> None:
    """Train the policy in place on worked answers, some of them wrong in the last steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.3, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (steps - step) / steps
    )
    for step in track(range(steps), "warming up the tiny policy", console=console):
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
        hidden = policy.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = policy.lm_head(hidden[is_answer[:, 1:]])
        cross_entropy(logits, ids[:, 1:][is_answer[:, 1:]]).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.inference_mode()
def _success_rate(
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


def build_tiny_policy(
    output_dir: Path, *, seed: int = 0, steps: int = DEFAULT_STEPS, force: bool = False
) -> dict[str, int | float]:
    """Build the policy, its tokenizer and its data in a folder, unless the same build is there.

    Returns:
        The record of the build, which is also written to `tiny_policy.json`.

    Raises:
        ValueError: the folder contains something else, or `steps` is below 1.
    """
    if steps < 1:
        raise ValueError(f"--steps: {steps} given; allowed: at least 1")
    output_dir = output_dir.absolute()
    record_path = output_dir / RECORD_FILE
    identity = {"format_version": FORMAT_VERSION, "seed": seed, "steps": steps}
    if record_path.is_file():
        record = json.loads(record_path.read_text())
        if not force and identity.items() <= record.items():
            console.print(f"tiny policy is already in {output_dir}", soft_wrap=True)
            return record
    elif output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise ValueError(
            f"--output-dir: {output_dir} has other files; allowed: a new or empty folder"
        )
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    # Build in a temporary folder and rename it, so that `output_dir` is always complete.
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=".tiny_policy-") as scratch:
        new = Path(scratch) / "new"
        with torch.random.fork_rng(devices=[]):
            record = identity | _build_into(new, seed=seed, steps=steps)
        (new / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
        if output_dir.exists():
            output_dir.rename(Path(scratch) / "replaced")
        new.rename(output_dir)
    console.print(
        f"tiny policy in {output_dir}: held-out success {record['held_out_success']:.2f} at"
        f" temperature 1, {record['held_out_success_greedy']:.2f} greedy; {record['seconds']} s",
        soft_wrap=True,
    )
    return record


def _build_into(folder: Path, *, seed: int, steps: int) -> dict[str, int | float]:
    from transformers import Qwen2ForCausalLM  # it takes seconds

    started = time.perf_counter()
    torch.manual_seed(seed)
    train, held_out = make_problems(seed)
    tokenizer = _make_tokenizer(train)
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    ends: dict[str, Any] = {"eos_token_id": end, "pad_token_id": end}
    policy = Qwen2ForCausalLM(Qwen2Config(**ARCHITECTURE, **ends))
    policy.generation_config = GenerationConfig(**ends)
    _warm_start(policy, tokenizer, train, seed, steps)
    policy.eval()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
        "held_out_success": _success_rate(policy, tokenizer, held_out, 4),
        "held_out_success_greedy": _success_rate(policy, tokenizer, held_out, 0),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Build the tiny policy; returns 0, or 2 for a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_components.examples.tiny_policy",
        description="Build the tiny policy and its word problems for CPU demos and tests.",
    )
    parser.add_argument("--output-dir", type=Path, default=DEFAULT_OUTPUT_DIR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help="supervised training steps"
    )
    parser.add_argument(
        "--force", action="store_true", help="build even if the same build is there"
    )
    options = parser.parse_args(arguments)
    disable_progress_bar()
    try:
        build_tiny_policy(
            options.output_dir, seed=options.seed, steps=options.steps, force=options.force
        )
    except ValueError as error:
        console.print(str(error), soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
