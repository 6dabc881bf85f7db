"""The reward for mathematics: compares the final answer of a response with the known one."""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import re
import string
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from grpo_components.data.boxes import last_boxed
from grpo_components.rewards.answer_text import Quantity, number, quantities, read, times, words

RESPONSE_CPU_S = 4.0
"""CPU seconds that a reward of this package may use for one response; above, the reward is 0."""

_MAX_EXTRA_CHARS = 1000
"""How many characters longer than the known answer an answer may be: long texts parse slowly."""
_TOLERANCE = Fraction(1, 10**9)
"""Relative difference up to which two numbers count as equal, if one is a decimal; else it is 0."""
_MAX_BITS, _MAX_DEPTH = 200_000, 40
"""Bits of the largest number that is evaluated (60,000 digits), and deepest nesting of brackets."""

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
FORMATS: dict[str, tuple[Callable[[str], str | None], str]] = {
    "tag": (lambda text: (_TAG.findall(text) or [None])[-1], "<answer>{}</answer>"),
    "boxed": (lambda text: last_boxed(text) or None, r"\boxed{{{}}}"),
    "gsm8k": (lambda text: (re.findall(r"####([^\n]*)", text) or [None])[-1], "#### {}"),
    "plain": (str, "{}"),
}
"""Per format: a function that finds a response's answer (or None), and a template to write one."""


def form_of_answers(answer_format: str) -> tuple[Callable[[str], str | None], str]:
    """Look up a format in `FORMATS`; an unknown one is a ValueError."""
    if answer_format not in tuple(FORMATS):
        raise ValueError(f"answer_format: {answer_format!r} given; allowed: {', '.join(FORMATS)}")
    return FORMATS[answer_format]


