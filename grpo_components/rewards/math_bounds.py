"""Estimates how expensive an expression is to parse or evaluate, without evaluating it."""

from __future__ import annotations

import math
import re
from typing import Any

MAX_BITS = 200_000
"""Most bits of an intermediate number: about 60,000 digits, computed in milliseconds."""
_MAX_ARGUMENT_BITS = 4_000
"""Most bits of the argument of a sine, logarithm, ...: more bits need a higher precision."""
_MAX_TERMS = 2_000
"""Most terms of an expanded power of a sum, and of a sum or product over a range."""
_MAX_MATRIX_ENTRIES = 36
"""Most entries of a matrix; also the highest power of a matrix."""
_MAX_BRACKET_DEPTH = 40
"""Deepest nesting of brackets; the time to parse them grows faster than the depth."""
_BRACKET = re.compile(r"[\[({]|([\])}])")
_EVALUATED_BY_PARSER = re.compile(r"binom|choose|gcd|lcm")
_GROWS = re.compile(r"\d{6}|[\^!]|binom")
_ARGUMENT_CHARS = 40
"""Characters after a name of `_EVALUATED_BY_PARSER` that are searched for a large number."""
_GROW_LIKE_FACTORIALS = ("factorial", "factorial2", "subfactorial", "gamma", "loggamma")
_GROW_LIKE_FACTORIALS += ("RisingFactorial", "FallingFactorial", "fibonacci", "bell", "catalan")
_RANGES = ("Sum", "Product")


def is_slow_to_read(text: str) -> bool:
    """Whether a text is slow to parse: deeply nested brackets, or a huge binomial."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = max(0, depth - 1) if bracket[1] else depth + 1
        if depth > _MAX_BRACKET_DEPTH:
            return True
    names = _EVALUATED_BY_PARSER.finditer(text)
    return any(_GROWS.search(text, name.end(), name.end() + _ARGUMENT_CHARS) for name in names)


def is_costly(expression: Any) -> bool:
    """Whether an unevaluated sympy expression has parts that are expensive to evaluate.

    Args:
        expression: a sympy expression; anything else is not costly.
    """
    try:
        return not _bits(expression) <= MAX_BITS
    except RecursionError:
        return True


def _bits(expression: Any) -> float:
    """Estimate the bits of the largest intermediate number; infinity if a part is costly."""
    if getattr(expression, "is_Rational", False):
        return expression.p.bit_length() + expression.q.bit_length()
    kind, parts = type(expression).__name__, getattr(expression, "args", ())
    if getattr(expression, "is_Matrix", False):
        parts = list(expression) if hasattr(expression, "__iter__") else parts
        if len(parts) > _MAX_MATRIX_ENTRIES:
            return math.inf
    sizes = [_bits(part) for part in parts]
    if not sizes:
        return 0.0 if getattr(expression, "is_Float", False) else 1.0
    if not max(sizes) <= MAX_BITS:
        return math.inf
    if kind in ("Pow", "MatPow"):
        return _bits_of_power(*parts, *sizes)
    if getattr(expression, "is_Add", False):
        return max(sizes) + len(sizes)
    if kind in _GROW_LIKE_FACTORIALS:
        largest = _largest(max(sizes))
        return largest * math.log2(largest + 2)
    if kind == "binomial":
        n, k = map(_largest, sizes)
        return min(n, k * (sizes[0] + 1))
    if kind in _RANGES:
        return _bits_of_range(expression, sizes)
    if getattr(expression, "is_Function", False) and max(sizes) > _MAX_ARGUMENT_BITS:
        return math.inf
    return sum(sizes)


def _largest(bits: float) -> float:
    """Return an upper bound of integers with this number of bits; infinity from 64 bits on."""
    return 2.0**bits if bits < 64 else math.inf


def _bits_of_power(base: Any, exponent: Any, base_bits: float, exponent_bits: float) -> float:
    number = exponent
    if getattr(exponent, "is_Mul", False):  # in 3x or -n, only the numbers count
        number = math.prod(part for part in exponent.args if part.is_Rational)
    if getattr(number, "is_Rational", not hasattr(number, "args")):
        # An n-th root costs as much as an n-th power, because sympy factors the radicand.
        times = float(max(abs(getattr(number, "p", number)), getattr(number, "q", 1)))
    else:
        times = _largest(exponent_bits)
    if getattr(base, "is_Matrix", False):
        return base_bits * times if times <= _MAX_MATRIX_ENTRIES else math.inf
    terms = len(getattr(base, "args", ())) if getattr(base, "is_Add", False) else 1
    if terms > 1 and base.free_symbols and not exponent.free_symbols:
        num_terms = (
            math.comb(int(min(times, 10**6)) + terms - 1, terms - 1) if times < 10**6 else 10**9
        )
        if num_terms > _MAX_TERMS:
            return math.inf
    return max(base_bits, 1.0) * max(times, 1.0)


def _bits_of_range(expression: Any, sizes: list[float]) -> float:
    """Estimate the bits, like `_bits`, of a sum or product over a range."""
    terms = 1.0
    for _, *ends in expression.limits:
        if len(ends) == 2 and all(getattr(end, "is_Rational", False) for end in ends):
            terms *= max(1.0, float(abs(ends[1] - ends[0])))
        elif not any(getattr(end, "is_infinite", False) or end.free_symbols for end in ends):
            terms *= max(map(_largest, map(_bits, ends)), default=1.0)
    return math.inf if terms > _MAX_TERMS else sizes[0] * terms + sum(sizes)
