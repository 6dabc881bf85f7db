"""What an expression would cost to work out, estimated before anybody does."""

from __future__ import annotations

import math
import re
from typing import Any

MOST_BITS = 200_000
"""Of any number on the way: some 60,000 digits, worked out in milliseconds."""
_MOST_ARGUMENT_BITS = 4_000
"""Of what sine, logarithm and the like are taken of: their precision grows with it."""
_MOST_TERMS = 2_000
"""Of a power of a sum, once it is multiplied out, and of a written-out sum or product."""
_MOST_ENTRIES = 36
"""Of a matrix, and the highest power of one."""
_DEEPEST = 40
"""Brackets inside each other: the parser's time grows faster than their number."""
_BRACKET = re.compile(r"[\[({]|([\])}])")
_WORKED_OUT_WHEN_READ = re.compile(r"binom|choose|gcd|lcm")
_GROWS = re.compile(r"\d{6}|[\^!]|binom")
_NEAR = 40
"""Characters behind the name in which the numbers stand."""
_GROW_LIKE_FACTORIALS = ("factorial", "factorial2", "subfactorial", "gamma", "loggamma")
_GROW_LIKE_FACTORIALS += ("RisingFactorial", "FallingFactorial", "fibonacci", "bell", "catalan")
_RANGES = ("Sum", "Product")


def is_slow_to_read(text: str) -> bool:
    """Whether a text would keep the parser busy: nested brackets, a huge binomial."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = max(0, depth - 1) if bracket[1] else depth + 1
        if depth > _DEEPEST:
            return True
    names = _WORKED_OUT_WHEN_READ.finditer(text)
    return any(_GROWS.search(text, name.end(), name.end() + _NEAR) for name in names)


def is_costly(expression: Any) -> bool:
    """Whether a sympy expression, not worked out yet, has parts that would take long.

    Args:
        expression: of sympy; anything else is not costly.
    """
    try:
        return not _bits(expression) <= MOST_BITS
    except RecursionError:
        return True


def _bits(expression: Any) -> float:
    """About how many bits the largest number on the way has; infinite where a part is costly."""
    if getattr(expression, "is_Rational", False):
        return expression.p.bit_length() + expression.q.bit_length()
    kind, parts = type(expression).__name__, getattr(expression, "args", ())
    if getattr(expression, "is_Matrix", False):
        parts = list(expression) if hasattr(expression, "__iter__") else parts
        if len(parts) > _MOST_ENTRIES:
            return math.inf
    sizes = [_bits(part) for part in parts]
    if not sizes:
        return 0.0 if getattr(expression, "is_Float", False) else 1.0
    if not max(sizes) <= MOST_BITS:
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
    if getattr(expression, "is_Function", False) and max(sizes) > _MOST_ARGUMENT_BITS:
        return math.inf
    return sum(sizes)


def _largest(bits: float) -> float:
    """The largest whole number of as many bits."""
    return 2.0**bits if bits < 64 else math.inf


def _bits_of_power(base: Any, exponent: Any, base_bits: float, exponent_bits: float) -> float:
    number = exponent
    if getattr(exponent, "is_Mul", False):  # 3x, -n: of numbers and unknowns, the numbers count
        number = math.prod(part for part in exponent.args if part.is_Rational)
    if getattr(number, "is_Rational", not hasattr(number, "args")):
        # A root of 1/n is as costly as a power of n: the radicand is factored, 3 bits a digit.
        times = float(max(abs(getattr(number, "p", number)), getattr(number, "q", 1)))
    else:
        times = _largest(exponent_bits)
    if getattr(base, "is_Matrix", False):
        return base_bits * times if times <= _MOST_ENTRIES else math.inf
    terms = len(getattr(base, "args", ())) if getattr(base, "is_Add", False) else 1
    if terms > 1 and base.free_symbols and not exponent.free_symbols:
        most = math.comb(int(min(times, 10**6)) + terms - 1, terms - 1) if times < 10**6 else 10**9
        if most > _MOST_TERMS:
            return math.inf
    return max(base_bits, 1.0) * max(times, 1.0)


def _bits_of_range(expression: Any, sizes: list[float]) -> float:
    """Of a sum or product that could be written out."""
    terms = 1.0
    for _, *ends in expression.limits:
        if len(ends) == 2 and all(getattr(end, "is_Rational", False) for end in ends):
            terms *= max(1.0, float(abs(ends[1] - ends[0])))
        elif not any(getattr(end, "is_infinite", False) or end.free_symbols for end in ends):
            terms *= max(map(_largest, map(_bits, ends)), default=1.0)
    return math.inf if terms > _MOST_TERMS else sizes[0] * terms + sum(sizes)