class MathCorrectness:
    """1 if the final answer of the response is mathematically equal to the known one, else 0.

    Only the last marked answer counts, and all of it: if 5 is right, `15` and `5 or 6` are wrong.
    The table in docs/rewards.md says what is accepted.

    Args:
        answer_format: where to find the answer: `tag` (<answer>5</answer>), `boxed` (\\boxed{5}),
            `gsm8k` (#### 5), or `plain` (the whole response).
    """

    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        self._find, self._write = form_of_answers(answer_format)
        # Imported here because they take seconds.
        self._math_verify = importlib.import_module("math_verify")
        self._sympy = importlib.import_module("sympy")
        oo, zoo, nan = (getattr(self._sympy, name) for name in ("oo", "zoo", "nan"))
        self._infinities = (oo, -oo, zoo, nan)
        # math-verify only warns that its time-outs are off: the reward pool has its own.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, *, response_text: str, answer: str, **_: Any) -> float:
        """Score one response."""
        given, answer = (self._find(response_text) or "").strip(), answer.strip()
        if not given or len(given) > len(answer) + _MAX_EXTRA_CHARS or _is_slow_to_read(given):
            return 0.0
        known = read(answer)
        if not known:
            raise ValueError(f"answer: cannot parse {answer!r} as mathematics; allowed: a formula")
        return float(given == answer or self._is_right(known, read(given, not _has_letters(known))))

    def perfect_response(self, *, answer: str) -> str:
        """Return the known answer as a response, in the answer format."""
        return self._write.format(answer)

    def _is_right(self, known: str, given: str) -> bool:
        (letter, value), (other, their_value) = _choice(known), _choice(given)
        if not letter:
            return self._equal(known, given)
        if other and (other != letter or not (value and their_value)):
            return other == letter
        return self._equal(value, their_value)

    def _equal(self, known: str, given: str) -> bool:
        """Compare two normalized answers: words, equations, lists, sets, or quantities."""
        squeezed = [re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text) for text in (known, given)]
        said = words(known), words(given)
        if squeezed[0] == squeezed[1] or any(said):
            return squeezed[0] == squeezed[1] or said[0] == said[1]
        joins = [{*re.findall("«(?:and|or)»", text)} for text in (known, given)]
        if all(joins) and joins[0] != joins[1] and _INEQUALITY.search(known + given):
            return self._is_same_set(known, given)
        values, others = _values(known), _values(given)
        is_equation = (values, others) != ([known], [given])
        if not any(map(_has_letters, values)):
            values = values[-1:]  # the known answer 3+4 = 7 means 7
        if is_equation and len(values) == 1 and any(self._equal(values[0], v) for v in others):
            # in 3+4 = 7, one side is the known number, and the others equal it
            return len(others) == 1 or all(self._is_same_value(values[0], v, False) for v in others)
        amounts, others = quantities(known), quantities(given)
        are_measures = all(len(side) == 1 and side[0].dimensions for side in (amounts, others))
        if are_measures and self._is_same_quantity(amounts[0], others[0]):
            return True  # 3 hours and 20 minutes
        (kind, ours), (other, theirs) = _items(known), _items(given)
        if kind and other and kind != other:
            return False
        if len(ours) == len(theirs) == 1:
            amounts, others = quantities(ours[0]), quantities(theirs[0])
            is_same = len(amounts) == len(others) and all(
                map(self._is_same_quantity, amounts, others)
            )
        else:
            is_ordered = (kind + other)[:1] in ("(", "[")
            is_same = len(ours) == len(theirs) and self._are_same_items(ours, theirs, is_ordered)
        return is_same or self._is_same_set(known, given)

    def _are_same_items(self, ours: list[str], theirs: list[str], is_ordered: bool) -> bool:
        if is_ordered:
            ours, theirs = _by_name(ours), _by_name(theirs)
        names = [*map(_name, ours)]
        is_named = len({*names} - {""}) == len(names)
        if is_ordered or (is_named and not any(map(_name, theirs))):  # x=1, y=2 and (1, 2)
            return all(map(self._equal, ours, theirs))
        left = list(theirs)
        for name, item in zip(names, ours, strict=True):
            alike = (it for it in left if not is_named or _name(it) in ("", name))
            match = next((it for it in alike if self._equal(item, it)), None)
            if match is None:
                return False
            left.remove(match)
        return True

    def _is_same_quantity(self, known: Quantity, given: Quantity) -> bool:
        """Compare two formulas with units and words; one side may lack units and words."""
        if not known.may_equal(given):
            return False
        if known.dimensions and given.dimensions:
            return self._is_same_value(known.value, times(given.value, given.factor / known.factor))
        sides = [(known.value, given.value), (known.plain, given.plain)]
        return any(self._is_same_value(*side) for side in dict.fromkeys(sides))

    def _is_same_value(self, known: str, given: str, is_final: bool = True) -> bool:
        """Compare formulas; if `is_final`, `3+4` is wrong for a `known` plain number such as 7."""
        ours, theirs = number(known), number(given)
        if ours is not None and theirs is not None:
            return abs(ours - theirs) <= ("." in known + given) * _TOLERANCE * abs(ours)
        if ":" in known + given:
            if _CLOCK.fullmatch(known) and _CLOCK.fullmatch(given):
                return known.zfill(5) == given.zfill(5)
            return self._equal(_quotients(known), _quotients(given))
        return (ours is None or not is_final) and self._is_same_formula(known, given)

    def _is_same_formula(self, known: str, given: str) -> bool:
        if re.search(r"\d[\s()]+\d+(?!\s*/|\d)|«", given) or bool(_EQUALS.search(known)) != bool(
            _EQUALS.search(given)
        ):
            return False  # math-verify would add `12 13`
        ours, theirs = self._parse(known), self._parse(given)
        if ours is None:
            raise ValueError(f"answer: cannot parse {known!r} as mathematics; allowed: a formula")
        letters = [{*_LETTER.findall(text)} for text in (known, given)]
        if {letter.swapcase() for letter in letters[0] - letters[1]} & (letters[1] - letters[0]):
            return False  # 3x and 3X
        try:
            return not isinstance(theirs, str | None) and self._are_equal(
                ours, theirs, "." in known + given
            )
        except (ArithmeticError, RuntimeError, MemoryError, TypeError, AttributeError):
            return False  # nested too deeply, not solvable: caused by the response

    def _are_equal(self, ours: Any, theirs: Any, is_decimal: bool) -> bool:
        if max(_bits(ours), _bits(theirs)) > _MAX_BITS:  # 9^{9^9}: compare as it is written
            return ours == theirs
        sp = self._sympy
        equations = [side for side in (ours, theirs) if isinstance(side, sp.Equality)]
        parts = [part for equation in equations for part in equation.args]
        if len(parts) == 4 and all(isinstance(it, sp.Expr) and not it.is_Matrix for it in parts):
            quotient = sp.simplify((ours.lhs - ours.rhs) / (theirs.lhs - theirs.rhs), doit=False)
            if quotient.is_number:
                return bool(quotient.is_finite and quotient.is_nonzero)
            opaque = (sp.core.function.AppliedUndef, sp.Derivative, sp.Limit, sp.Integral)
            if ours.has(*opaque) or theirs.has(*opaque) or not sp.solve(ours, ours.free_symbols):
                return False  # math-verify takes two equations without solutions as equal
        n = sp.Symbol("n", integer=True, positive=True)
        sides = [
            side.subs(dict.fromkeys([s for s in side.free_symbols if s.name == "n"], n))
            for side in (ours, theirs)
        ]
        are_numbers = [getattr(side, "is_number", False) for side in sides]
        if any(are_numbers) and any(side.has(*self._infinities) for side in sides):
            return ours == theirs  # sympy may call an infinite product equal to 5
        if all(are_numbers):
            one, two = (sp.N(side, 60) for side in sides)
            return bool(abs(one - two) <= (float(_TOLERANCE) if is_decimal else 1e-40) * abs(one))
        # math-verify's own time-out needs signals; the reward pool enforces the deadline instead.
        return self._math_verify.verify(
            *sides, timeout_seconds=None, allow_set_relation_comp=True, float_rounding=12
        )

    def _is_same_set(self, known: str, given: str) -> bool:
        if not re.search(r"<|>|\\[lg]e|\\cup|\\infty|\\setminus", known + given):
            return False
        try:
            ours = self._set(known)
            return ours is not None and ours == self._set(given)
        except (ArithmeticError, RecursionError, MemoryError, TypeError, NotImplementedError):
            return False

    def _set(self, text: str) -> Any:
        """Parse inequalities (`x<2 or x>3`) or an interval as a set of reals; None for others."""
        sets, names, join = [], set(), self._sympy.Union
        if _INEQUALITY.search(text):
            text, unions = re.subn(r"\\cup|«or»", ",", text)
            if "«and»" in text:
                if unions:
                    return None
                join = self._sympy.Intersection
        for part in map(self._parse, _split(text)):
            for item in part.args if isinstance(part, self._sympy.FiniteSet) else [part]:
                if _bits(item) > _MAX_BITS:
                    return None
                if isinstance(item, self._sympy.logic.boolalg.Boolean):
                    relations = item.atoms(self._sympy.core.relational.Relational)
                    sides = [(side.lhs - side.rhs).as_poly() for side in relations]
                    if not all(
                        side and side.is_univariate and side.degree() <= 2 for side in sides
                    ):
                        return None  # solving others may take minutes
                    names |= item.free_symbols
                    item = item.as_set()
                if not isinstance(item, self._sympy.Set):
                    return None
                sets.append(item)
        return join(*sets) if sets and len(names) < 2 else None

    def _parse(self, text: str) -> Any:
        letters = {*_LETTER.findall(text)}
        renamed = {"i": "I"} if letters - {"e"} == {"i"} else {}
        if len(letters & {*"kmn"}) == 1:  # 2k+1 and 2n+1 are one family of numbers
            renamed = dict.fromkeys("kmn", "n")
        text = _LETTER.sub(lambda match: renamed.get(match[0], match[0]), text.rstrip(". "))
        reading = [self._math_verify.LatexExtractionConfig()]
        found = self._math_verify.parse(
            f"${text}$", extraction_config=reading, parsing_timeout=None
        )
        return found[0] if found else None


