"""The reward of the countdown game: an expression of given numbers that comes to a target."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from fractions import Fraction

from grpo_components.rewards.maths import RESPONSE_CPU_S

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LONGEST = 500  # characters of an expression
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class CountdownCorrectness:
    """1 if the last expression uses each number exactly once and comes to the target, else 0.

    Sums, differences, products, quotients and parentheses are worked out as fractions, exactly. An
    expression may end in `= 24`; what stands there is not looked at.

    Args:
        answer_format: where the expression stands: `tag` (<answer>3 * 8</answer>), or `last_line`
            (the last line that is not empty).
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        if answer_format not in ("tag", "last_line"):
            raise ValueError(f"answer_format: {answer_format!r} given; allowed: tag, last_line")
        self._format = answer_format

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: searched for the expression.
            answer: `{"numbers": [3, 8], "target": 24}`, as `countdown_dataset` has it.
            finish_reason: not used.

        Raises:
            ValueError: if the answer is none of these.
        """
        try:
            known = json.loads(answer)
            numbers, target = sorted(known["numbers"]), known["target"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"answer: {answer!r} has no numbers and target") from error
        places = _TAG.findall(response_text) if self._format == "tag" else response_text.split("\n")
        text = next((place for place in reversed(places) if place.strip()), "")
        expression = text.partition("=")[0].translate(_SIGNS).strip()
        if len(expression) > _LONGEST:
            return 0.0
        try:
            tree = ast.parse(expression, mode="eval").body
            # Before anything is worked out: no number but the given ones is ever touched.
            return float(sorted(_numbers(tree)) == numbers and _value(tree) == target)
        except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
            return 0.0


def _numbers(tree: ast.expr) -> Iterator[int]:
    """The numbers of an expression that has nothing but numbers, the four signs and a minus."""
    match tree:
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right):
            yield from _numbers(left)
            yield from _numbers(right)
        case ast.UnaryOp(ast.USub(), operand):
            yield from _numbers(operand)
        case ast.Constant(value) if type(value) is int:
            yield value
        case _:
            raise ValueError("no expression of the game")


def _value(tree: ast.expr) -> Fraction:
    match tree:
        case ast.BinOp(left, sign, right):
            a, b = _value(left), _value(right)
            if isinstance(sign, ast.Div):
                return a / b
            if isinstance(sign, ast.Mult):
                return a * b
            return a + b if isinstance(sign, ast.Add) else a - b
        case ast.UnaryOp(_, operand):
            return -_value(operand)
        case ast.Constant(value) if type(value) is int:
            return Fraction(value)
    raise AssertionError(f"{tree} was checked before")
