"""Train the demo's job with TRL's GRPOTrainer; `beside_trl.py` runs this in TRL's environment.

    python benchmarks/trl_job.py BASE_MODEL OUTPUT.jsonl --steps N --evaluate-every N --seed N

Writes one JSON line per step: `step`, `seconds` (of training, since the first step began) and
`success` (of the step's samples); and one per evaluation: `step`, `seconds`, `held_out`. Each line
has the time of the day, `clock`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from grpo_components.rewards.maths import MathCorrectness

PROMPT = "Question: {question}\nAnswer:\n"
GROUP_SIZE, GROUPS, MAX_TOKENS = 8, 8, 16
SAMPLING = {"max_new_tokens": MAX_TOKENS, "do_sample": True, "temperature": 1.0, "top_k": 0}
_CORRECT = MathCorrectness(answer_format="gsm8k")


def correctness(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Score completions with our reward for mathematics."""
    return [score(text, known) for text, known in zip(completions, answer, strict=True)]


def score(text: str, answer: str) -> float:
    """Return 1.0 if the text gives the known answer."""
    final = answer.rpartition("####")[2].strip()
    return _CORRECT(prompt_text="", response_text=text, answer=final, finish_reason="stop")


def rows_of(file: Path) -> list[dict[str, str]]:
    """Read prompts and answers of the demo's data."""
    rows = map(json.loads, file.read_text().splitlines())
    return [{"prompt": PROMPT.format_map(row), "answer": row["answer"]} for row in rows]


class Log(TrainerCallback):
    """Writes the lines; evaluations, sampled as ours are, do not count as seconds of training."""

    def __init__(self, file: Path, tokenizer: Any, held_out: list[dict[str, str]], every: int):
        self._file = file.open("w")
        self._tokenizer, self._held_out, self._every = tokenizer, held_out, every
        self._began, self._evaluating = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate, then start the clock."""
        self._evaluate(0, kwargs["model"])
        self._began, self._evaluating = time.perf_counter(), 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write the step that TRL logs."""
        if logs and "reward" in logs:
            self._write(step=state.global_step, success=float(logs["reward"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate when it is due."""
        if state.global_step % self._every == 0:
            self._evaluate(state.global_step, kwargs["model"])

    def _evaluate(self, step: int, model: Any) -> None:
        began, right = time.perf_counter(), 0.0
        self._tokenizer.padding_side = "left"
        prompts = [row["prompt"] for row in self._held_out]
        given = self._tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            ids = model.generate(**given, **SAMPLING)
        texts = self._tokenizer.batch_decode(ids[:, given["input_ids"].shape[1] :], True)
        for text, row in zip(texts, self._held_out, strict=True):
            right += score(text, row["answer"])
        self._evaluating += time.perf_counter() - began
        self._write(step=step, held_out=right / len(texts))

    def _write(self, **values: Any) -> None:
        seconds = time.perf_counter() - self._began - self._evaluating if self._began else 0.0
        self._file.write(json.dumps({"clock": time.time(), "seconds": seconds, **values}) + "\n")
        self._file.flush()


def main() -> None:
    """Train and write the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base_model", type=Path)
    parser.add_argument("output", type=Path)
    for name in ("steps", "evaluate-every", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.base_model)
    model = AutoModelForCausalLM.from_pretrained(given.base_model, dtype=torch.float32)
    held_out = rows_of(given.base_model / "data/held_out.jsonl")
    arguments = GRPOConfig(
        output_dir=str(given.output.with_suffix("")),
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        max_steps=given.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=given.seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correctness,
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(given.base_model / "data/train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Log(given.output, tokenizer, held_out, given.evaluate_every)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
