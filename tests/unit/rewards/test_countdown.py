"""The countdown reward: exact results, each number once, and only the allowed operations."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.rewards import judged

from grpo_components.rewards.countdown import CountdownCorrectness

ANSWER = json.dumps({"numbers": [3, 8, 1], "target": 24})


def score(text, answer=ANSWER, answer_format="tag"):
    return judged(CountdownCorrectness(answer_format), text, answer)


# What follows an equals sign is ignored.
RIGHT = ["3 * 8 * 1", "3*8/1 = 24", " (3 × 8) ÷ 1 ", "3 * 8 / 1 = 25"]  # noqa: RUF001
RIGHT += ["-(-3) * 8 * 1", "-" * 480 + "3 * 8 * 1"]
WRONG = ["3 + 8 + 1", "3 * 8", "24", "3 * 8 * 1 * 1", "3 * 8 + 1", "3 * 8 ** 1", "3 * 8 // 1"]
WRONG += ["3 * 8 * (1 + 0)", "3 * 8 * 1.0", "3 * 8 * True", "8 / (3 - 1 - 1 - 1)", "", "= 24"]
WRONG += ["3 * * 8 1", "three * 8 * 1", "3, 8, 1", "3 if 8 else 1", "__import__('os').getpid()"]
WRONG += ["(lambda: 3 * 8 * 1)()", "9 ** 9 ** 9 ** 9", "9" * 5000]
WRONG += ["(" * deep + "3" + ")" * deep for deep in (240, 5000)]


@pytest.mark.parametrize(
    ("expression", "worth"), [*((each, 1) for each in RIGHT), *((each, 0) for each in WRONG)]
)
def test_an_expression_scores(expression, worth):
    assert score(f"<answer>{expression}</answer>") == worth


def test_of_several_expressions_the_last_one_counts_and_an_unmarked_one_does_not():
    right, wrong = (f"<answer>{each[0]}</answer>" for each in (RIGHT, WRONG))
    assert [score(text) for text in (wrong + right, right + wrong, RIGHT[0])] == [1, 0, 0]


def test_quotients_are_exact_and_a_division_by_zero_is_worth_nothing():
    exact = json.dumps({"numbers": [1, 3, 3, 49], "target": 49})
    for text in ("49 * (1 / 3 * 3)", "1 / 3 * 3 * 49 "):
        assert score(f"<answer>{text}</answer>", exact) == 1
    zero = json.dumps({"numbers": [3, 3, 8], "target": 8})
    assert score("<answer>8 / (3 - 3)</answer>", zero) == 0


@given(numbers=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_combination_of_the_numbers_scores_by_its_value(numbers, seed):
    rng = random.Random(seed)
    text, value = str(numbers[0]), Fraction(numbers[0])
    for number in numbers[1:]:
        sign = rng.choice("+-*/")
        text = f"({text}) {sign} {number}"
        results = {"+": value + number, "-": value - number, "*": value * number}
        value = results.get(sign, value / number)
    target = int(value) if value.denominator == 1 else 10**9
    shuffled = rng.sample(numbers, len(numbers))
    answer = json.dumps({"numbers": shuffled, "target": target})
    assert score(f"<answer>{text}</answer>", answer) == (value == target)


def test_a_wrong_answer_or_format_is_refused():
    with pytest.raises(ValueError, match=r"^answer: '24'"):
        score("<answer>1</answer>", answer="24")
    with pytest.raises(ValueError, match=r"^answer_format: 'boxed'.* tag, last_line"):
        CountdownCorrectness("boxed")