_CHOICE = re.compile(
    r"(?:option|choice|answer)?\s*(?:[(\[]\s*([A-J])\s*[)\]][.:]?|([A-J])\s*(?:[).:](?=\D|$)|$))\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_NO_VALUE = r"\s*[,&]|and\b|or\b|\s*[-+*/^=_<>\\]?\s*\(?[A-J]\)?\s*(?:,|and\b|$)"
_NAME = re.compile(
    r"\\?[A-Za-z]\w{0,9}(?:_\{?\w+\}?)?(?:\s*\(\s*[A-Za-z]\s*\))?'*|\([A-Za-z](?:,\s*[A-Za-z])*\)"
    r"|[A-Za-z](?:\^\{-1\}|'+)?\s*\(\s*-?\w+\s*\)"
    r"|\\(?:angle|triangle|overline|vec|hat)\s*\{?\s*[A-Za-z]{1,3}\}?|«[^»]*»(?:\s*«[^»]*»)*"
)
_INEQUALITY = re.compile(r"<|>|\\[lg]e")
_EQUALS = re.compile(r"=(?![^{}]*\})")  # not that of \sum_{n=1}
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")


def _choice(text: str) -> tuple[str, str]:
    """Split a choice (`(C) 12`, `C. 12`, `C`) into letter and value; other texts have no letter."""
    match = _CHOICE.fullmatch(re.sub(r"[«»{}]|\\[a-z]+(?=\{\()", "", text).strip())
    value = re.sub(r"^[\s:.)]+", "", match[3]) if match else ""
    if not match or (value and re.match(_NO_VALUE, value)):
        return "", text
    return (match[1] or match[2]).upper(), read(value)


def _quotients(text: str) -> str:
    r"""Return the ratio `3:4:5` as `(\frac{3}{4},\frac{4}{5})`; another text as it is."""
    quotients = [
        times(a, 1 / value) if (value := number(b)) else rf"\frac{{{a}}}{{{b}}}"
        for a, b in itertools.pairwise(text.split(":"))
    ]
    return f"({','.join(quotients)})" if quotients else text


def _has_letters(text: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+|«[^»]*»", "", text)) is not None


def _name(text: str) -> str:
    left, equals, _ = text.partition("=")
    return left.strip() if equals and _NAME.fullmatch(left.strip()) else ""


def _by_name(items: list[str]) -> list[str]:
    """Sort items if their names are consecutive letters: y=2, x=1 becomes x=1, y=2."""
    names = [*map(_name, items)]
    is_named = all(names) and "".join(sorted(names)) in string.ascii_letters
    return sorted(items, key=_name) if is_named else items


def _values(text: str) -> list[str]:
    """Return the sides of an equation that are not names: `3+4` and `7` for `x = 3+4 = 7`."""
    sides = [side.strip() for side in _EQUALS.split(text)] if len(_split(text)) == 1 else [text]
    return [side for side in sides if not _NAME.fullmatch(side)] or [text]


def _items(text: str) -> tuple[str, list[str]]:
    """Split a list, tuple or set at its top level; return its brackets and its items."""
    text = text.strip()
    if len(signs := re.findall(r"\\(?:pm|mp)(?![a-z])", text)) == 1 and "," not in text:
        return "", [text.replace(signs[0], "+"), text.replace(signs[0], "-")]
    match = re.fullmatch(r"(\\\{|[\[({])(.*?)(\\\}|[\])}])", text, re.DOTALL)
    if match and (inner := _split(match[2])):
        if len(inner) > 1:
            return (match[1] + match[3]).replace("\\", ""), inner
        if match[1] != "[":
            return _items(match[2])
    return "", _split(text) or [text]


def _split(text: str) -> list[str]:
    """Split at commas, `and` and `or` outside brackets; no items if brackets do not match."""
    items, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|[,;&]|«(?:and|or)»|\\begin|\\end", text):
        if match[0] in ("(", "[", "{", r"\begin"):
            depth += 1
        elif match[0] in (")", "]", "}", r"\end"):
            depth -= 1
            if depth < 0:
                return []
        elif depth == 0:
            items.append(text[start : match.start()])
            start = match.end()
    return [item.strip() for item in [*items, text[start:]] if item.strip()]


def _is_slow_to_read(text: str) -> bool:
    """Whether a text is slow to parse: deep brackets, or binom, gcd or lcm of large numbers."""
    steps = (1 if mark in "[({" else -1 for mark in re.findall(r"[\[({\])}]", text))
    depths = itertools.accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)
    evaluated = r"(?:binom|choose|gcd|lcm).{0,40}?(?:\d{6}|[\^!]|binom)"  # by the parser itself
    return max(depths) > _MAX_DEPTH or re.search(evaluated, text) is not None


def _bits(expression: Any) -> float:
    """Estimate the bits of the largest number in evaluating an expression; inf if too costly."""
    if getattr(expression, "is_Rational", False):
        return expression.p.bit_length() + expression.q.bit_length()
    kind, is_matrix = type(expression).__name__, getattr(expression, "is_Matrix", False)
    parts: Any = getattr(expression, "args", ())
    if is_matrix and hasattr(expression, "__iter__"):
        parts = [*expression]
    sizes = [_bits(part) for part in parts]
    largest = max(sizes, default=1.0)
    if (is_matrix and len(parts) > 36) or largest > _MAX_BITS:
        return math.inf
    if kind in ("Pow", "MatPow"):
        power = math.prod(map(_size, parts[1].args if parts[1].is_Mul else parts[1:]))
        is_sum = any(getattr(parts[0], kind, False) for kind in ("is_Matrix", "is_Add"))
        return math.inf if power > 36 and is_sum else max(sizes[0], 1.0) * power
    if re.search("factorial|gamma|Factorial|fibonacci|bell|catalan", kind):
        return largest * 2.0 ** min(largest, 64)
    if kind in ("Sum", "Product"):
        terms = math.prod(_size(limit[2] - limit[1]) for limit in expression.limits)
        return math.inf if terms > 2000 else sizes[0] * terms
    return sum(sizes) or 1.0


def _size(expression: Any) -> float:
    """Return an upper bound of an expression's absolute value; 1 for a symbol."""
    bits = _bits(expression)
    if getattr(expression, "is_Rational", False) and bits < 64:
        return float(max(abs(expression.p), expression.q))
    is_number = getattr(expression, "is_number", False) and expression.is_finite is not False
    return 2.0 ** min(bits, 64) if is_number else 1.0
