"""Measure how long the driver takes to read and tokenize a data set.

    python benchmarks/data.py [--rows 10000 100000 1000000]

Each row joins eight problems of the tiny policy's data set; the tiny policy's tokenizer encodes it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

from measuring import GIB, machine_line, markdown_table
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

from grpo_components.data.datasets import gsm8k_dataset
from grpo_components.examples.tiny_policy import DEFAULT_OUTPUT_DIR, build_tiny_policy


def write_rows(path: Path, problems: list[dict[str, str]], count: int) -> None:
    """Write a JSONL file of numbered rows, all of which differ."""
    several = zip(*(cycle(problems[number:]) for number in range(8)), strict=True)
    with path.open("w") as file:
        for number, parts in enumerate(islice(several, count)):
            question = " ".join(part["question"] for part in parts)
            row = {"question": f"{number}. {question}", "answer": parts[-1]["answer"]}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Print a table with a row for each size of the data set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    arguments = parser.parse_args()
    policy = DEFAULT_OUTPUT_DIR
    build_tiny_policy(policy)
    names = ("vocab.json", "merges.txt", "tokenizer.json")
    vocab, merges, special = (str(policy / name) for name in names)
    tokenizer = qwen2_5_tokenizer(vocab, merges, special)
    lines = (policy / "data" / "train.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines]
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in arguments.rows:
            write_rows(path := Path(folder, "rows.jsonl"), problems, count)
            began, cpu = time.perf_counter(), sum(os.times()[:4])
            data = gsm8k_dataset(tokenizer, source=str(path))
            seconds, cpu = time.perf_counter() - began, sum(os.times()[:4]) - cpu
            tokens = sum(len(data[number]["prompt_ids"]) for number in range(1_000)) / 1_000
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            row = [f"{count:,}", f"{tokens:.0f}", f"{seconds:.1f}", f"{cpu:.1f}", f"{peak:.2f}"]
            table.append(row)
    head = ["rows", "tokens each", "seconds", "CPU seconds", "peak GiB of the driver"]
    sys.stdout.write(f"{machine_line()}\n\n{markdown_table(head, table)}\n")


if __name__ == "__main__":
    main()
