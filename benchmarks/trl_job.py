"""Train one job of `beside_trl.py` with TRL's GRPOTrainer; runs in TRL's environment.

    python benchmarks/trl_job.py JOB.json STEPS.jsonl

Writes one JSON line per step, with the names of our metrics.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for our rewards
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def reward_of(node: dict[str, Any]) -> Any:
    """Turn one of our rewards, given as in a config, into a reward function of TRL's."""
    module, _, name = node["_component_"].rpartition(".")
    options = {key: value for key, value in node.items() if key != "_component_"}
    score = getattr(importlib.import_module(module), name)(**options)

    def rewards(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        known = {"prompt_text": "", "finish_reason": "stop"}
        pairs = zip(completions, answer, strict=True)
        return [score(response_text=text, answer=right, **known) for text, right in pairs]

    return rewards


def rows_of(file: Path, template: str) -> list[dict[str, str]]:
    """Read prompts and answers, which are in GSM8K's form."""
    rows = map(json.loads, file.read_text().splitlines())
    return [
        {
            "prompt": template.replace("{question}", row["question"]),
            "answer": row["answer"].rpartition("####")[2].strip(),
        }
        for row in rows
    ]


class HeldOut(TrainerCallback):
    """Writes the mean reward of one response to each held-out prompt, every `evaluated` steps."""

    def __init__(self, job: dict[str, Any], tokenizer: Any, file: Path) -> None:
        self._rows = rows_of(Path(job["base"], "data/held_out.jsonl"), job["template"])
        self._reward, self._tokenizer, self._job = reward_of(job["reward"]), tokenizer, job
        self._file = file.open("a")

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Evaluate, if it is time."""
        if state.global_step % self._job["evaluated"]:
            return
        prompts = self._tokenizer(
            [row["prompt"] for row in self._rows],
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        length = prompts["input_ids"].shape[1]
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        was_training, _ = model.training, model.eval()
        responses = model.generate(**prompts, **sampled, max_new_tokens=self._job["response"])
        model.train(was_training)
        texts = self._tokenizer.batch_decode(responses[:, length:], skip_special_tokens=True)
        rewards = self._reward(texts, [row["answer"] for row in self._rows])
        line = {"step": state.global_step, "eval/success_rate": sum(rewards) / len(rewards)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class Log(TrainerCallback):
    """Writes a line when TRL logs a step."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write the step."""
        if logs and "reward" in logs:
            line = {
                "time/wall_clock": time.perf_counter(),
                "rollout/response_tokens_mean": logs["completions/mean_length"],
                "rollout/reward_mean": logs["reward"],
            }
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def main() -> None:
    """Train and write the lines."""
    job, output = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    base = Path(job["base"])
    arguments = GRPOConfig(
        output_dir=str(output.with_suffix("")),
        per_device_train_batch_size=job["groups"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["response"],
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    evaluations = [HeldOut(job, tokenizer, output)] if job["evaluated"] else []
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        reward_funcs=reward_of(job["reward"]),
        args=arguments,
        train_dataset=Dataset.from_list(rows_of(base / "data/train.jsonl", job["template"])),
        processing_class=tokenizer,
        callbacks=[Log(output), *evaluations],
    )
    trainer.train()


if __name__ == "__main__":
    main()
