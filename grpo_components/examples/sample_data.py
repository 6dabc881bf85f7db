"""Writes a small generated data set for each data set builder, to try it without a download."""

from __future__ import annotations

import argparse
import csv
import json
import operator
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

NAMES, THINGS = ("Tom", "Ann", "Sam", "Mia"), ("apples", "pens", "cups", "books")
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi"}
CAPITALS |= {"Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo", "Cuba": "Havana"}
Rows = list[dict[str, Any]]


def math_rows(rng: random.Random, count: int) -> Rows:
    """Generate problems with boxed answers: sums (level 1) and fractions to reduce (level 2)."""
    rows: Rows = []
    for number in range(count):
        if number % 2 == 0:
            a, b = rng.randrange(10), rng.randrange(10)
            name, things = rng.choice(NAMES), rng.choice(THINGS)
            problem = f"{name} has {a} {things} and gets {b} more. How many now?"
            rows.append({"problem": problem, "solution": f"{a}+{b}=\\boxed{{{a + b}}}", "level": 1})
        else:
            below, factor = rng.randrange(2, 10), rng.randrange(2, 10)
            problem = f"Write {factor}/{below * factor} in lowest terms."
            solution = f"Divide both by {factor}: \\boxed{{\\frac{{1}}{{{below}}}}}"
            rows.append({"problem": problem, "solution": solution, "level": 2})
    return rows


def countdown_rows(rng: random.Random, count: int) -> Rows:
    """Generate countdown puzzles: numbers, and a target reachable with each number used once."""
    signs: list[Callable[[int, int], int]] = [operator.add, operator.sub, operator.mul]
    rows: Rows = []
    while len(rows) < count:
        numbers = [rng.randint(1, 9) for _ in range(rng.choice((2, 3)))]
        target, *others = numbers
        for number in others:
            target = rng.choice(signs)(target, number)
        if target > 0:
            rng.shuffle(numbers)
            rows.append({"numbers": numbers, "target": target})
    return rows


def code_rows(rng: random.Random, count: int) -> Rows:
    """Generate small programming tasks, tested by their output or by asserts."""
    rows: Rows = []
    for number in range(count):
        k = rng.randint(2, 9)
        if number % 2 == 0:
            cases = [(str(n), str(n * k)) for n in rng.sample(range(100), 3)]
            tests: Any = [{"input": f"{i}\n", "output": f"{o}\n"} for i, o in cases]
            prompt = f"Read a whole number from the input, and print {k} times that number."
            rows.append({"prompt": prompt, "tests": {"stdin_stdout": tests}})
        else:
            tests = [f"assert add({n}) == {n + k}" for n in rng.sample(range(100), 3)]
            prompt = f"Write a function `add(n)` that returns n plus {k}."
            rows.append({"prompt": prompt, "tests": {"asserts": tests}})
    return rows


def table_rows(rng: random.Random, count: int) -> Rows:
    """Generate questions with short answers, in the columns `prompt` and `gold`."""
    chosen = [rng.choice(list(CAPITALS.items())) for _ in range(count)]
    return [{"prompt": f"The capital of {land}?", "gold": city} for land, city in chosen]


def write_sample_data(folder: Path, *, rows: int = 64, seed: int = 0) -> list[Path]:
    """Write `math.jsonl`, `countdown.json`, `code.jsonl` and `table.csv`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("math.jsonl", "countdown.json", "code.jsonl", "table.csv")]
    maths, countdown, code, table = files
    for path, make in ((maths, math_rows), (code, code_rows)):
        path.write_text("".join(json.dumps(r) + "\n" for r in make(random.Random(seed), rows)))
    countdown.write_text(json.dumps(countdown_rows(random.Random(seed), rows), indent=1) + "\n")
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "gold"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_rows(random.Random(seed), rows))
    return files


def main(arguments: list[str] | None = None) -> int:
    """Write the files and print their paths."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_components.examples.sample_data",
        description="Write small generated data sets: math, countdown, code and a table.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="rows in each file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows: {options.rows} given; allowed: at least 1")
    try:
        files = write_sample_data(options.folder, rows=options.rows, seed=options.seed)
    except OSError as error:
        parser.error(f"{options.folder}: {error.strerror}; allowed: a writable folder")
    Console().print("\n".join(map(str, files)), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
