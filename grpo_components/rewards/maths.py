"""Rewards: what a response is worth, as small classes that a config names and weighs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from grpo_components.rewards.math_bounds import is_costly, is_slow_to_read

RESPONSE_CPU_S = 4.0
"""Of CPU time that a response may cost one of our rewards; one that costs more is worth 0 there."""

_NUMBERS_SIDE_BY_SIDE = re.compile(r"\d[\s()]+\d+(?!\s*/|\d)")
_CURRENCY = re.compile(r"^(?:(?:USD?|EUR|GBP)\b\s*(?:\\\$)?|[€£¥])\s*|\s*[€£¥¢]$")
# What may follow a number: a degree sign, `m^2`, `m/s`, `dollars`, `square units`; what is no unit
# but belongs to the value, or goes on, stays.
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:°\s?[CF]?|\^\{?\\circ\}?\s*(?:\\(?:text|mathrm)\{)?\s*[CF]?\}?"
    r"|\s[kcdm]?m\^?\{?[23]\}?|\sL|\s[A-Za-z]{1,3}/[A-Za-z]+"
    r"|\s(?!(?:or|and|to|pi|plus|minus|over|times|squared|cubed|factorial|root|sqrt|negative"
    r"|hal(?:f|ves)|thirds?|(?:fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
    r"|(?:dozen|score|hundred|thousand|lakh|crore|[mbtr]+illion)s?)\b)"
    r"[A-Za-z]{2,}(?: [A-Za-z]{2,})?(?: per [A-Za-z]+| ?/ ?[A-Za-z]+)?)$"
)
_PERCENT = re.compile(r"\s*\\?%$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{\s*\(?([A-Za-z][A-Za-z .'-]*?)\)?\s*\}")
_WORK = ("Sum", "Product", "Integral", "Limit")
_INFINITIES = ("Infinity", "NegativeInfinity", "ComplexInfinity", "NaN")
_MORE = 1000
"""Characters that an answer may have beyond those of the known one: a ramble takes long to read."""

_SIGNS = str.maketrans(
    {
        **{"–": "-", "−": "-", "~": " ", "⁄": "/", "×": r"\times ", "∞": r"\infty "},  # noqa: RUF001
        **{"²": "^{2}", "³": "^{3}", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge "},
        **{"½": r" \frac{1}{2}", "¼": r" \frac{1}{4}", "¾": r" \frac{3}{4}"},
    }
)


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    nines = 10 ** len(once + again) - 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


# Each a way to write numbers that math-verify reads as another number, or not at all.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<!\\)\$|\n"), " "),
    (re.compile(r"^\\\[(.*)\\\]$|^=\s*(.*)$", re.DOTALL), lambda m: m[1] or m[2] or ""),
    (re.compile(r"(?<=\d)(?:\\[,! ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    # `1 000 000`, where no other number follows
    (re.compile(r"^\D{0,2}\d{1,3}(?: \d{3})+(?![ \d]*\d)"), lambda m: m[0].replace(" ", "")),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s+(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<![\w./}])(\d+)\s+(\d+)\s*/\s*(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])"), r"\\times 10^{\1}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"\^\s*(-?\d+)"), r"^{\1}"),
    (re.compile(r"(\d+)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?"), _repeating),
    (re.compile(r"\s*percent$"), r"\\%"),
    (re.compile(r"\\(?:text|math)(?:rm|bf)?\{([^{}A-Za-z]*\d[^{}A-Za-z]*)\}"), r"\1"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\sqrt (?=\d{2})(\d+)"), r"\\sqrt{\1}"),
]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####([^\n]*)")


def _last(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda text: (pattern.findall(text) or [""])[-1]


def last_boxed(text: str) -> str:
    """The content of the last complete box, to its own closing brace."""
    for piece in reversed(re.split(r"\\boxed\s*\{", text)[1:]):
        depth = 1
        for match in re.finditer(r"\\.|[{}]", piece, re.DOTALL):  # `\{` is no brace of LaTeX's
            depth += (match[0] == "{") - (match[0] == "}")
            if depth == 0:
                return piece[: match.start()]
    return ""


_FIND: dict[str, Callable[[str], str]] = {
    "tag": _last(_TAG),
    "boxed": last_boxed,
    "gsm8k": _last(_HASHES),
    "plain": str,
}


class MathCorrectness:
    """1 if the response's final answer equals the known one as mathematics, else 0.

    The last marked answer counts, and all of it: `15` earns nothing where 5 is right, nor does
    `5 or 6`. Equality is math-verify's (`1/2` is `0.5`, `1,000` is `1000`), but where a number is
    asked for, `3+4` is no 7: a policy would learn to hand in the sum instead of working it out.
    A unit after a number is left out on both sides, and not compared: `18 apples`, `5\\text{ cm}`,
    `90^\\circ`, `$5` and `€5` are their numbers; `50%` is 50 as well as 0.5. A known answer in
    words, `\\text{even}`, is compared as text, capitals aside.

    Args:
        answer_format: where the answer stands: `tag` (<answer>5</answer>), `boxed` (\\boxed{5}),
            `gsm8k` (#### 5), or `plain` (the response is nothing but the answer).
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        if answer_format not in tuple(_FIND):
            allowed = ", ".join(_FIND)
            raise ValueError(f"answer_format: {answer_format!r} given; allowed: {allowed}")
        self._find = _FIND[answer_format]
        # Imported with the instance and not with the module: it takes seconds.
        self._math_verify = importlib.import_module("math_verify")

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: searched for the answer.
            answer: the known one.
            finish_reason: not used.

        Raises:
            ValueError: if the known answer is no mathematics.
        """
        given, answer = self._find(response_text).strip(), answer.strip()
        if not given or len(given) > len(answer) + _MORE or is_slow_to_read(given):
            return 0.0
        if given == answer:
            return 1.0
        if words := _WORDS.fullmatch(answer):  # as mathematics, `on` is `no`: the same factors
            return float(_words(given) == words[1].casefold())
        known, given = _rewritten(answer), _rewritten(given)
        bare = _PERCENT.sub("", known), _PERCENT.sub("", given)
        return float(self._equal(*bare) or (bare != (known, given) and self._equal(known, given)))

    def _equal(self, known: str, given: str) -> bool:
        if _NUMBERS_SIDE_BY_SIDE.search(given):  # math-verify adds `12 13` and `(12)(13)` up
            return False
        gold = self._parse(_without_unit(known))
        if not gold:
            raise ValueError(f"the known answer {known!r} cannot be read as mathematics")
        try:
            return self._equals(gold, known, given)
        except (ArithmeticError, RecursionError, MemoryError):  # of what the response says
            return False

    def _equals(self, gold: list[Any], known: str, given: str) -> bool:
        is_number = getattr(gold[0], "is_Number", False)
        read = self._parse(_without_unit(given) if is_number else given)
        if any(map(is_costly, [*gold, *read])):  # 9^{9^9}: compared as it is written
            return known == given or gold[0] in read[:1]
        if is_number and any(map(_leaves_work, read)):
            return False
        is_constant = getattr(gold[0], "is_number", False)  # as is a root
        if is_constant and any(map(_is_infinite, read)) and not _is_infinite(gold[0]):
            return False  # sympy may find that an infinite product is 5
        # Without time-outs of its own, which need signals: the reward pool has the deadline.
        return self._math_verify.verify(gold, read, timeout_seconds=None)

    def _parse(self, text: str) -> list[Any]:
        return self._math_verify.parse(
            f"${text.rstrip('.').strip()}$",
            extraction_config=[self._math_verify.LatexExtractionConfig()],
            parsing_timeout=None,
        )


def _rewritten(text: str) -> str:
    """The same answer, written as math-verify reads it."""
    text = text.strip("*` \n$").rstrip(",;").translate(_SIGNS).strip()
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    return text.strip()


def _words(text: str) -> str:
    inside = _WORDS.fullmatch(text)
    return (inside[1] if inside else text.strip("*`$() .")).casefold()


def _without_unit(text: str) -> str:
    return _UNIT.sub("", _CURRENCY.sub("", text.rstrip(".")))


def _leaves_work(expression: Any) -> bool:
    """Whether a sympy expression is no number yet: it has unknowns, or is to be worked out."""
    expression = getattr(expression, "rhs", expression)  # of `3+4=7` and `x=7`: the 7
    parts = getattr(expression, "args", ())
    numbers = [part for part in parts if part.is_Number and part != -1]
    joins = getattr(expression, "is_Add", False) or getattr(expression, "is_Mul", False)
    is_work = getattr(expression, "is_Symbol", False) or type(expression).__name__ in _WORK
    return is_work or (joins and len(numbers) > 1) or any(map(_leaves_work, parts))


def _is_infinite(expression: Any) -> bool:
    """Whether a sympy expression has an infinity anywhere, or a quotient by zero."""
    parts: tuple[Any, ...] = getattr(expression, "args", ())
    is_power_of_0 = getattr(expression, "is_Pow", False) and parts[0] == 0  # 1/0 is 0**-1
    is_one = type(expression).__name__ in _INFINITIES
    return is_one or is_power_of_0 or any(map(_is_infinite, parts))


Reward = Callable[..., float]
"""`reward(*, prompt_text, response_text, answer, finish_reason)`; success at its `max_reward`."""
