"""The countdown reward: exact results, each number once, and only the allowed operations."""

import json
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rewards.countdown import CountdownCorrectness

ANSWER = json.dumps({"numbers": [3, 8, 1], "target": 24})


def score(text, answer=ANSWER, answer_format="tag"):
    reward = CountdownCorrectness(answer_format)
    return reward(prompt_text="", response_text=text, answer=answer, finish_reason="stop")


@pytest.mark.parametrize(
    ("expression", "worth"),
    [
        ("3 * 8 * 1", 1),
        ("3*8/1 = 24", 1),
        (" (3 × 8) ÷ 1 ", 1),  # noqa: RUF001
        ("3 * 8 / 1 = 25", 1),  # what follows the equals sign is ignored
        ("-(-3) * 8 * 1", 1),
        ("3 * 8", 0),  # 1 is not used
        ("24", 0),
        ("3 * 8 * 1 * 1", 0),
        ("3 * 8 + 1", 0),
        ("3 * 8 ** 1", 0),
        ("3 * 8 // 1", 0),
        ("3 * 8 * (1 + 0)", 0),
        ("3 * 8 * 1.0", 0),
        ("3 * 8 * True", 0),
        ("8 / (3 - 1 - 1 - 1)", 0),
        ("", 0),
        ("= 24", 0),
        ("3 * * 8 1", 0),
        ("three * 8 * 1", 0),
        ("3, 8, 1", 0),
        ("3 if 8 else 1", 0),
        ("__import__('os').getpid()", 0),
        ("(lambda: 3 * 8 * 1)()", 0),
        ("9 ** 9 ** 9 ** 9", 0),
        ("(" * 5000 + "3" + ")" * 5000, 0),
        ("(" * 240 + "3" + ")" * 240, 0),
        ("-" * 480 + "3 * 8 * 1", 1),
        ("9" * 5000, 0),
    ],
)
def test_an_expression_scores(expression, worth):
    assert score(f"<answer>{expression}</answer>") == worth


RIGHT, WRONG = "<answer>3 * 8 * 1</answer>", "<answer>3 + 8 + 1</answer>"


@pytest.mark.parametrize(
    ("text", "worth", "given"),
    [
        ("<answer>8 / (3 - 3)</answer>", 0, {"numbers": [3, 3, 8], "target": 8}),
        # Quotients are exact.
        ("<answer>49 * (1 / 3 * 3)</answer>", 1, {"numbers": [1, 3, 3, 49], "target": 49}),
        ("<answer>1 / 3 * 3 * 49 </answer>", 1, {"numbers": [1, 3, 3, 49], "target": 49}),
        # The last expression counts.
        (WRONG + RIGHT, 1, None),
        (RIGHT + WRONG, 0, None),
        ("3 * 8 * 1", 0, None),
    ],
)
def test_a_response_scores(text, worth, given):
    assert score(text, json.dumps(given) if given else ANSWER) == worth


def test_the_last_line_may_be_the_expression():
    assert score("I try.\n3 * 8 * 1\n\n", answer_format="last_line") == 1
    assert score("3 * 8 * 1\nor so", answer_format="last_line") == 0


@given(numbers=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_combination_of_the_numbers_scores_by_its_value(numbers, seed):
    rng = random.Random(seed)
    text, value = str(numbers[0]), Fraction(numbers[0])
    for number in numbers[1:]:
        sign = rng.choice("+-*/")
        text = f"({text}) {sign} {number}"
        value = {"+": value + number, "-": value - number, "*": value * number}.get(
            sign, value / number
        )
    target = int(value) if value.denominator == 1 else 10**9
    shuffled = rng.sample(numbers, len(numbers))
    answer = json.dumps({"numbers": shuffled, "target": target})
    assert score(f"<answer>{text}</answer>", answer) == (value == target)


def test_a_wrong_answer_or_format_is_refused():
    with pytest.raises(ValueError, match=r"^answer: '24'"):
        score("<answer>1</answer>", answer="24")
    with pytest.raises(ValueError, match=r"^answer_format: 'boxed'.* tag, last_line"):
        CountdownCorrectness("boxed")
