"""Reward for the countdown game: combine given numbers into an expression equal to a target."""

from __future__ import annotations

import ast
import json
import re
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from grpo_components.rewards.maths import RESPONSE_CPU_S

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_MAX_EXPRESSION_CHARS = 500
_SIGNS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}
_ASCII_OPERATORS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # noqa: RUF001


class CountdownCorrectness:
    """1 if the last expression uses each given number exactly once and equals the target, else 0.

    The expression may use + - * / and parentheses, and is computed exactly, with fractions.
    Anything after an equals sign (`3 * 8 = 24`) is ignored.

    Args:
        answer_format: where to find the expression: `tag` (<answer>3 * 8</answer>), or `last_line`
            (the last line that is not empty).
    """

    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        if answer_format not in ("tag", "last_line"):
            raise ValueError(f"answer_format: {answer_format!r} given; allowed: tag, last_line")
        self._format = answer_format

    def __call__(self, *, response_text: str, answer: str, **_: Any) -> float:
        """Score one response."""
        try:
            known = json.loads(answer)
            left, target = [*known["numbers"]], known["target"]
        except (ValueError, TypeError, KeyError) as error:
            allowed = "JSON with numbers and target"
            raise ValueError(f"answer: {answer!r} given; allowed: {allowed}") from error
        places = _TAG.findall(response_text) if self._format == "tag" else response_text.split("\n")
        text = next((place for place in reversed(places) if place.strip()), "")
        expression = text.partition("=")[0].translate(_ASCII_OPERATORS).strip()
        if len(expression) > _MAX_EXPRESSION_CHARS:
            return 0.0
        try:
            tree = ast.parse(expression, mode="eval").body
            return float(_value(tree, left) == target and not left)
        except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
            return 0.0


def _value(tree: ast.expr, left: list[int]) -> Fraction:
    """Compute an expression; remove its numbers from `left`, the given numbers not yet used."""
    match tree:
        case ast.BinOp(one, sign, other) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(one, left), _value(other, left))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, left)
        case ast.Constant(value) if type(value) is int:
            left.remove(value)  # a number that is not there is a ValueError
            return Fraction(value)
    raise ValueError("not a countdown expression")
