"""Writes the word problems that the tiny policy learns."""

from __future__ import annotations

import random
from typing import NamedTuple

PROMPT_TEMPLATE = "Question: {question}\nAnswer:\n"
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
